"""Reads the metrics of CloudWatch that scaling policies name, for the places in a region of a cloud: one call a minute
for all of them. A metric without a value keeps its last one until it is too old (`fleet.autoscaling.selectors`)."""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from fleet.autoscaling.models import MetricReading
from fleet.autoscaling.planning.policy import CloudMetric, InvalidScaling
from fleet.clouds.aws.calls import CallFailed, call
from fleet.clouds.models import CloudRegion
from fleet.deployments.models import DeploymentRegion

QUERIES_MOST = 100
"""In one call; CloudWatch allows 500. Further metrics of a region are not read, and say so."""
PERIODS_READ = 3
LATE_S = 600.0
"""How late CloudWatch may show the newest value of a service."""

log = logging.getLogger(__name__)


def cloud_metrics_read(cloud: CloudRegion, now: datetime) -> None:
    """Reads the newest complete period of each metric. Blocks as long as the cloud does."""
    wanted = list(_metrics_of(cloud.pk))
    if not wanted:
        return
    metrics = {metric.key: metric for _, metric in wanted}
    asked = dict(sorted(metrics.items())[:QUERIES_MOST])
    problem, values = "", {}
    try:
        answer = call("cloudwatch", "GetMetricData", cloud.aws_region, **metric_data_request(list(asked.values()), now))
        values = newest_values(answer, list(asked.values()), now)
    except CallFailed as error:
        log.warning("metrics of region %s were not read: %s", cloud.pk, error)
        problem = str(error)
    for place, metric in wanted:
        at, value = values.get(metric.key, (None, None))
        missing = problem or (
            "CloudWatch has none" if metric.key in asked else f"over {QUERIES_MOST} metrics in a region"
        )
        columns = {"value": value, "at": at, "problem": ""} if value is not None else {"problem": missing}
        MetricReading.objects.update_or_create(place=place, key=metric.key, defaults={**columns, "read_at": now})
    kept = MetricReading.objects.filter(place__region_id=cloud.pk)
    kept.exclude(key__in=metrics).delete()


def _metrics_of(region: str) -> Iterable[tuple[DeploymentRegion, CloudMetric]]:
    """Of places with a range. Invalid policies are reported by the autoscaler."""
    rows = DeploymentRegion.objects.filter(region_id=region, cells_max__isnull=False)
    for place in rows.select_related("deployment"):
        try:
            policy = place.deployment.scaling_policy()
        except InvalidScaling:
            continue
        yield from ((place, metric) for metric in policy.metrics if metric.region in ("", region))


def metric_data_request(metrics: Sequence[CloudMetric], now: datetime) -> dict[str, Any]:
    """Returns the parameters of `GetMetricData`. `Id` is the position in `metrics`."""
    longest_s = max(metric.period_s for metric in metrics)
    return {
        "MetricDataQueries": [
            {
                "Id": f"m{index}",
                "MetricStat": {
                    "Metric": {
                        "Namespace": metric.namespace,
                        "MetricName": metric.metric,
                        "Dimensions": [{"Name": name, "Value": value} for name, value in metric.dimensions.items()],
                    },
                    "Period": metric.period_s,
                    "Stat": metric.statistic,
                },
            }
            for index, metric in enumerate(metrics)
        ],
        "StartTime": now - timedelta(seconds=PERIODS_READ * longest_s + LATE_S),
        "EndTime": now,
        "ScanBy": "TimestampDescending",
    }


def newest_values(
    answer: Mapping[str, Any], metrics: Sequence[CloudMetric], now: datetime
) -> dict[str, tuple[datetime, float]]:
    """Returns end and value of the newest period that is over, by key. A period that still runs has only a part of its
    data."""
    found: dict[str, tuple[datetime, float]] = {}
    for result in answer["MetricDataResults"]:
        index = str(result.get("Id", "")).removeprefix("m")
        if not index.isdecimal() or int(index) >= len(metrics):
            continue
        metric = metrics[int(index)]
        points = (
            (begins + timedelta(seconds=metric.period_s), float(value))
            for begins, value in zip(result.get("Timestamps") or (), result.get("Values") or (), strict=False)
        )
        over = [(ends, value) for ends, value in points if ends <= now and math.isfinite(value)]
        if over:
            found[metric.key] = max(over)
    return found
