"""When an ingress that is not connected is started again."""

from datetime import UTC, datetime, timedelta

import pytest

from fleet.planning.snapshot import ProviderStatus
from traffic.planning.ingress import plan_ingress

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("status", "away_s", "started_s", "start_whole"),
    [
        (ProviderStatus.RUNNING, 900, 900, None),
        (ProviderStatus.UNKNOWN, 900, 900, None),
        (ProviderStatus.AGENT_DEAD, 0.5, 900, None),
        (ProviderStatus.AGENT_DEAD, 1.5, 900, False),
        (ProviderStatus.GONE, 0, 900, True),
        (ProviderStatus.GONE, 0, 6, True),
        (ProviderStatus.GONE, 4, 4, None),
        (ProviderStatus.GONE, 0, 4, None),
    ],
)
def test_what_is_dead_is_started_but_not_in_a_storm(
    status: ProviderStatus, away_s: float, started_s: float, start_whole: bool | None
) -> None:
    away, started = NOW - timedelta(seconds=away_s), NOW - timedelta(seconds=started_s)
    action = plan_ingress(status, known=True, disconnected_at=away, started_at=started, now=NOW)
    assert (action.start_whole if action else None) is start_whole


def test_an_ingress_nobody_has_heard_of_is_started() -> None:
    action = plan_ingress(ProviderStatus.GONE, known=False, disconnected_at=None, started_at=None, now=NOW)
    assert action is not None
    assert action.start_whole
