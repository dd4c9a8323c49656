"""How many lines are under way at once."""

from hypothesis import given
from hypothesis import strategies as st

from traffic.planning.async_request import AttemptResponse
from traffic.planning.batch_window import MOST_PER_CELL, BatchWindow, CellLatency

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


def test_it_shrinks_while_real_time_requests_wait_longer_than_their_cell_has_them_wait_alone() -> None:
    window = BatchWindow(size=32.0)
    window.steer([CellLatency("fast", 100.0, 0), CellLatency("slow", 900.0, 0)])
    window.steer([CellLatency("fast", 140.0, 8), CellLatency("slow", 1200.0, 8)])
    assert (window.size, window.is_slowing) == (32.0, False)
    window.steer([CellLatency("fast", 200.0, 8), CellLatency("slow", 1200.0, 8)])
    assert (window.size, window.is_slowing) == (24.0, True)
    answered(window, DONE, 3)
    assert window.size == 24.0, "it does not grow meanwhile"
    window.steer([CellLatency("fast", 110.0, 8)])
    answered(window, DONE, 1)
    assert window.size > 24.0


def test_a_busier_day_is_not_its_doing_for_ever() -> None:
    window = BatchWindow()
    window.steer([CellLatency("c", 100.0, 0)])
    steps = 0
    while window.is_slowing or steps == 0:
        window.steer([CellLatency("c", 300.0, 1)])
        steps += 1
        assert steps < 200
    assert window.room == 1


def test_cells_without_real_time_requests_say_nothing() -> None:
    window = BatchWindow(size=8.0)
    window.steer([CellLatency("c", None, 8)])
    assert (window.size, window.is_slowing) == (8.0, False)


LATENCIES = st.builds(CellLatency, st.sampled_from("ab"), st.none() | st.floats(0, 1e6), st.integers(0, 99))


@given(st.lists(st.lists(LATENCIES, max_size=3), max_size=30))
def test_however_it_is_steered_a_line_can_always_be_sent(steps: list[list[CellLatency]]) -> None:
    window = BatchWindow()
    for cells in steps:
        window.steer(cells)
        assert window.room >= 1
