"""The division of a place's cells among instance types."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.placement.planning.instance_types import ADVANTAGE, TypeChoice, cheapest_first, split_types

TRN = TypeChoice("trn1", capacity=16, price=21.5, room=8)
INF = TypeChoice("inf2", capacity=8, price=12.98, room=8)
GPU = TypeChoice("p5", capacity=32, price=98.3, room=8)
ALL = (GPU, INF, TRN)


def test_new_cells_go_where_a_request_at_once_is_cheapest() -> None:
    split = split_types(3, ALL)
    assert split.cells == {"trn1": 3, "inf2": 0, "p5": 0}
    assert split.why["trn1"] == "1.34 $/h per concurrent request, the lowest of the types with machines"


def test_where_a_price_is_unknown_the_list_says_which_comes_first() -> None:
    unpriced = (GPU, replace(INF, price=None), TRN)
    assert [one.name for one in cheapest_first(unpriced)] == ["p5", "inf2", "trn1"]
    split = split_types(1, unpriced)
    assert split.cells["p5"] == 1
    assert split.why["p5"] == "the first that is listed and has machines"


def test_what_does_not_fit_on_the_first_falls_over_to_the_next_and_says_so() -> None:
    split = split_types(3, (replace(TRN, having=1, room=1), INF))
    assert split.cells == {"trn1": 2, "inf2": 1}
    assert split.why["inf2"] == "no free machine of trn1"


def test_what_can_be_bought_is_waited_for_until_it_is_short() -> None:
    bought = replace(TRN, room=0, is_bought=True, waiting=1)
    assert split_types(1, (bought, INF)).cells == {"trn1": 1, "inf2": 0}
    assert split_types(1, (replace(bought, is_short=True), INF)).cells == {"trn1": 0, "inf2": 1}


def test_a_cell_that_is_about_to_get_machines_counts_before_one_that_works_and_is_dearer() -> None:
    moving = (replace(INF, having=2), replace(TRN, waiting=1))
    assert split_types(2, moving).cells == {"trn1": 1, "inf2": 1}
    assert split_types(2, (moving[0], replace(moving[1], room=0))).cells == {"trn1": 0, "inf2": 2}


def test_a_stated_cell_waits_for_machines_while_nothing_is_lacking() -> None:
    there = (replace(TRN, having=2), replace(INF, stated=1, waiting=1, room=0, is_short=True))
    assert split_types(2, there).cells == {"trn1": 1, "inf2": 1}
    assert split_types(3, there).cells == {"trn1": 3, "inf2": 0}, "with something lacking it is tried elsewhere"


def test_where_nobody_has_machines_a_cell_waits_where_it_waits() -> None:
    empty = (replace(TRN, room=0), replace(INF, room=0, waiting=1))
    split = split_types(1, empty)
    assert split.cells == {"trn1": 0, "inf2": 1}
    assert split.why["inf2"] == "no listed type has a free machine"


def test_what_is_too_much_goes_from_the_dearest() -> None:
    there = (replace(GPU, having=1), replace(INF, having=2), replace(TRN, having=2))
    assert split_types(3, there).cells == {"trn1": 2, "inf2": 1, "p5": 0}


def test_a_stated_mix_comes_first_and_the_rest_is_wherever_is_best() -> None:
    stated = (replace(GPU, stated=1), INF, replace(TRN, stated=0))
    assert split_types(3, stated).cells == {"trn1": 0, "inf2": 2, "p5": 1}


def test_a_stated_mix_moves_one_working_cell_at_a_time_and_only_while_nothing_else_is_under_way() -> None:
    there = (replace(TRN, having=3, stated=1), replace(INF, stated=2, room=1))
    assert split_types(3, there).cells == {"trn1": 3, "inf2": 0}
    moved = split_types(3, there, may_move=True)
    assert moved.cells == {"trn1": 2, "inf2": 1}
    assert moved.why["inf2"] == moved.why["trn1"] == "2 of its cells have the target inf2"


def test_a_type_of_which_none_are_wanted_takes_none_even_if_no_other_has_machines() -> None:
    split = split_types(2, (replace(TRN, stated=0), replace(INF, room=0)))
    assert split.cells == {"trn1": 0, "inf2": 2}


@pytest.mark.parametrize(
    ("changes", "moves"),
    [
        ({}, True),
        ({"price": 2 * 21.5 * 0.81}, False),  # cheaper by less than a fifth
        ({"capacity": 15.0, "price": 5.0}, False),  # carries less, however cheap
        ({"room": 0, "is_bought": True}, False),  # cheaper on paper: nothing is there
        ({"price": None}, False),
    ],
)
def test_a_working_cell_moves_only_to_one_that_carries_as_much_for_a_fifth_less_and_is_there(
    changes: dict[str, float | None], moves: bool
) -> None:
    cheap = replace(TypeChoice("trn2", capacity=32.0, price=2 * 21.5 * 0.79, room=1), **changes)  # type: ignore[arg-type]
    split = split_types(2, (replace(TRN, having=2), cheap), may_move=True)
    assert split.cells == ({"trn2": 1, "trn1": 1} if moves else {"trn2": 0, "trn1": 2})
    if moves:
        assert split.why["trn2"] == (
            "trn2 carries as much for 1.06 $/h per concurrent request instead of 1.34 on trn1, and has machines"
        )


def test_quotas_bound_each_type_and_all_of_them_the_whole() -> None:
    bounded = (replace(TRN, most=1), replace(INF, most=1))
    assert split_types(2, bounded).cells == {"trn1": 1, "inf2": 1}
    assert split_types(4, bounded).cells == {"trn1": 1, "inf2": 1}


@st.composite
def choices(draw: st.DrawFn) -> tuple[TypeChoice, ...]:
    return tuple(
        TypeChoice(
            name=f"t{number}",
            capacity=draw(st.integers(1, 64)),
            price=draw(st.none() | st.floats(0.1, 100)),
            stated=draw(st.none() | st.integers(0, 4)),
            having=draw(st.integers(0, 5)),
            waiting=draw(st.integers(0, 2)),
            room=draw(st.integers(0, 4)),
            is_bought=draw(st.booleans()),
            is_short=draw(st.booleans()),
            most=draw(st.none() | st.integers(0, 6)),
        )
        for number in range(draw(st.integers(1, 4)))
    )


@given(st.integers(0, 12), choices(), st.booleans())
def test_a_split_is_whole_and_within_what_there_is(total: int, there: tuple[TypeChoice, ...], may_move: bool) -> None:
    split = split_types(total, there, may_move=may_move)
    allowed = sum(total if one.most is None else one.most for one in there)
    assert sum(split.cells.values()) == min(total, allowed) or all(one.most is not None for one in there)
    assert sum(split.cells.values()) <= total
    for one in there:
        count = split.cells[one.name]
        assert one.most is None or count <= one.most
        if count > one.having + one.waiting:
            assert one.name in split.why, "whoever gets a cell is told why"


@given(st.integers(0, 12), choices())
def test_no_more_get_machines_than_there_are_while_another_type_has_some(
    total: int, there: tuple[TypeChoice, ...]
) -> None:
    split = split_types(total, there)
    is_whole = sum(one.having for one in there) >= total
    patient = [one for one in there if is_whole and one.stated]  # what a person wants there waits there
    beyond = [
        one
        for one in there
        if one not in patient and one.supply is not None and split.cells[one.name] > one.having + one.supply
    ]
    for other in there if beyond else ():
        has_left = other.supply is None or split.cells[other.name] < other.having + other.supply
        may_take = other.stated != 0 and (other.most is None or split.cells[other.name] < other.most)
        assert not (has_left and may_take), f"{other.name} has machines, and {beyond[0].name} has none"


@given(choices(), st.booleans())
def test_what_works_stays_unless_it_is_too_much_or_one_moves_for_a_reason(
    there: tuple[TypeChoice, ...], may_move: bool
) -> None:
    unbounded = tuple(replace(one, most=None, waiting=0) for one in there)
    total = sum(one.having for one in unbounded)
    split = split_types(total, unbounded, may_move=may_move)
    fewer = [one for one in unbounded if split.cells[one.name] < one.having]
    assert sum(one.having - split.cells[one.name] for one in fewer) <= may_move
    for gives in fewer:
        (gains,) = (one for one in unbounded if split.cells[one.name] > one.having)
        is_stated = gains.stated is not None or gives.stated is not None
        cost, before = gains.per_request, gives.per_request
        is_cheaper = cost is not None and before is not None and cost <= (1 - ADVANTAGE) * before
        assert is_stated or (is_cheaper and gains.capacity >= gives.capacity and gains.room)


@given(choices(), st.integers(0, 12))
def test_a_split_that_came_true_stays(there: tuple[TypeChoice, ...], total: int) -> None:
    """Without a change, no cell moves back and forth."""
    split = split_types(total, there)
    done = tuple(replace(one, having=split.cells[one.name], waiting=0) for one in there)
    assert split_types(sum(split.cells.values()), done).cells == split.cells
