"""The cheapest flow, compared with every possible one."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from traffic.region_shares.planning.placement import UNKNOWN_MS, SinkCapacity, cheapest_flow, latencies_ms

ORIGINS, PLACES = ("o", "p"), ("x", "y")
ROUTES = tuple(product(ORIGINS, PLACES))


def every_flow(
    supply: dict[str, int], routes: dict[tuple[str, str], int], rooms: dict[str, int]
) -> list[tuple[int, int]]:
    """Yields (units placed, cost) of every flow in whole units."""
    found = []
    for sent in product(*(range(supply[origin] + 1) for origin, _ in routes)):
        flow = dict(zip(routes, sent, strict=True))
        left = all(sum(flow.get((o, x), 0) for x in PLACES) <= supply[o] for o in ORIGINS)
        fits = all(sum(flow.get((o, x), 0) for o in ORIGINS) <= rooms[x] for x in PLACES)
        if left and fits:
            found.append((sum(sent), sum(routes[route] * units for route, units in flow.items())))
    return found


@given(
    supply=st.fixed_dictionaries(dict.fromkeys(ORIGINS, st.integers(0, 3))),
    routes=st.dictionaries(st.sampled_from(ROUTES), st.integers(0, 9)),
    rooms=st.fixed_dictionaries(dict.fromkeys(PLACES, st.integers(0, 3))),
)
def test_as_much_as_fits_is_placed_as_cheaply_as_can_be(
    supply: dict[str, int], routes: dict[tuple[str, str], int], rooms: dict[str, int]
) -> None:
    flow = cheapest_flow(supply, routes, {name: (SinkCapacity(units, 0),) for name, units in rooms.items()})
    best = max(every_flow(supply, routes, rooms), key=lambda one: (one[0], -one[1]))
    assert (sum(flow.values()), sum(routes[route] * units for route, units in flow.items())) == best


def test_a_dear_room_is_filled_last_even_if_its_place_is_nearest() -> None:
    rooms = {"x": (SinkCapacity(2, 0), SinkCapacity(5, 100)), "y": (SinkCapacity(3, 0),)}
    assert cheapest_flow({"o": 6}, {("o", "x"): 0, ("o", "y"): 9}, rooms) == {("o", "x"): 3, ("o", "y"): 3}


def test_one_that_could_go_elsewhere_makes_room_for_one_that_cannot() -> None:
    rooms = {"x": (SinkCapacity(2, 0),), "y": (SinkCapacity(2, 0),)}
    routes = {("o", "x"): 0, ("o", "y"): 50, ("p", "x"): 9}
    assert cheapest_flow({"o": 2, "p": 2}, routes, rooms) == {("o", "y"): 2, ("p", "x"): 2}


def test_regions_on_the_map_are_ordered_as_they_lie() -> None:
    found = latencies_ms(["us-east-1", "us-east-2", "us-west-2", "eu-central-1"], {})
    ordered = sorted(["us-east-2", "us-west-2", "eu-central-1"], key=lambda name: found["us-east-1", name])
    assert ordered == ["us-east-2", "us-west-2", "eu-central-1"]
    assert found["us-east-1", "us-east-1"] == 0.0
    assert 50 < found["us-east-1", "us-west-2"] < 70
    assert found["us-east-1", "us-west-2"] == found["us-west-2", "us-east-1"]


def test_what_was_measured_counts_in_both_directions() -> None:
    found = latencies_ms(["here", "there", "far"], {"there:here": 3.0})
    assert found["here", "there"] == found["there", "here"] == 3.0
    assert found["here", "far"] == UNKNOWN_MS
