"""How many lines are under way at once."""

from hypothesis import given
from hypothesis import strategies as st

from engine_agent.cell_proxy.batch_window import WAITING
from engine_agent.protocol.messages import BatchLoad
from traffic.planning.async_request import AttemptResponse
from traffic.planning.batch_window import MOST_PER_CELL, WAITING_PER_CELL, BatchWindow, lines_at_once

DONE, BUSY = AttemptResponse(200, b"{}"), AttemptResponse(503)


def answered(window: BatchWindow, received: AttemptResponse, rounds: int) -> None:
    for number in range(rounds):
        for _ in range(sent := window.room):
            window.began()
        for _ in range(sent):
            window.ended(received, float(number))


def test_it_starts_with_one_and_doubles_a_round() -> None:
    window = BatchWindow()
    rooms = []
    for _ in range(5):
        rooms.append(window.room)
        answered(window, DONE, 1)
    assert rooms == [1, 2, 4, 8, 16]


def test_one_round_of_refusals_shrinks_it_once() -> None:
    window = BatchWindow(size=16.0)
    answered(window, BUSY, 1)
    assert window.size == 12.0
    answered(window, DONE, 1)
    assert 12.9 < window.size < 13.1


def test_it_never_closes_for_good() -> None:
    window = BatchWindow()
    answered(window, BUSY, 50)
    assert window.room == 1


@given(
    st.integers(1, 500),
    st.lists(st.sampled_from([DONE, BUSY, AttemptResponse(None), AttemptResponse(400)]), max_size=99),
)
def test_whatever_comes_it_stays_within_its_bounds(most: int, answers: list[AttemptResponse]) -> None:
    window = BatchWindow(most=most)
    for number, received in enumerate(answers):
        for _ in range(window.room):
            window.began()
        assert 1 <= window.sending <= most
        window.ended(received, float(number))
    assert window.rate >= 0


def test_what_cells_can_have_together_bounds_it() -> None:
    narrow, alone = BatchLoad(window=6), BatchLoad(window=6, is_alone=True)
    assert lines_at_once([narrow, BatchLoad(window=90)]) == 8 + MOST_PER_CELL
    assert lines_at_once([alone, None]) == 2 * MOST_PER_CELL
    assert lines_at_once([]) == 1
    window = BatchWindow(most=lines_at_once([narrow]))
    answered(window, DONE, 9)
    assert (window.room, window.size) == (8, 8.0)
    window.most = 2
    assert window.room == 2


def test_as_many_wait_in_a_cell_as_it_lets_wait() -> None:
    assert WAITING_PER_CELL == WAITING
