from hypothesis import given
from hypothesis import strategies as st

from fleet.planning.capacity.planner import plan_capacity
from fleet.planning.capacity.view import within_budget
from tests.fleet.planning.capacity.views import EAST, WEST, deployment, flat, place, pool, view, wave

PRICES = {EAST: 10.0, WEST: 20.0}


def mosts(*places: object, budget: float | None) -> list[int]:
    return [one.most for one in within_budget(places, PRICES, budget)]  # type: ignore[arg-type]


def test_what_the_least_of_each_leaves_goes_by_the_greatest_load() -> None:
    east, west = place(demand=flat(30.0)), place(WEST, wave(0.0, 10.0))
    assert mosts(east, west, budget=None) == [50, 50]
    assert mosts(east, west, budget=110.0) == [1 + 6, 1 + 1]
    assert mosts(east, west, budget=5.0) == [1, 1], "what ranges begin with stays"
    assert mosts(east, west, budget=9_000.0) == [50, 50]


def test_what_nobody_forecasts_or_states_the_price_of_is_left_alone() -> None:
    assert mosts(place(), budget=20.0) == [50]
    assert within_budget([place(demand=flat(1.0))], {EAST: 0.0}, 1.0)[0].most == 50


def test_a_plan_keeps_to_it_and_says_what_is_lacking_for_it() -> None:
    bound = within_budget([place(demand=flat(30.0))], PRICES, 40.0)
    plan = plan_capacity(view(deployment("chat", *bound), pools=(pool(),)))
    assert max(plan.cells[0].cells) == 4
    (lack,) = plan.lacks
    assert (lack.requests, lack.reason) == (10.0, "its budget pays for 4")


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 1000)), min_size=2, max_size=2), st.floats(0, 10_000))
def test_all_places_together_never_cost_more(ranges: list[tuple[int, float]], budget: float) -> None:
    places = [
        place(region, flat(load), least=least) for region, (least, load) in zip((EAST, WEST), ranges, strict=True)
    ]
    found = within_budget(places, PRICES, budget)
    assert all(one.least <= one.most <= 50 for one in found)
    needed = sum(one.least * PRICES[one.region] for one in found)
    if any(load for _, load in ranges):
        assert sum(one.most * PRICES[one.region] for one in found) <= max(budget, needed) + 1e-6
