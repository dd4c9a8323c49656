"""Metrics of CloudWatch that a scaling policy names, from the test cloud into the decision of a place."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from fleet.autoscaling.models import MetricReading
from fleet.autoscaling.planning.policy import CloudMetric
from fleet.autoscaling.selectors import metric_values, ranged_fleet
from fleet.clouds.models import CloudRegion
from fleet.clouds.services.metrics import cloud_metrics_read, metric_data_request, newest_values
from fleet.deployments.models import Deployment, DeploymentRegion
from kernel import clock
from lab.cloud.world import Fault
from tests.fleet import rows
from tests.fleet.clouds.aws.cloud_fleet import REGION, CloudFleet, moment

NOW = datetime(2027, 1, 1, 12, 0, 30, tzinfo=UTC)
JOBS = {"namespace": "Jobs", "metric": "Waiting", "per_cell": 100, "dimensions": {"Queue": "a"}}


def value(now: datetime) -> Any:
    [[found]] = metric_values(ranged_fleet(now).deployments, now).values()
    return found


@pytest.mark.cloud
def test_the_newest_value_counts_until_it_is_old(cloud_fleet: CloudFleet) -> None:
    deployment = rows.deployment(where=REGION)
    DeploymentRegion.objects.update(cells_min=1, cells_max=8)
    Deployment.objects.update(scaling={"metrics": [JOBS, {**JOBS, "metric": "Other", "region": "elsewhere"}]})
    cloud, client = CloudRegion.objects.get(), cloud_fleet.world.client("cloudwatch")
    assert value(clock.now()).value is None

    cloud_metrics_read(cloud, clock.now())
    row = MetricReading.objects.get()
    assert (row.place.deployment_id, row.value, row.problem) == (deployment.pk, None, "CloudWatch has none")
    at = (moment(cloud_fleet.world) - timedelta(minutes=2)).replace(second=0)
    dimensions = [{"Name": "Queue", "Value": "a"}]
    data = {"MetricName": "Waiting", "Dimensions": dimensions, "Timestamp": at, "Value": 250.0}
    client.put_metric_data(Namespace="Jobs", MetricData=[data])
    cloud_metrics_read(cloud, clock.now())
    assert value(clock.now()).value == 250.0

    cloud_fleet.world.faults.append(Fault("GetMetricData", "AccessDenied", times=9))
    cloud_fleet.world.clock.advance(60)
    cloud_metrics_read(cloud, clock.now())
    assert value(clock.now()).value == 250.0, "one failed reading changes nothing"
    cloud_fleet.world.clock.advance(600)
    old = value(clock.now())
    assert old.value is None
    assert "AccessDenied" in old.problem
    assert cloud_fleet.world.count("GetMetricData") == 3, "one call for all metrics"
    Deployment.objects.update(scaling={})
    cloud_metrics_read(cloud, clock.now())


def test_a_call_asks_for_all_metrics_and_a_period_that_still_runs_does_not_count() -> None:
    metrics = [CloudMetric("Jobs", "Waiting", 100.0), CloudMetric("Jobs", "Age", 5.0, "p99.9", 300, {"Queue": "a"})]
    request = metric_data_request(metrics, NOW)
    assert request["StartTime"] == NOW - timedelta(seconds=1500)
    assert request["MetricDataQueries"][1]["MetricStat"] == {
        "Metric": {"Namespace": "Jobs", "MetricName": "Age", "Dimensions": [{"Name": "Queue", "Value": "a"}]},
        "Period": 300,
        "Stat": "p99.9",
    }
    minute = NOW.replace(second=0)
    results = [
        {"Id": "m0", "Timestamps": [minute, minute - timedelta(minutes=1)], "Values": [1.0, 2.0]},
        {"Id": "m1", "Timestamps": [minute], "Values": [3.0]},
        {"Id": "m7", "Timestamps": [minute], "Values": [4.0]},
    ]
    assert newest_values({"MetricDataResults": results}, metrics, NOW) == {metrics[0].key: (minute, 2.0)}
