"""Changes of traffic policies."""

import pytest

from kernel.models import Event
from kernel.refusals import InvalidInput
from tests.fleet import rows
from tests.fleet.rows import NOW
from traffic.region_shares.models import TrafficRule, TrafficWindow
from traffic.region_shares.selectors.traffic import traffic_policies
from traffic.region_shares.services.overrides import traffic_policy_change

pytestmark = pytest.mark.django_db


def test_what_is_not_named_stays_and_each_change_is_an_event() -> None:
    rows.deployment()
    traffic_policy_change(deployment="sim-70b", stated={"utilisation_cap": 0.7}, actor="ada", now=NOW)
    traffic_policy_change(deployment="sim-70b", stated={"tested_concurrency": 12}, actor="ada", now=NOW)
    policy = traffic_policies()["sim-70b"]
    assert (policy.utilisation_cap, policy.tested_concurrency) == (0.7, 12)
    assert TrafficRule.objects.get().revision == 2
    assert Event.objects.filter(kind="traffic.policy", actor="ada").count() == 2


def test_a_change_that_changes_nothing_leaves_no_trace() -> None:
    rows.deployment()
    traffic_policy_change(deployment="sim-70b", stated={"utilisation_cap": 0.8}, actor="ada", now=NOW)
    assert not TrafficRule.objects.exists()
    assert not Event.objects.exists()


def test_another_measure_of_capacity_looks_like_no_loss() -> None:
    rows.deployment()
    window = TrafficWindow.objects.create(deployment_id="sim-70b", region=rows.region(), samples=[[1, 2, 3, 64]])
    traffic_policy_change(deployment="sim-70b", stated={"utilisation_cap": 0.7}, actor="ada", now=NOW)
    window.refresh_from_db()
    assert window.samples
    traffic_policy_change(deployment="sim-70b", stated={"tested_concurrency": 4}, actor="ada", now=NOW)
    window.refresh_from_db()
    assert window.samples == []


@pytest.mark.parametrize(
    ("stated", "field"),
    [
        ({"residency": {"us-east-1": ["us-west-2"]}}, "residency.us-east-1"),
        ({"cost": {"mars": 2}}, "cost"),
        ({"colour": 1}, "colour"),
        ({"split": {"sim-70b": 9, "nowhere": 1}}, "split.nowhere"),
    ],
)
def test_what_breaks_a_rule_is_refused_whole(stated: dict[str, object], field: str) -> None:
    rows.deployment()
    rows.region("us-west-2")
    with pytest.raises(InvalidInput) as refused:
        traffic_policy_change(deployment="sim-70b", stated={"utilisation_cap": 0.5, **stated}, actor="ada", now=NOW)
    assert refused.value.field == field
    assert not TrafficRule.objects.exists()
