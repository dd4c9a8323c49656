"""How many requests at once are done in time with what is queued."""

import pytest

from traffic.planning.backlog import LEAST_LEFT_S, QueuedWork, requests_at_once, work_until


@pytest.mark.parametrize(
    ("work", "service_s", "at_once"),
    [
        (QueuedWork(), 5.0, 0.0),
        (work_until(3600, 3600.0), 5.0, 5.0),
        (work_until(3600, 3600.0) + work_until(600, 300.0), 5.0, 15.0),
        (work_until(2, 1.0), 600.0, 2.0),
        (work_until(5000, 3600.0), None, 1.0),
    ],
)
def test_by_the_time_that_is_left(work: QueuedWork, service_s: float | None, at_once: float) -> None:
    assert requests_at_once(work, service_s) == pytest.approx(at_once)


def test_a_deadline_that_is_past_asks_for_no_more_than_one_that_is_near() -> None:
    assert work_until(10, -5.0) == work_until(10, LEAST_LEFT_S)
