"""Pools of capacity: order, reasons and pauses; markets of deployments and machines."""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.capacity.planning.pools import (
    ANY,
    SETTINGS,
    UNPRICED,
    Hopeless,
    InvalidMarkets,
    LaunchOutcome,
    Market,
    Markets,
    PausePool,
    PoolView,
    ResumePool,
    Scope,
    TryPool,
    UnitView,
    WaitFor,
    may_use,
    parse_markets,
    pauses,
    plan_pool,
    quota_family,
    stored,
    wanted_by_all,
    why_not,
)
from tests.fleet.fleets import NOW

ALL = frozenset(Market)
UNIT = UnitView("u-1", "us-east-1", "trn1.32xlarge", 2, ALL)


def pool(number: int, **changes: Any) -> PoolView:
    own = PoolView(
        id=number,
        region="us-east-1",
        instance_type="trn1.32xlarge",
        position=number,
        market=Market.ON_DEMAND,
        zone=f"us-east-1{'abcdef'[number % 6]}",
        subnet=f"subnet-{number}",
        image="ami-1",
        path=(f"use1-az{number}",),
    )
    return replace(own, **changes)


def later(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def tried(unit: UnitView, *pools: PoolView, now: datetime = NOW) -> int:
    step = plan_pool(unit, pools, now)
    assert isinstance(step, TryPool)
    return step.pool.id


def test_pools_are_tried_in_the_order_of_their_positions() -> None:
    step = plan_pool(UNIT, (pool(2), pool(1), pool(3)), NOW)
    assert step == TryPool(pool(1), "on_demand in us-east-1b")


def test_of_pools_that_would_do_alike_the_cheapest_is_tried_where_its_region_wants_that() -> None:
    dear, cheap = pool(1, extra_price=6.0), pool(2, market=Market.SPOT, extra_price=2.5)
    unknown, paid = pool(0, extra_price=UNPRICED), pool(3, market=Market.RESERVED, extra_price=0.0)
    assert plan_pool(UNIT, (unknown, dear, cheap), NOW) == TryPool(
        cheap, "spot in us-east-1c, cheapest at 2.50 $/h: on_demand in us-east-1b costs 6.00 $/h"
    )
    assert tried(UNIT, dear, cheap, paid) == 3
    assert tried(UNIT, unknown, dear) == 1
    assert tried(UNIT, pool(1, extra_price=2.5), cheap) == 1, "of equals the first by position"
    assert tried(replace(UNIT, near=("use1-az1",)), dear, cheap) == 1, "nearness comes first"
    assert tried(replace(UNIT, markets=frozenset({Market.ON_DEMAND})), dear, cheap) == 1


def test_a_pool_that_rests_is_passed_over_and_named() -> None:
    resting = pool(1, paused_until=later(60), pause_reason="InsufficientInstanceCapacity")
    step = plan_pool(UNIT, (resting, pool(2)), NOW)
    assert step == TryPool(
        pool(2),
        "on_demand in us-east-1c; not on_demand in us-east-1b: it is paused until 2026-11-21 12:01 UTC: "
        "InsufficientInstanceCapacity",
    )
    assert tried(UNIT, resting, pool(2), now=later(60)) == 1


def test_a_repair_goes_to_the_pool_nearest_to_the_nodes_that_stay() -> None:
    here = ("use1-az4", "nn-1", "nn-7")
    far, zone, near = pool(1), pool(2, path=here[:1]), pool(3, path=(*here[:2], "nn-9"), market=Market.RESERVED)
    step = plan_pool(replace(UNIT, near=here), (far, zone, near), NOW)
    assert step == TryPool(near, "reserved in us-east-1d, 2 of 3 network nodes shared")
    assert tried(replace(UNIT, near=here), far, zone) == 2
    assert tried(UNIT, far, zone, near) == 1


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"enabled": False}, "a user disabled it"),
        ({"market": Market.SPOT}, "its deployment does not use spot"),
        (
            {"market": Market.BLOCK, "reservation": "cr-1", "ends_at": later(3599)},
            "it ends at 2026-11-21 12:59 UTC, too soon for a new machine",
        ),
        ({"paused_until": later(60), "pause_reason": "Unsupported"},
         "it is paused until 2026-11-21 12:01 UTC: Unsupported"),
        ({"market": Market.RESERVED, "free": 1}, "its reservation has room for 1 of 2 machines"),
        ({"market": Market.RESERVED, "free": 2}, ""),
        ({"market": Market.OPEN, "free": 0}, ""),
        ({"market": Market.BLOCK, "ends_at": later(3601)}, ""),
        ({"paused_until": NOW}, ""),
    ],
)  # fmt: skip
def test_each_pool_says_why_not(changes: dict[str, Any], why: str) -> None:
    unit = replace(UNIT, markets=ALL - {Market.SPOT})
    assert why_not(unit, (pool(1, **changes),), NOW) == {1: why}


def test_one_waits_until_the_first_pool_is_rested() -> None:
    step = plan_pool(
        UNIT,
        (pool(1, paused_until=later(600), pause_reason="full"), pool(2, paused_until=later(60), pause_reason="full")),
        NOW,
    )
    assert isinstance(step, WaitFor)
    assert step.until == later(60)
    assert step.reason.startswith(
        "no pool of trn1.32xlarge may be used now; on_demand in us-east-1b: it is paused until"
    )


def test_where_no_pool_may_ever_do_nobody_waits() -> None:
    assert plan_pool(UNIT, (pool(1, instance_type="p5.48xlarge"),), NOW) == Hopeless(
        "us-east-1 has no pool of trn1.32xlarge"
    )
    off = plan_pool(UNIT, tuple(pool(number, enabled=False) for number in range(5)), NOW)
    assert isinstance(off, Hopeless)
    assert off.reason.endswith("a user disabled it; and 2 more")


def paused(outcome: LaunchOutcome, *pools: PoolView, scope: Scope = Scope.POOL) -> dict[int, float]:
    """Seconds of pause by pool, after a call in the first one."""
    return {
        step.pool: (step.until - NOW).total_seconds()
        for step in pauses(outcome, scope, "why", pools[0].id, pools, NOW)
        if isinstance(step, PausePool)
    }


@pytest.mark.parametrize("outcome", [LaunchOutcome.NO_CAPACITY, LaunchOutcome.REFUSED])
def test_rest_doubles_up_to_half_an_hour(outcome: LaunchOutcome) -> None:
    rests = [paused(outcome, pool(1, failures=failures), pool(2))[1] for failures in (0, 1, 2, 3, 4, 999)]
    assert rests == [180, 360, 720, 1440, 1800, 1800]
    assert set(paused(outcome, pool(1), pool(2))) == {1}


def test_a_full_subnet_rests_with_all_its_pools() -> None:
    pools = (pool(1), pool(2, subnet="subnet-1", market=Market.SPOT), pool(3))
    assert paused(LaunchOutcome.NO_CAPACITY, *pools, scope=Scope.SUBNET) == {1: 180, 2: 180}


def test_a_quota_rests_with_its_family_in_its_region_and_spot_has_its_own() -> None:
    pools = (
        pool(1),
        pool(2, instance_type="trn2.48xlarge"),
        pool(3, instance_type="p5.48xlarge"),
        pool(4, region="eu-west-1"),
        pool(5, market=Market.SPOT),
        pool(6, paused_until=later(7200), pause_reason="longer"),
    )
    assert paused(LaunchOutcome.NO_QUOTA, *pools) == {1: 3600, 2: 3600, 6: 7200}
    assert paused(LaunchOutcome.NO_QUOTA, pools[4], *pools[:4]) == {5: 3600}


def test_families_are_those_of_quotas() -> None:
    types = ("trn1n.32xlarge", "inf2.xlarge", "p6-b300.48xlarge", "g6e.48xlarge", "c7i.2xlarge", "m7i.large")
    assert [quota_family(name) for name in types] == ["trn", "inf", "p", "g", "standard", "standard"]


RESTS = {LaunchOutcome.NO_CAPACITY, LaunchOutcome.NO_QUOTA, LaunchOutcome.REFUSED}


@pytest.mark.parametrize(
    "outcome",
    sorted(set(LaunchOutcome) - RESTS - {LaunchOutcome.LAUNCHED}),
)
def test_nothing_else_makes_a_pool_rest(outcome: LaunchOutcome) -> None:
    assert pauses(outcome, Scope.POOL, "why", 1, (pool(1, failures=2),), NOW) == ()


def test_a_launch_forgets_failures() -> None:
    assert pauses(LaunchOutcome.LAUNCHED, Scope.POOL, "", 1, (pool(1, failures=2),), NOW) == (ResumePool(1),)
    assert pauses(LaunchOutcome.LAUNCHED, Scope.POOL, "", 1, (pool(1),), NOW) == ()


def test_a_pool_that_was_removed_meanwhile_does_not_rest() -> None:
    assert pauses(LaunchOutcome.NO_CAPACITY, Scope.POOL, "why", 1, (pool(2),), NOW) == ()


POOLS = st.builds(
    pool,
    st.integers(1, 6),
    region=st.sampled_from(["us-east-1", "eu-west-1"]),
    instance_type=st.sampled_from(["trn1.32xlarge", "p5.48xlarge"]),
    position=st.integers(0, 2),
    market=st.sampled_from(Market),
    path=st.sampled_from([(), ("use1-az1",), ("use1-az1", "nn-1"), ("use1-az2", "nn-2")]),
    free=st.sampled_from([None, 0, 1, 2]),
    enabled=st.booleans(),
    paused_until=st.sampled_from([None, NOW, later(1), later(900)]),
    ends_at=st.sampled_from([None, NOW, later(3600), later(86400)]),
    failures=st.integers(0, 40),
)
UNITS = st.builds(
    UnitView,
    st.just("u-1"),
    region=st.just("us-east-1"),
    instance_type=st.just("trn1.32xlarge"),
    count=st.integers(1, 4),
    markets=st.frozensets(st.sampled_from(Market)),
    near=st.sampled_from([(), ("use1-az1", "nn-1")]),
)


@given(UNITS, st.lists(POOLS, max_size=6, unique_by=lambda one: one.id), st.randoms(use_true_random=False))
def test_what_is_tried_may_be_used_and_the_order_of_rows_says_nothing(
    unit: UnitView, pools: list[PoolView], random: Any
) -> None:
    step = plan_pool(unit, pools, NOW)
    shuffled = list(pools)
    random.shuffle(shuffled)
    assert plan_pool(unit, shuffled, NOW) == step
    if isinstance(step, TryPool):
        found = step.pool
        assert (found.region, found.instance_type) == (unit.region, unit.instance_type)
        assert found.enabled
        assert found.market in unit.markets
        assert found.paused_until is None or found.paused_until <= NOW
        margin = timedelta(seconds=SETTINGS.boot_s + SETTINGS.block_margin_s)
        assert found.ends_at is None or found.ends_at - NOW > margin
    elif isinstance(step, WaitFor):
        assert step.until > NOW


@given(
    st.sampled_from(LaunchOutcome), st.sampled_from(Scope), st.lists(POOLS, min_size=1, unique_by=lambda one: one.id)
)
def test_no_pause_ends_earlier_and_none_is_longer_than_its_bound(
    outcome: LaunchOutcome, scope: Scope, pools: list[PoolView]
) -> None:
    by_id = {one.id: one for one in pools}
    for step in pauses(outcome, scope, "why", pools[0].id, pools, NOW):
        if isinstance(step, PausePool):
            before = by_id[step.pool].paused_until
            assert step.until >= max(NOW, before or NOW)
            bound = later(max(SETTINGS.pause_most_s, SETTINGS.quota_pause_s))
            assert step.until <= max(bound, before or NOW)


FIRM: Markets = frozenset({Market.RESERVED, Market.ON_DEMAND})
SPOT: Markets = frozenset({Market.SPOT})


def test_markets_are_stored_in_one_order_however_they_were_stated() -> None:
    assert stored(parse_markets(["on_demand", "reserved"])) == ["reserved", "on_demand"]
    assert parse_markets([]) == ANY


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        (["spott"], "'spott' is not a market; choose from: reserved, block, open, on_demand, interruptible, spot"),
        ([["spot"]], r"\['spot'\] is not a market"),
        ([1], "1 is not a market"),
        (["spot", "spot"], "spot is repeated"),
        ("spot", "markets must be a list of some of: reserved"),
        ({"spot": 1}, "markets must be a list of some of"),
    ],
)
def test_what_is_no_list_of_markets_is_refused(stated: Any, said: str) -> None:
    with pytest.raises(InvalidMarkets, match=said):
        parse_markets(stated)


def test_only_a_machine_of_which_it_is_certain_is_used_where_markets_are_stated() -> None:
    assert all(may_use(ANY, machine) for machine in (ANY, SPOT, FIRM))
    assert all(may_use(FIRM, machine) for machine in (frozenset({Market.RESERVED}), FIRM))
    assert not any(may_use(FIRM, machine) for machine in (SPOT, FIRM | SPOT, ANY))


def test_what_all_want_is_what_each_may_use() -> None:
    assert wanted_by_all([ANY, FIRM, SPOT | {Market.RESERVED}]) == {Market.RESERVED}
    assert wanted_by_all([FIRM, SPOT]) == wanted_by_all([ANY]) == wanted_by_all([]) == ANY
