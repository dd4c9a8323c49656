"""Alarms of CloudWatch that a region names: evidence about a machine, incidents about anything else, and a replacement
only if the region says so."""

import json
from typing import Any

import pytest

from engine_agent.protocol.signatures import CLOUD_ALARM, CLOUD_ALARM_GRAVE, is_hard
from fleet.clouds.models import CloudRegion
from fleet.clouds.planning.alarms import SOURCES_MOST, AlarmSource, parse_alarms
from fleet.clouds.services.alarms import cloud_alarms
from fleet.faults.models import Incident, Signal
from fleet.machines.models import Machine
from fleet.nodes.models import Node
from fleet.regions.models import Region
from kernel import clock
from kernel.constraints import InvalidField
from lab.cloud.world import Ending, Fault
from tests.fleet.clouds.aws.cloud_fleet import REGION, CloudFleet

pytestmark = pytest.mark.cloud


class Watched:
    """A region with one node, which names alarms."""

    def __init__(self, fleet: CloudFleet, *, replaces: bool = False) -> None:
        self.fleet = fleet
        [self.node] = fleet.order(1)
        fleet.provision()
        Node.objects.filter(id=self.node).update(state="ready")
        self.machine = Machine.objects.get(runs=self.node).provider_id
        Region.objects.update(alarms=[{"prefix": "node-", "replaces": replaces}])
        self.client = fleet.world.client("cloudwatch")

    def alarm(self, name: str, machine: str = "", state: str = "ALARM") -> None:
        self.client.put_metric_alarm(
            AlarmName=name, Namespace="CWAgent", MetricName="efa_errors", Statistic="Sum", Period=60, Threshold=1,
            EvaluationPeriods=1, ComparisonOperator="GreaterThanThreshold",
            Dimensions=[{"Name": "InstanceId", "Value": machine}] if machine else [],
        )  # fmt: skip
        self.client.set_alarm_state(
            AlarmName=name, StateValue=state, StateReason="12 errors", StateReasonData=json.dumps({})
        )

    def look(self) -> list[Signal]:
        self.fleet.world.clock.advance(30)
        cloud_alarms(CloudRegion.objects.get(), clock.now())
        return list(Signal.objects.filter(settled_at=None))


def test_an_alarm_of_a_machine_is_evidence_about_its_node_until_it_is_over(cloud_fleet: CloudFleet) -> None:
    watched = Watched(cloud_fleet)
    watched.alarm("other-efa", watched.machine)
    watched.alarm("node-efa", "i-0123456789abcdef0")
    watched.alarm("node-fine", watched.machine, "OK")
    assert watched.look() == [], "of another name, of another machine, and not in alarm"

    watched.alarm("node-efa", watched.machine)
    [signal] = watched.look()
    assert (signal.node_id, signal.signature, signal.summary) == (
        watched.node,
        CLOUD_ALARM,
        "alarm node-efa: 12 errors",
    )
    assert signal.evidence["alarms"][0]["alarm"] == "node-efa"
    assert not is_hard(signal.signature)
    assert CloudRegion.objects.get().alarmed == {}
    assert [one.pk for one in watched.look()] == [signal.pk]
    assert not Incident.objects.exists(), "the planner of faults opens it"

    cloud_fleet.world.faults.append(Fault("DescribeAlarms", ending=Ending.RESET, times=9))
    assert [one.pk for one in watched.look()] == [signal.pk], "no answer changes nothing"
    cloud_fleet.world.faults.clear()
    watched.alarm("node-efa", watched.machine, "OK")
    assert watched.look() == []


def test_an_alarm_replaces_a_machine_only_if_the_region_says_so(cloud_fleet: CloudFleet) -> None:
    watched = Watched(cloud_fleet, replaces=True)
    watched.alarm("node-efa", watched.machine)
    [signal] = watched.look()
    assert signal.signature == CLOUD_ALARM_GRAVE
    assert is_hard(signal.signature)
    assert CloudRegion.objects.get().alarmed == {watched.machine: "node-efa"}

    Region.objects.update(alarms=[{"prefix": "node-"}])
    [signal] = watched.look()
    assert signal.signature == CLOUD_ALARM
    Region.objects.update(alarms=[])
    assert watched.look() == []
    assert CloudRegion.objects.get().alarmed == {}


def test_an_alarm_without_a_machine_is_an_incident_and_a_denied_call_as_well(cloud_fleet: CloudFleet) -> None:
    watched = Watched(cloud_fleet)
    watched.alarm("node-storage")
    watched.look()
    incident = Incident.objects.get()
    assert (incident.kind, incident.subject, incident.region) == ("cloud-alarm", f"{REGION}/node-storage", REGION)

    cloud_fleet.world.faults.append(Fault("DescribeAlarms", "AccessDenied", times=9))
    watched.look()
    assert set(Incident.objects.filter(state="open").values_list("kind", flat=True)) == {
        "cloud-alarm",
        "notices-unread",
    }
    cloud_fleet.world.faults.clear()
    watched.alarm("node-storage", state="OK")
    watched.look()
    assert not Incident.objects.filter(state="open").exists()


def test_alarms_of_a_region_are_parsed_strictly() -> None:
    assert parse_alarms([{"prefix": "a"}, {"prefix": "b", "replaces": True}])[1] == AlarmSource("b", replaces=True)
    twice = [{"prefix": "a"}, {"prefix": "a", "replaces": True}]
    many = [{"prefix": f"a{index}"} for index in range(SOURCES_MOST + 1)]
    long = [{"prefix": "x" * 256}]
    mistakes: list[Any] = [None, "a", ["a"], [{}], [{"prefix": ""}], long, [{"prefix": "a", "of": 1}], twice, many]
    for wrong in mistakes:
        with pytest.raises(InvalidField, match="alarms"):
            parse_alarms(wrong)
