"""How cells are told apart by role: proportions, what is missing first, and in which order a rollout moves them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.protocol.states import CellRole
from fleet.planning.role_split import RoleSplit, beyond, counted, most_lacking, next_to_move, split_within

numbers = st.integers(0, 30)


@pytest.mark.parametrize(
    ("total", "prefill", "decode", "expected"),
    [
        (4, 0, 0, RoleSplit(mixed=4)),
        (4, 1, 3, RoleSplit(prefill=1, decode=3)),
        (6, 1, 3, RoleSplit(mixed=2, prefill=1, decode=3)),
        (2, 3, 1, RoleSplit(prefill=1, decode=1)),
        (3, 1, 5, RoleSplit(prefill=1, decode=2)),
        (1, 3, 1, RoleSplit(mixed=1)),
        (0, 3, 1, RoleSplit()),
        (2, 0, 5, RoleSplit(mixed=2)),
        (2, 1, 0, RoleSplit(mixed=2)),
    ],
)
def test_keeps_what_is_stated_or_its_proportion(total: int, prefill: int, decode: int, expected: RoleSplit) -> None:
    assert split_within(total, prefill, decode) == expected


@given(total=numbers, prefill=numbers, decode=numbers)
def test_a_place_with_cells_always_has_one_that_answers(total: int, prefill: int, decode: int) -> None:
    split = split_within(total, prefill, decode)

    assert split.total == total
    assert min(split.mixed, split.prefill, split.decode) >= 0
    assert split.answering >= 1 or total == 0


def test_a_first_cell_that_answers_is_missing_most() -> None:
    wanted = RoleSplit(prefill=3, decode=1)

    assert most_lacking(RoleSplit(), wanted) is CellRole.DECODE
    assert most_lacking(RoleSplit(decode=1), wanted) is CellRole.PREFILL
    assert most_lacking(wanted, wanted) is None


def test_a_rollout_moves_a_pair_first_and_then_keeps_the_proportion() -> None:
    wanted, moved, order = RoleSplit(prefill=2, decode=4), RoleSplit(), []
    while following := next_to_move(moved, wanted):
        order.append(following[0].value)
        moved = counted([*(CellRole(one) for one in order)])

    assert order == ["prefill", "decode", "decode", "prefill", "decode", "decode"]


@given(prefill=st.integers(2, 12), decode=st.integers(2, 12))
def test_while_it_moves_old_or_new_cells_have_a_pair(prefill: int, decode: int) -> None:
    wanted, moved = RoleSplit(prefill=prefill, decode=decode), RoleSplit()
    for _ in range(wanted.total):
        role = next_to_move(moved, wanted)[0]
        moved = RoleSplit(0, moved.prefill + (role is CellRole.PREFILL), moved.decode + (role is CellRole.DECODE))
        old = RoleSplit(0, prefill - moved.prefill, decode - moved.decode)
        assert (moved.prefill and moved.decode) or (old.prefill and old.decode)


@given(there=st.builds(RoleSplit, numbers, numbers, numbers), wanted=st.builds(RoleSplit, numbers, numbers, numbers))
def test_what_is_beyond_is_never_lacking(there: RoleSplit, wanted: RoleSplit) -> None:
    assert most_lacking(there, wanted) not in beyond(there, wanted)
