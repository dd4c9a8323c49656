"""A HAProxy that died once is back at once; one that keeps dying is started more and more slowly."""

import pytest

from engine_agent.ingress.supervisor import STABLE_AFTER_S, RestartBackoff

pytestmark = pytest.mark.processes


def test_one_that_never_ran_may_start_and_is_no_news() -> None:
    restarts = RestartBackoff()
    assert not restarts.note_exit(0.0, 0.5)
    assert restarts.may_start(0.0)


def test_a_steady_one_is_started_again_at_once_however_often() -> None:
    restarts = RestartBackoff()
    for now_s in (10.0, 20.0, 30.0):
        restarts.note_start(now_s)
        assert restarts.note_exit(now_s + STABLE_AFTER_S, 1.0)
        assert restarts.may_start(now_s + STABLE_AFTER_S)


def test_one_that_dies_young_waits_longer_each_time_up_to_a_limit() -> None:
    restarts = RestartBackoff()
    waits = []
    for _ in range(8):
        restarts.note_start(100.0)
        restarts.note_exit(100.1, 1.0)
        waits.append(round(restarts.due_at_s - 100.1, 2))
    assert waits == [0.0, 1.0, 2.0, 4.0, 5.0, 5.0, 5.0, 5.0]
    assert not restarts.may_start(102.0)
