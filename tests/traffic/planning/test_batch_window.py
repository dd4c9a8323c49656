"""How many lines are under way at once."""

from hypothesis import given
from hypothesis import strategies as st

from traffic.planning.async_request import AttemptResponse
from traffic.planning.batch_window import MOST_PER_CELL, BatchWindow

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
    st.integers(0, 5), st.lists(st.sampled_from([DONE, BUSY, AttemptResponse(None), AttemptResponse(400)]), max_size=99)
)
def test_whatever_comes_it_stays_within_its_bounds(cells: int, answers: list[AttemptResponse]) -> None:
    window = BatchWindow(cells=cells)
    for number, received in enumerate(answers):
        for _ in range(window.room):
            window.began()
        assert 1 <= window.sending <= MOST_PER_CELL * max(1, cells)
        window.ended(received, float(number))
    assert window.rate >= 0
