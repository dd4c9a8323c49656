"""When a web process says of itself that it is behind, and when it has caught up."""

import pytest

from fleet.consumers.hub_state import BEHIND_MOST_S, SETTLES_WITHIN_S, Backlog, Delays

LATE = Delays(turned_away=True)


@pytest.mark.parametrize(
    ("delays", "keeps_up"),
    [
        (Delays(), True),
        (Delays(lag_s=1, unanswered_s=1, unstored_s=2), True),
        (Delays(lag_s=2), False),
        (Delays(unanswered_s=3), False),
        (Delays(unstored_s=4), False),
        (LATE, False),
    ],
)
def test_one_long_delay_is_enough(delays: Delays, keeps_up: bool) -> None:
    assert Backlog().keeps_up(delays, 0.0) is keeps_up


def test_it_has_caught_up_once_no_agent_can_still_be_on_its_way() -> None:
    backlog = Backlog()
    assert not backlog.keeps_up(LATE, 100.0)
    assert not backlog.keeps_up(Delays(), 100.0 + SETTLES_WITHIN_S - 1)
    assert not backlog.keeps_up(LATE, 105.0)
    assert not backlog.keeps_up(Delays(), 105.0 + SETTLES_WITHIN_S - 1)
    assert backlog.keeps_up(Delays(), 105.0 + SETTLES_WITHIN_S)
    assert backlog.keeps_up(Delays(), 112.0)


def test_overload_that_comes_again_and_again_is_no_storm() -> None:
    """An attacker may cause it so that a dead node goes unnoticed."""
    backlog = Backlog()
    kept_up = [backlog.keeps_up(LATE if second % 60 < 50 else Delays(), float(second)) for second in range(3600)]
    assert sum(not kept for kept in kept_up) < BEHIND_MOST_S + 0.1 * 3600


def test_overload_that_lasts_is_no_storm() -> None:
    backlog = Backlog()
    kept_up = [backlog.keeps_up(LATE, 100.0 + second) for second in range(200)]
    assert kept_up == [second >= BEHIND_MOST_S for second in range(200)]
