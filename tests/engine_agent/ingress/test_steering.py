"""How ingresses share cells by their reports: the parts, the bounds of what a report can change, and the reasons."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.ingress.steering import LEAST_WEIGHT, SeenCell, Steered, steer

IDLE = SeenCell(places=16, weight=100, own=0, in_flight=0)


def steered(*cells: SeenCell, ingresses: int = 2, place: int = 0) -> list[Steered]:
    return list(steer(dict(enumerate(cells)), {}, ingresses=ingresses, place=place).values())


def limits(cell: SeenCell, ingresses: int) -> list[int]:
    """The limit of each ingress, if the requests are divided evenly."""
    return [steered(cell, ingresses=ingresses, place=place)[0].limit for place in range(ingresses)]


def test_an_idle_cell_has_all_its_places_for_a_burst_at_any_ingress() -> None:
    assert limits(IDLE, 4) == [16, 16, 16, 16]


def test_the_parts_of_all_ingresses_are_the_free_places_once_half_are_taken() -> None:
    assert limits(replace(IDLE, own=2, in_flight=8), 4) == [4, 4, 4, 4]
    assert limits(replace(IDLE, own=3, in_flight=12), 4) == [4, 4, 4, 4]
    assert sum(limits(replace(IDLE, own=3, in_flight=13), 4)) == 4 * 3 + 3
    assert limits(replace(IDLE, own=4, in_flight=16), 4) == [4, 4, 4, 4]


def test_a_place_that_cannot_be_divided_goes_to_another_ingress_after_each_report() -> None:
    one_free = replace(IDLE, own=7, in_flight=15)
    taken = [limits(replace(one_free, turn=turn), 2) for turn in range(4)]
    assert taken == [[8, 7], [7, 8], [8, 7], [7, 8]]


def test_the_only_busy_ingress_gets_every_place_within_some_reports() -> None:
    own = 0
    for turn in range(20):
        own = steered(replace(IDLE, own=own, in_flight=own, turn=turn), ingresses=4)[0].limit
    assert own == 16


def test_a_full_cell_gets_more_requests_only_from_ingresses_far_below_their_fair_share() -> None:
    assert [steered(replace(IDLE, own=own, in_flight=16))[0].limit for own in (0, 1, 2, 8, 13)] == [1, 2, 2, 8, 13]
    assert [steered(replace(IDLE, own=own, in_flight=18))[0].limit for own in (0, 1, 2, 9, 15)] == [1, 2, 2, 8, 13]
    assert steered(replace(IDLE, own=9, in_flight=9, waiting=2))[0].limit == 9


def test_an_ingress_that_has_every_place_hands_over_a_part_of_the_fair_share_of_another() -> None:
    first, second = 16, 0
    for _ in range(20):
        limits_now = [steered(replace(IDLE, own=own, in_flight=first + second))[0].limit for own in (first, second)]
        first, second = min(first, limits_now[0]), limits_now[1]
    assert (first, second) == (14, 2)


def test_a_full_kv_cache_counts_like_taken_places() -> None:
    half_used = replace(IDLE, own=4, in_flight=4, running=4)
    roomy, tight, full = (steered(replace(half_used, kv_percent=each))[0] for each in (40.0, 80.0, 97.0))
    assert (roomy.limit, tight.limit, full.limit) == (13, 4, 4)
    assert "its KV cache is 97 % full" in full.why
    assert steered(replace(half_used, running=0, kv_percent=80.0))[0].limit == 13


def test_the_weight_makes_own_requests_count_like_those_of_all_ingresses() -> None:
    quiet, busy = steered(replace(IDLE, own=2, in_flight=4), replace(IDLE, own=2, in_flight=12))
    assert (quiet.weight, busy.weight) == (100, 38)
    assert busy.why == "2 requests of this ingress and 10 other requests in 16 places"


def test_a_small_change_of_the_load_leaves_the_weight() -> None:
    cells = {"a": replace(IDLE, own=5, in_flight=10), "b": replace(IDLE, own=5, in_flight=11)}
    before = {name: Steered(100, 16) for name in cells}
    assert {one.weight for one in steer(cells, before, ingresses=2, place=0).values()} == {100}
    assert {one.weight for one in steer(cells, {}, ingresses=2, place=0).values()} == {100, 92}


def test_a_report_that_own_requests_contradict_is_corrected() -> None:
    honest = replace(IDLE, own=4, in_flight=16)
    *_, liar = steered(honest, honest, honest, replace(IDLE, own=4, in_flight=0), ingresses=4)
    assert liar.why == "4 requests of this ingress and 4 other requests in 16 places (it reports 0)"
    assert (liar.limit, liar.weight) == (6, 100)


CELLS = st.builds(
    SeenCell,
    places=st.integers(1, 256),
    weight=st.integers(1, 256),
    own=st.integers(0, 300),
    in_flight=st.integers(0, 1_000_000),
    waiting=st.integers(0, 10),
    running=st.integers(0, 300),
    kv_percent=st.none() | st.floats(0, 100),
    turn=st.integers(0, 10),
)


@given(st.lists(CELLS, min_size=1, max_size=8), st.integers(2, 16), st.data())
def test_no_report_gives_a_cell_more_than_the_table_or_less_than_the_least(
    cells: list[SeenCell], ingresses: int, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, ingresses - 1))
    for cell, one in zip(cells, steered(*cells, ingresses=ingresses, place=place), strict=True):
        assert 1 <= one.limit <= cell.places
        assert max(1, round(LEAST_WEIGHT * cell.weight)) <= one.weight <= cell.weight


@given(st.integers(1, 64), st.integers(2, 8), st.data())
def test_ingresses_with_the_same_report_overfill_a_cell_by_one_request_each_at_most(
    places: int, ingresses: int, data: st.DataObject
) -> None:
    owns = data.draw(st.lists(st.integers(1, 64), min_size=ingresses, max_size=ingresses))
    total = sum(owns)
    cells = [SeenCell(places, 100, own, total) for own in owns]
    taken = [steered(cell, ingresses=ingresses, place=place)[0].limit for place, cell in enumerate(cells)]
    if 2 * total >= places:
        assert sum(taken) <= max(places, total) + ingresses


@given(st.lists(CELLS, min_size=2, max_size=6), st.integers(2, 4))
def test_repeating_a_report_changes_nothing(cells: list[SeenCell], ingresses: int) -> None:
    known = dict(enumerate(cells))
    once = steer(known, {}, ingresses=ingresses, place=0)
    assert steer(known, once, ingresses=ingresses, place=0) == once


def test_a_cell_that_claims_others_requests_as_those_of_this_ingress_gains_little_weight() -> None:
    honest = replace(IDLE, own=2, in_flight=8, counted=2)
    for claimed, expected in ((4, 53), (8, 100), (300, 100)):
        liar = replace(honest, own=claimed, in_flight=claimed)
        weights = [one.weight for one in steered(honest, honest, honest, liar, ingresses=4)]
        assert weights[0] == expected >= round(100 / 2)


@pytest.mark.parametrize("said", [0, 1, 8])
def test_a_cell_that_claims_to_be_idle_attracts_a_bounded_share(said: int) -> None:
    """At most what its server would get without reports."""
    honest = replace(IDLE, own=3, in_flight=12)
    liar = steered(honest, honest, honest, replace(IDLE, own=3, in_flight=said), ingresses=4)[-1]
    assert liar.weight <= 100
    assert liar.limit <= 3 + (16 - 6)
