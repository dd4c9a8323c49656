"""Alarms of CloudWatch that a region names: evidence about a machine, incidents about anything else, and a replacement
only if the region says so."""

import json

import pytest

from engine_agent.protocol.signatures import CLOUD_ALARM, CLOUD_ALARM_GRAVE, is_hard
from fleet.cells.models import CellMember
from fleet.clouds.models import CloudRegion
from fleet.clouds.services.alarms import cloud_alarms
from fleet.faults.models import Incident, Signal
from fleet.machines.models import Machine
from fleet.nodes.models import Node
from fleet.regions.models import Region
from kernel import clock
from lab.cloud.world import Ending, Fault
from tests.fleet import rows
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

    def alarm(self, name: str, machine: str = "", state: str = "ALARM", **dimensions: str) -> None:
        self.client.put_metric_alarm(
            AlarmName=name, Namespace="CWAgent", MetricName="efa_errors", Statistic="Sum", Period=60, Threshold=1,
            EvaluationPeriods=1, ComparisonOperator="GreaterThanThreshold",
            Dimensions=[
                {"Name": key, "Value": value} for key, value in ({"InstanceId": machine} | dimensions).items() if value
            ],
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


def test_an_alarm_of_a_group_or_a_cell_names_its_nodes_and_replaces_none(cloud_fleet: CloudFleet) -> None:
    watched = Watched(cloud_fleet, replaces=True)
    cell = rows.cell("chat-us-east-1-3")
    CellMember.objects.create(cell=cell, node_id=watched.node, rank=0)
    Region.objects.update(alarms=[{"prefix": "node-", "replaces": True}, {"prefix": "ttft-{cell}"}])
    cloud_fleet.world.backend("ec2", REGION).create_tags([watched.machine], {"aws:autoscaling:groupName": "trn1"})
    watched.alarm("node-group", AutoScalingGroupName="trn1")
    watched.alarm(f"ttft-{cell.pk}")
    watched.alarm("ttft-chat-us-east-1-30")

    assert watched.look() == []
    assert CloudRegion.objects.get().alarmed == {}
    group, of_cell = Incident.objects.order_by("subject")
    assert group.summary == (
        f"Alarm node-group of CloudWatch in {REGION}, about Auto Scaling group trn1 (1 node in 1 cell): 12 errors"
    )
    assert (group.evidence["nodes"], group.evidence["cells"]) == ([watched.node], [cell.pk])
    assert (of_cell.cell, of_cell.deployment) == (cell.pk, cell.deployment_id)
    assert of_cell.evidence["nodes"] == [watched.node]

    cloud_fleet.world.faults.append(Fault("DescribeInstances", ending=Ending.RESET, times=9))
    watched.alarm(f"ttft-{cell.pk}", state="OK")
    watched.look()
    assert Incident.objects.filter(state="open").count() == 2, "nothing changes while the group cannot be read"
    cloud_fleet.world.faults.clear()
    watched.look()
    assert Incident.objects.get(state="open").pk == group.pk
