"""Steps for batches behind their deadline, samples of progress, and windows of lines in flight."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.cell_proxy.batch_window import WAITING
from engine_agent.protocol.load_messages import BatchLoad
from tests.fleet.rows import NOW
from traffic.async_requests.planner import AttemptResponse
from traffic.batches.planning.pacing import (
    FIRST_STEP_S,
    MOST_PER_CELL,
    MOST_SAMPLES,
    RESERVE,
    WAITING_PER_CELL,
    AtRiskPolicy,
    BatchWindow,
    PacedBatch,
    PaceStep,
    Timeline,
    actual_rates,
    add_sample,
    lines_at_once,
    needed_lines,
    needed_rates,
    plan_paces,
)

DAY = timedelta(days=1)
TELL, NEAR, CELLS = AtRiskPolicy.TELL, AtRiskPolicy.NEAR_REALTIME, AtRiskPolicy.CELLS
BATCH = PacedBatch("b", NOW, NOW + DAY, remaining=36_000, rate=1.0)
"""A tenth of the day is reserve, so half-way 34,560 s are left."""


def at(hours: float, policy: AtRiskPolicy = TELL, *taken: str, **changes: object) -> list[str]:
    batch = replace(BATCH, policy=policy, taken=frozenset(map(PaceStep, taken)), **changes)  # type: ignore[arg-type]
    return [step.value for pace in plan_paces([batch], NOW + timedelta(hours=hours)) for step in pace.steps]


def test_what_keeps_its_planned_rate_is_left_alone() -> None:
    assert at(11) == []
    assert at(12) == ["tell"]
    assert at(12, remaining=34_560) == []
    assert at(12, remaining=34_561) == ["tell"]


@pytest.mark.parametrize(
    ("policy", "steps"),
    [(TELL, ["tell"]), (NEAR, ["raise", "tell"]), (CELLS, ["raise", "ask", "tell"])],
)
def test_one_step_after_the_other_each_once(policy: AtRiskPolicy, steps: list[str]) -> None:
    for number, step in enumerate(steps):
        assert at(12, policy, *steps[:number]) == [step]
    assert at(12, policy, *steps) == []


def test_a_policy_that_goes_further_later_takes_the_steps_that_are_left() -> None:
    assert at(12, CELLS, "tell") == ["raise"]
    assert at(12, CELLS, "tell", "raise") == ["ask"]


def test_a_key_that_may_not_send_as_near_real_time_skips_that() -> None:
    assert at(12, NEAR, may_raise=False) == ["tell"]
    assert at(12, CELLS, may_raise=False) == ["ask"]


def test_a_step_has_its_time_to_help() -> None:
    late: dict[str, Any] = {"since": NOW + timedelta(hours=12)}
    assert at(12.16, CELLS, "raise", **late) == []
    assert at(12.17, CELLS, "raise", **late) == ["ask"]
    assert at(12.17, CELLS, "raise", rate=2.0, **late) == []
    assert at(12.17, CELLS, "raise", rate=0.0, **late) == ["ask"], "the step had no effect"


def test_once_the_reserve_is_used_up_nothing_has_time_and_all_is_done() -> None:
    late: dict[str, Any] = {"since": NOW + timedelta(hours=21.59)}
    assert at(21.59, CELLS) == ["raise"]
    assert at(21.61, CELLS) == ["raise", "ask", "tell"]
    assert at(21.61, CELLS, "raise", **late) == ["ask", "tell"]
    assert at(24, CELLS) == []


def test_a_rate_counts_once_it_has_settled() -> None:
    assert at(0.1, rate=0.001) == []
    assert at(0.17, rate=0.001) == ["tell"]
    short: dict[str, Any] = {"expires_at": NOW + timedelta(minutes=10), "rate": 0.001}
    assert at(59 / 3600, **short) == []
    assert at(61 / 3600, **short) == ["tell"]


def test_an_unknown_rate_is_a_risk_once_the_reserve_is_used_up() -> None:
    assert at(21.5, rate=0.0) == []
    assert at(21.7, rate=0.0) == ["tell"]
    assert at(24, rate=0.0) == []


def test_the_reason_has_both_rates() -> None:
    (pace,) = plan_paces([replace(BATCH, done=7)], NOW + DAY / 2)
    assert pace.reason == "1.04 lines a second are needed and 1 are answered; 36000 lines are left"
    assert pace.done == 7


@pytest.mark.parametrize("remaining", [0])
def test_what_has_no_line_left_is_no_risk(remaining: int) -> None:
    assert at(23.9, remaining=remaining) == []


@given(
    st.integers(0, 10**6),
    st.just(0.0) | st.floats(1e-3, 10**4),
    st.floats(600, 7 * 86_400),
    st.floats(0, 1.2),
    st.sampled_from(AtRiskPolicy),
)
def test_who_is_not_at_risk_ends_with_the_reserve_left(
    remaining: int, rate: float, window_s: float, share: float, policy: AtRiskPolicy
) -> None:
    ends_at = NOW + timedelta(seconds=window_s)
    batch = PacedBatch("b", NOW, ends_at, remaining, rate, policy)
    now = NOW + timedelta(seconds=window_s * share)
    paces = plan_paces([batch], now)
    assert len(paces) <= 1
    if not paces and rate and remaining and 0.1 < share < 1:
        assert now + timedelta(seconds=remaining / rate) <= ends_at - batch.reserve + timedelta(milliseconds=1)
    if paces and rate:
        assert now + timedelta(seconds=remaining / rate) > ends_at - timedelta(seconds=window_s * (RESERVE + 1e-9))


def sampled(*looks: tuple[float, int]) -> Timeline:
    timeline = Timeline()
    for at_s, done in looks:
        timeline = add_sample(timeline, at_s, done, 0) or timeline
    return timeline


def test_each_step_has_its_first_look_and_gaps_stay_gaps() -> None:
    assert sampled((0, 0), (10, 5), (31, 9), (125, 40)).completed == (0, 9, None, None, 40)


def test_a_full_grid_keeps_every_second_sample_and_doubles_its_step() -> None:
    looks = [(number * FIRST_STEP_S, number) for number in range(MOST_SAMPLES + 1)]
    timeline = sampled(*looks)
    assert timeline.step_s == 2 * FIRST_STEP_S
    assert timeline.completed == tuple(range(0, MOST_SAMPLES + 1, 2))


def test_a_process_that_was_away_for_days_leaves_a_gap_of_bounded_length() -> None:
    timeline = sampled((0, 0), (30, 1), (7 * 86_400, 900))
    assert len(timeline.completed) <= MOST_SAMPLES
    assert (timeline.completed[0], timeline.completed[-1]) == (0, 900)


def test_a_clock_that_went_back_adds_nothing() -> None:
    assert add_sample(sampled((0, 0), (30, 1)), -5.0, 1, 0) is None


def test_rates_are_over_what_is_known() -> None:
    timeline = Timeline(30, (0, 30, None, 150), (0, 0, None, 0))
    assert actual_rates(timeline) == (None, 1.0, None, 2.0)


def test_what_is_needed_leaves_a_tenth_of_the_window() -> None:
    timeline = Timeline(30, (0, 30, 90), (0, 0, 0))
    assert needed_lines(timeline, 900, 1000.0) == pytest.approx((0.0, 30.0, 60.0))
    assert needed_rates(timeline, 900, 1000.0) == pytest.approx((1.0, 1.0, 810 / 840))


def test_nothing_is_needed_once_its_time_is_over() -> None:
    timeline = Timeline(30, (0, 1, 2), (0, 0, 0))
    assert needed_rates(timeline, 9, 50.0) == (0.2, 8 / 15, None)


@given(st.lists(st.tuples(st.floats(0, 3e6), st.integers(0, 1000)), max_size=200))
def test_it_is_never_longer_than_a_figure_and_never_goes_back(looks: list[tuple[float, int]]) -> None:
    ordered = sorted(looks)
    counts = sorted(done for _, done in looks)
    timeline = sampled(*((at_s, done) for (at_s, _), done in zip(ordered, counts, strict=True)))
    assert len(timeline.completed) == len(timeline.failed) <= MOST_SAMPLES
    known = [one for one in timeline.completed if one is not None]
    assert known == sorted(known)
    assert all(rate is None or rate >= 0 for rate in actual_rates(timeline))


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
