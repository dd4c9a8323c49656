"""For any demand on a pool too small and any failures: protected minimums stay, the system settles without moving cells
back and forth, in the end no deployment lacks what a lower priority could give, and quotas hold."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.deployments.planner import QuotaView, SharingPolicy, UpdatePolicy
from fleet.quotas.planning.turns import plan_quotas, shares_of
from simulator.fleet_spec import DeploymentSpec, FleetSpec, build_fleet
from tests.fleet.fleets import KIND
from tests.fleet.quotas.fleets import Wants, pool
from tests.fleet.quotas.world import KEPT_S, ShareWorld

NAMES = ("chat", "docs", "night")
PRIORITIES = {"chat": 6, "docs": 4, "night": 2}
STEP_S = 10
REST_S = 3 * int(KEPT_S) + 600
wants = st.tuples(st.sampled_from(NAMES), st.integers(0, 6), st.integers(10, 300))
kills = st.tuples(st.just("kill"), st.integers(0, 20), st.integers(10, 300))


def world(*, most_down: int = 1, spare: int = 0) -> ShareWorld:
    policy = UpdatePolicy(max_unavailable=most_down, min_healthy_s=0.0)

    def spec(name: str, cells: int, floor: int) -> DeploymentSpec:
        sharing = SharingPolicy(PRIORITIES[name], preemptible=name == "night")
        return DeploymentSpec(name, {"east": cells}, size=1, policy=policy, floor=floor, sharing=sharing)

    specs = (spec("chat", 2, 6), spec("docs", 3, 2), spec("night", 3, 2))
    return ShareWorld(build_fleet(FleetSpec(specs, spares=0, pool=spare)))


def settle(one: ShareWorld, seconds: int = REST_S) -> None:
    for _ in range(0, seconds, STEP_S):
        one.tick(STEP_S)
        one.check_rules()


def test_who_needs_most_gets_all_and_gives_it_back_later() -> None:
    one = world()
    one.want("chat", "east", 6)
    settle(one, 300)
    assert [one.ready(name) for name in NAMES] == [6, 2, 0]
    one.want("chat", "east", 3)
    settle(one)
    assert [one.ready(name) for name in NAMES] == [3, 3, 2]


@pytest.mark.slow
@pytest.mark.parametrize("most_down", [1, pytest.param(3, marks=pytest.mark.long)])
@settings(max_examples=settings().max_examples // 3)
@given(st.lists(st.one_of(wants, kills), max_size=6), st.integers(0, 2))
def test_it_never_takes_what_it_may_not_and_comes_to_rest(
    most_down: int, steps: list[tuple[str, int, int]], spare: int
) -> None:
    one = world(most_down=most_down, spare=spare)
    for name, number, seconds in steps:
        if name == "kill":
            one.kill(number)
        else:
            one.want(name, "east", number)
        settle(one, seconds)
    settle(one)
    decided = len(one.steps)
    settle(one)
    assert len(one.steps) == decided, one.steps[decided:]
    assert_nobody_lacks_what_a_lower_one_could_spare(one)


def assert_nobody_lacks_what_a_lower_one_could_spare(one: ShareWorld) -> None:
    for name in NAMES:
        claim = one.store.deployments[name].claim("east")
        if one.ready(name) >= min(claim.least, claim.in_force):
            continue
        for lower in NAMES:
            if PRIORITIES[lower] < PRIORITIES[name]:
                floor = 0 if lower == "night" else one.store.deployments[lower].claim("east").least
                assert one.ready(lower) <= floor, f"{name} lacks cells and {lower} has {one.ready(lower)}"


@pytest.mark.slow
@settings(max_examples=settings().max_examples // 3)
@given(st.lists(st.integers(0, 4), min_size=4, max_size=12))
def test_a_load_that_swings_moves_cells_no_oftener_than_they_are_kept(loads: list[int]) -> None:
    one = world()
    for cells in loads:
        one.want("chat", "east", cells)
        settle(one, 120)
    settle(one)
    turns: Counter[str] = Counter()
    by_place: dict[str, list[int]] = {}
    for _, (name, _region), before, after in one.steps:
        by_place.setdefault(name, []).append(1 if after > before else -1)
    for name, moves in by_place.items():
        turns[name] = sum(was == -1 and then == 1 for was, then in pairwise(moves))
    lasted_s = 120 * len(loads) + REST_S
    assert all(count <= lasted_s / KEPT_S + 1 for count in turns.values()), turns


teams = st.sampled_from(["search", "ads", "maps", ""])
claims = st.builds(
    lambda name, asked, floor, priority, preemptible, team, size: Wants(
        name, asked, 0, floor=min(floor, asked), priority=priority, preemptible=preemptible, team=team, size=size
    ),
    st.uuids().map(str), st.integers(0, 6), st.integers(0, 6), st.integers(0, 9), st.booleans(), teams,
    st.integers(1, 3),
)  # fmt: skip
quotas = st.lists(
    st.builds(
        QuotaView,
        st.sampled_from(["search", "ads", "maps"]),
        st.just(KIND),
        st.integers(0, 9),
        st.none() | st.integers(0, 4),
    ),
    unique_by=lambda one: one.team,
    max_size=3,
)


@pytest.mark.slow
@given(st.lists(claims, max_size=6), quotas)
def test_quotas_are_never_exceeded_and_nothing_is_left_that_could_be_had(
    wanted: list[Wants], stated: list[QuotaView]
) -> None:
    fleet = pool(*wanted, quotas=stated)
    shares = shares_of(fleet)
    plan = plan_quotas(shares.values(), stated)
    used = {use.team: use for use in plan.uses}
    total = sum(one.machines for one in stated)
    assert sum(use.allowed for use in plan.uses) <= total
    for quota in stated:
        assert quota.borrow_most is None or used[quota.team].borrowed <= quota.borrow_most
        assert used[quota.team].allowed <= used[quota.team].wanted
    for place, limit in plan.limits.items():
        share = shares[place]
        assert 0 <= limit.borrowed <= limit.cells <= share.claim.asked
        more = used[share.team].allowed + share.size
        if limit.cells < share.claim.asked:
            own = next(one for one in stated if one.team == share.team)
            fits = sum(use.allowed for use in plan.uses) + share.size <= total
            may = own.borrow_most is None or more - own.machines <= own.borrow_most
            assert not (fits and may), (place, limit)


@given(st.lists(claims, max_size=5), quotas)
def test_a_grant_by_quota_stays_once_it_is_in_force(wanted: list[Wants], stated: list[QuotaView]) -> None:
    fleet = pool(*wanted, quotas=stated)
    limits = plan_quotas(shares_of(fleet).values(), stated).limits
    bounded = [replace(one, granted=limits[one.name, "east"].cells) if (one.name, "east") in limits else one
               for one in wanted]  # fmt: skip
    again = plan_quotas(shares_of(pool(*bounded, quotas=stated)).values(), stated).limits
    assert {place: one.cells for place, one in again.items()} == {place: one.cells for place, one in limits.items()}


scoped_quotas = st.lists(
    st.builds(
        QuotaView,
        st.sampled_from(["search", "ads", "maps"]),
        st.just(KIND),
        st.integers(0, 9),
        st.none() | st.integers(0, 4),
        st.sampled_from(["", "east", "west"]),
    ),
    unique_by=lambda one: (one.team, one.region),
    max_size=6,
)


@pytest.mark.slow
@given(st.lists(claims, max_size=6), scoped_quotas)
def test_neither_quotas_of_a_region_nor_those_over_all_are_exceeded_and_grants_stay(
    wanted: list[Wants], stated: list[QuotaView]
) -> None:
    fleet = pool(*wanted, quotas=stated)
    shares = shares_of(fleet)
    plan = plan_quotas(shares.values(), stated)
    for scope in ("", "east"):
        of_scope = {one.team: one for one in stated if one.region == scope}
        used: Counter[str] = Counter()
        for place, share in shares.items():
            cells = plan.limits[place].cells if place in plan.limits else share.claim.asked
            used[share.team] += cells * share.size
        assert sum(used[team] for team in of_scope) <= max(sum(one.machines for one in of_scope.values()), 0)
        for team, quota in of_scope.items():
            assert quota.borrow_most is None or used[team] <= quota.machines + quota.borrow_most
    assert all(one.region != "west" or one.allowed == 0 for one in plan.uses)
    bounded = [replace(one, granted=plan.limits[one.name, "east"].cells) if (one.name, "east") in plan.limits else one
               for one in wanted]  # fmt: skip
    again = plan_quotas(shares_of(pool(*bounded, quotas=stated)).values(), stated).limits
    assert {place: one.cells for place, one in again.items()} == {
        place: one.cells for place, one in plan.limits.items()
    }
