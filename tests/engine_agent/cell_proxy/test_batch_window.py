"""The window of batch work by example: it grows while real-time requests do not mind, and shrinks when they do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.cell_proxy.batch_window import (
    FIRST,
    JUDGED_AFTER,
    WAITING,
    BatchAdmission,
    BatchWindow,
    RealtimeLatency,
    decide_batch,
)

CALM = RealtimeLatency(0.2, 0.03)
SLOW = RealtimeLatency(0.5, 0.03)
seconds = st.none() | st.floats(0.001, 60)
steps = st.lists(st.tuples(st.builds(RealtimeLatency, seconds, seconds), st.booleans(), st.booleans()), max_size=60)


def learnt(most: int = 48) -> BatchWindow:
    window = BatchWindow(most)
    for _ in range(3):
        window.steer(CALM, had_batch=False, was_full=False)
    return window


@pytest.mark.parametrize(
    ("running", "unread", "waiting", "limit", "decided"),
    [
        (0, 0, 0, 8, BatchAdmission.BEGIN),
        (7, 0, 0, 8, BatchAdmission.BEGIN),
        (8, 0, 0, 8, BatchAdmission.WAIT),
        (50, 0, 0, None, BatchAdmission.BEGIN),
        (1, 1, 0, None, BatchAdmission.WAIT),
        (1, 1, 1, 8, BatchAdmission.WAIT),
        (1, 0, 1, 8, BatchAdmission.WAIT),
        (1, 1, WAITING, 8, BatchAdmission.REFUSE),
    ],
)
def test_a_request_begins_where_no_prompt_is_read_and_the_window_has_room(
    running: int, unread: int, waiting: int, limit: int | None, decided: BatchAdmission
) -> None:
    assert decide_batch(running=running, unread=unread, waiting=waiting, limit=limit) is decided


def test_it_doubles_while_it_is_full_and_real_time_requests_do_not_mind() -> None:
    window = learnt()
    sizes = []
    for was_full in (True, False, True, True):
        window.steer(CALM, had_batch=True, was_full=was_full)
        sizes.append(window.limit)
    assert sizes == [2 * FIRST, 2 * FIRST, 4 * FIRST, 48]


def test_it_shrinks_by_a_quarter_when_they_do_is_judged_anew_after_that_and_grows_by_a_quarter() -> None:
    window = learnt()
    sizes = []
    for _ in range(2 * JUDGED_AFTER):
        window.steer(SLOW, had_batch=True, was_full=False)
        sizes.append(window.limit)
    assert sizes == [8, 8, 6, 6, 6, 4]
    assert window.is_over_budget
    window.steer(CALM, had_batch=True, was_full=True)
    assert window.limit == 5
    assert not window.is_over_budget


def test_one_slow_step_among_good_ones_is_no_reason() -> None:
    window = learnt()
    for measured in (CALM, CALM, CALM, SLOW, CALM):
        window.steer(measured, had_batch=True, was_full=False)
        assert not window.is_over_budget


def test_the_baseline_is_learnt_without_batch_work_and_rises_slowly_with_it() -> None:
    window = learnt()
    for _ in range(20):
        window.steer(SLOW, had_batch=True, was_full=False)
    assert window.baseline.ttft_s == pytest.approx(0.2 * 1.005**20)
    for _ in range(20):
        window.steer(SLOW, had_batch=False, was_full=False)
    assert window.baseline.ttft_s == pytest.approx(0.5, abs=0.01)


def test_too_few_samples_change_nothing() -> None:
    window = learnt()
    for _ in range(9):
        window.steer(RealtimeLatency(), had_batch=True, was_full=False)
    assert (window.limit, window.baseline, window.is_over_budget) == (FIRST, CALM, False)


@given(st.integers(1, 200), steps)
def test_at_least_one_and_at_most_the_most_may_run_whatever_is_measured(
    most: int, measured: list[tuple[RealtimeLatency, bool, bool]]
) -> None:
    window = BatchWindow(most)
    for latency, had_batch, was_full in measured:
        window.steer(latency, had_batch=had_batch, was_full=was_full)
        assert 1 <= window.limit <= most
