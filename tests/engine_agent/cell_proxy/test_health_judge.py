"""How the judge weighs probes, connects and tokens. Time is an argument; nothing waits."""

import pytest

from engine_agent.cell_proxy.health import HealthJudge
from engine_agent.cell_proxy.settings import ProbeTimes

TIMES = ProbeTimes()


def fresh() -> HealthJudge:
    return HealthJudge(TIMES, max_concurrency=2)


def healthy() -> HealthJudge:
    judge = fresh()
    judge.answered(0.0, 1.0)
    judge.token_seen(0.1)
    return judge


def test_a_new_engine_is_healthy_only_after_a_good_probe_and_a_token() -> None:
    judge = fresh()
    assert (judge.ok, judge.reason) == (False, "the engine was not probed yet")
    assert not judge.token_probe_due(0.0, in_flight=0)
    judge.answered(1.0, 2.5)
    assert (judge.ok, judge.reason) == (False, "no token came out of the engine yet")
    assert judge.token_probe_due(1.0, in_flight=0)
    judge.token_seen(1.2)
    assert (judge.ok, judge.reason) == (True, "")


def test_one_refused_connection_is_enough_and_a_token_is_asked_for_again() -> None:
    judge = healthy()
    judge.failed(1.0, "refused")
    assert (judge.ok, judge.reason) == (False, "refused")
    judge.answered(2.0, 1.0)
    assert not judge.ok
    assert judge.token_probe_due(2.0, in_flight=0)
    judge.token_seen(2.1)
    assert judge.ok


def test_one_slow_probe_is_forgiven_and_two_in_a_row_are_not() -> None:
    judge = healthy()
    judge.timed_out(1.0)
    assert judge.ok
    judge.answered(2.0, 900.0)
    judge.timed_out(3.0)
    assert judge.ok
    judge.timed_out(4.0)
    assert not judge.ok


def test_after_a_pause_one_good_probe_is_enough() -> None:
    judge = healthy()
    judge.timed_out(1.0)
    judge.timed_out(2.0)
    judge.answered(3.0, 1.0)
    assert judge.ok


def test_a_token_of_a_client_does_not_revive_an_engine_that_does_not_answer() -> None:
    judge = healthy()
    judge.failed(1.0, "refused")
    judge.token_seen(1.1)
    assert not judge.ok


def test_a_failed_token_probe_makes_a_live_engine_unhealthy_until_a_token_comes() -> None:
    judge = healthy()
    judge.token_failed(1.0, "no token within 10 s")
    judge.answered(1.2, 1.0)
    assert (judge.ok, judge.reason) == (False, "no token within 10 s")
    judge.token_seen(1.4)
    assert judge.ok


@pytest.mark.parametrize(
    ("silent_s", "in_flight", "due"),
    [(9.9, 0, False), (10.0, 0, True), (10.0, 1, True), (10.0, 2, False), (1000.0, 2, False)],
)
def test_a_token_is_asked_for_after_ten_silent_seconds_while_a_slot_is_free(
    silent_s: float, in_flight: int, due: bool
) -> None:
    judge = healthy()
    assert judge.token_probe_due(0.1 + silent_s, in_flight) is due


def test_a_failing_token_probe_is_repeated_once_a_second() -> None:
    judge = fresh()
    judge.answered(0.0, 1.0)
    judge.token_probed(0.0)
    judge.token_failed(0.1, "500")
    assert not judge.token_probe_due(0.9, in_flight=0)
    assert judge.token_probe_due(1.0, in_flight=0)


def test_the_time_of_being_bad_runs_from_the_first_failure() -> None:
    judge = healthy()
    assert judge.bad_for_s(5.0) == 0.0
    judge.failed(5.0, "refused")
    judge.failed(8.0, "refused")
    assert judge.bad_for_s(9.0) == 4.0


def test_health_carries_the_age_of_the_last_probe() -> None:
    judge = healthy()
    health = judge.health(0.25)
    assert (health.ok, health.reason, health.probe_ms, health.checked_s_ago) == (True, "", 1.0, 0.25)
    assert fresh().health(1.0).checked_s_ago is None


def with_golden() -> HealthJudge:
    judge = HealthJudge(TIMES, max_concurrency=2, has_golden=True)
    judge.answered(0.0, 1.0)
    return judge


def test_an_engine_with_golden_prompts_is_healthy_once_it_answered_them() -> None:
    judge = with_golden()
    assert judge.golden_due(0.0)
    assert not judge.token_probe_due(0.0, in_flight=0)
    judge.token_seen(0.1)
    assert (judge.ok, judge.reason) == (False, "its golden prompts were not answered yet")
    judge.golden_passed(0.2)
    assert judge.ok
    assert not judge.golden_due(60.0)


def test_a_wrong_answer_is_asked_for_once_more_and_then_condemns_the_start() -> None:
    judge = with_golden()
    judge.token_probed(0.0)
    judge.golden_wrong(0.1, "it said London")
    assert not judge.health(0.1).wrong
    assert not judge.golden_due(0.1)
    assert judge.golden_due(1.0)
    judge.golden_wrong(1.1, "it said London")
    assert (judge.health(1.1).wrong, judge.reason) == (True, "it said London")
    assert not judge.golden_due(60.0)


def test_a_wrong_answer_after_which_it_answers_well_is_forgotten() -> None:
    judge = with_golden()
    judge.golden_wrong(0.1, "it said London")
    judge.golden_passed(1.1)
    assert judge.ok
    assert not judge.health(1.1).wrong


def test_golden_prompts_wait_for_an_engine_that_is_down_and_are_not_asked_twice() -> None:
    judge = with_golden()
    judge.failed(0.1, "refused")
    assert not judge.golden_due(10.0)
    judge.answered(11.0, 1.0)
    assert judge.golden_due(11.0)
    judge.golden_passed(11.1)
    judge.failed(12.0, "refused")
    judge.answered(13.0, 1.0)
    assert not judge.golden_due(13.0)
    assert judge.token_probe_due(13.0, in_flight=0)
