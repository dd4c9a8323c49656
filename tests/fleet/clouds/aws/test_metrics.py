"""The figures that CloudWatch receives match the alarm of the stack."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from fleet.clouds.aws.identity import install_ensure
from fleet.clouds.models import CloudRegion, Install
from fleet.clouds.planning.upkeep import NAMESPACE
from fleet.clouds.services.upkeep import cloud_metrics_send
from fleet.reconcile.planning.states import CloudRegionState
from kernel import clock
from kernel.loop_passes import loop_passed
from kernel.models import LoopPass
from lab.cloud.stack import HOME, deploy_base
from lab.cloud.world import Ending, Fault, When
from tests.fleet.clouds.aws.cloud_fleet import CloudFleet

pytestmark = pytest.mark.cloud

AROUND = timedelta(hours=2)


def heard(fleet: CloudFleet, alarm: dict[str, Any], region: str = HOME) -> list[float]:
    """Returns the value that an alarm compares with its threshold."""
    # moto stamps data with the real clock, as CloudWatch does with its own.
    now = datetime.now(UTC)
    asked = {key: alarm[key] for key in ("Namespace", "MetricName", "Dimensions", "Period")}
    points = fleet.world.client("cloudwatch", region).get_metric_statistics(
        **asked, Statistics=[alarm["Statistic"]], StartTime=now - AROUND, EndTime=now + AROUND
    )["Datapoints"]
    return [point[alarm["Statistic"]] for point in points]


@pytest.fixture
def alarm(cloud_fleet: CloudFleet) -> dict[str, Any]:
    """Of the base stack of this install."""
    deploy_base(cloud_fleet.world, install_ensure(clock.now()).pk)
    found: dict[str, Any] = cloud_fleet.world.client("cloudwatch").describe_alarms()["MetricAlarms"][0]
    return found


def test_the_alarm_of_the_base_is_fed_while_the_reconciler_passes(
    cloud_fleet: CloudFleet, alarm: dict[str, Any]
) -> None:
    loop_passed("fleet.reconcile")

    assert cloud_metrics_send(clock.now()) == ""

    assert cloud_fleet.world.count("PutMetricData") == 1
    assert sum(heard(cloud_fleet, alarm)) >= alarm["Threshold"]
    sent = cloud_fleet.world.client("cloudwatch").list_metrics(Namespace=NAMESPACE)["Metrics"]
    names = {"CompletedPasses", "CellsWanted", "CellsReady", "OpenIncidents", "LastPassAge"}
    assert {metric["MetricName"] for metric in sent} == names
    assert {metric["Dimensions"][0]["Value"] for metric in sent} == {Install.objects.get().pk}


def test_without_a_pass_it_hears_zero(cloud_fleet: CloudFleet, alarm: dict[str, Any]) -> None:
    loop_passed("fleet.provision")
    LoopPass.objects.filter(loop="fleet.reconcile").update(passed_at=datetime.now(UTC) - AROUND)

    assert cloud_metrics_send(clock.now()) == ""

    assert heard(cloud_fleet, alarm) == [0.0]
    assert alarm["Threshold"] > 0.0


def test_metrics_go_where_the_base_is_and_an_alarm_hears(cloud_fleet: CloudFleet, alarm: dict[str, Any]) -> None:
    cloud = CloudRegion.objects.get()
    cloud.aws_region, cloud.base["home"] = "eu-west-1", HOME
    cloud.save()
    loop_passed("fleet.reconcile")

    cloud_metrics_send(clock.now())

    assert heard(cloud_fleet, alarm)
    assert not heard(cloud_fleet, alarm, "eu-west-1")


def test_a_copied_database_does_not_keep_the_alarm_quiet(cloud_fleet: CloudFleet) -> None:
    install_ensure(clock.now())
    Install.objects.update(read_only="another control plane holds it")
    loop_passed("fleet.reconcile")

    assert cloud_metrics_send(clock.now()) == "this install holds no cloud: another control plane holds it"

    assert not cloud_fleet.world.count("PutMetricData")


def test_without_a_region_that_is_ready_nothing_is_sent(cloud_fleet: CloudFleet) -> None:
    CloudRegion.objects.update(state=CloudRegionState.READING)

    assert cloud_metrics_send(clock.now()) == "no region of aws is ready"

    assert not cloud_fleet.world.count("PutMetricData")


@pytest.mark.parametrize(
    "fault",
    [Fault("PutMetricData", "AccessDenied"), Fault("PutMetricData", when=When.AFTER, ending=Ending.RESET)],
    ids=["denied", "lost"],
)
def test_what_cloudwatch_does_not_take_is_said_and_not_sent_twice(cloud_fleet: CloudFleet, fault: Fault) -> None:
    install_ensure(clock.now())
    cloud_fleet.world.faults.append(fault)

    assert cloud_metrics_send(clock.now()).startswith("CloudWatch in us-east-1 accepted none: ")

    assert cloud_fleet.world.count("PutMetricData") == 1
