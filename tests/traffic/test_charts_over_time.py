"""Shares are constant between two changes, and an hour without requests is zero, not a gap."""

from datetime import timedelta

import pytest

from tests.controlplane.dashboard.fleets import one_more_of_everything
from tests.fleet.rows import NOW
from traffic.keys.pages.data import HOURS_SHOWN, key_chart, tenant_chart
from traffic.region_shares.models import TrafficShift
from traffic.region_shares.pages.data import share_charts
from traffic.usage.models import UsageHour

pytestmark = pytest.mark.django_db


def test_shares_hold_until_the_next_change() -> None:
    one_more_of_everything(0)
    later = NOW + timedelta(hours=1)
    TrafficShift.objects.create(
        deployment_id="deployment-0", revision=2, kind="relief", moved=0.2, reason="r", at=later,
        shares={"region-0": {"region-0": 0.5, "elsewhere": 0.5}},
    )  # fmt: skip
    (chart,) = share_charts(NOW + timedelta(hours=2))
    (series,) = chart.series
    assert series.name == "from region-0"
    assert series.values[0] is None
    assert [round(value or 0) for value in (series.values[-90], series.values[-30])] == [30, 50]


def test_hours_without_use_are_zero_and_the_largest_tenants_have_a_line() -> None:
    for number in range(7):
        one_more_of_everything(number)
    UsageHour.objects.filter(tenant="tenant-3", requests=7).update(completion_tokens=1000)
    chart = tenant_chart(UsageHour.objects.latest("hour").hour)
    assert chart.series[0].name == "tenant-3"
    assert chart.series[0].values == [0.0] * (HOURS_SHOWN - 1) + [1000.0]
    assert len(chart.series) == 5


def test_a_key_without_requests_has_an_empty_chart() -> None:
    one_more_of_everything(0)
    now = UsageHour.objects.latest("hour").hour
    assert key_chart("none", now).is_empty
    assert key_chart("0a000000", now).series[0].values[-1] == 7.0
