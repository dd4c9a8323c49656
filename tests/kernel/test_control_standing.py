"""From which age on a pass is late, and from which on it is an incident."""

import pytest

from kernel.control_standing import HOUSEKEEPING, LATE_AFTER_S, STALE_AFTER_S, ControlStanding, LoopAge, standing_of


def standing(*, pass_s: float = 0.5, queue_age_s: float = 1.0, waited_s: float = 0.0) -> ControlStanding:
    return standing_of(
        (
            LoopAge("traffic.publish", 0.2, 0.01, 0.0),
            LoopAge(HOUSEKEEPING, queue_age_s, 0.0, waited_s),
            LoopAge("fleet.reconcile", pass_s, 0.01, 0.0),
        )
    )


def test_the_loop_that_is_most_behind_counts() -> None:
    known = standing(pass_s=12.0)
    assert [loop.loop for loop in known.loops] == ["fleet.reconcile", "traffic.publish"]
    assert known.last_pass_s == 12.0


@pytest.mark.parametrize(
    ("pass_s", "late", "stale"),
    [
        (0.5, False, False),
        (LATE_AFTER_S, False, False),
        (10.1, True, False),
        (STALE_AFTER_S, True, False),
        (30.1, True, True),
    ],
)
def test_what_is_late_is_shown_and_what_is_stale_is_an_incident(pass_s: float, late: bool, stale: bool) -> None:
    known = standing(pass_s=pass_s)
    assert (known.is_late, bool(known.stale)) == (late, stale)


@pytest.mark.parametrize(
    ("queue_age_s", "waited_s", "queue_s"),
    [(1.0, 0.0, 0.0), (4.9, 0.0, 0.0), (65.0, 0.0, 60.0), (1.0, 60.0, 60.0), (35.0, 10.0, 40.0)],
)
def test_a_queue_is_as_old_as_what_came_out_of_it_last_and_what_did_not_since(
    queue_age_s: float, waited_s: float, queue_s: float
) -> None:
    assert standing(queue_age_s=queue_age_s, waited_s=waited_s).queue_s == pytest.approx(queue_s)


def test_a_queue_that_is_old_is_said_beside_passes_that_are_not() -> None:
    assert standing(queue_age_s=1.0, waited_s=60.0).is_late
    assert str(standing(pass_s=2.2, waited_s=60.0)) == "last pass 2 s ago, queue 60 s old"


def test_of_an_empty_database_nothing_is_said() -> None:
    empty = standing_of(())
    assert (empty.last_pass_s, empty.queue_s, empty.is_late) == (None, None, False)
    assert str(empty) == "no pass yet"
