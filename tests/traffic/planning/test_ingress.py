"""When an ingress that is not connected is started again."""

from datetime import UTC, datetime, timedelta

import pytest

from fleet.planning.snapshot import ProviderStatus
from traffic.planning.ingress import plan_ingress

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("status", "away_s", "start_whole"),
    [
        (ProviderStatus.RUNNING, 900, None),
        (ProviderStatus.UNKNOWN, 900, None),
        (ProviderStatus.AGENT_DEAD, 0.5, None),
        (ProviderStatus.AGENT_DEAD, 1.5, False),
        (ProviderStatus.GONE, 4, None),
        (ProviderStatus.GONE, 6, True),
    ],
)
def test_only_what_is_dead_long_enough_is_started(
    status: ProviderStatus, away_s: float, start_whole: bool | None
) -> None:
    action = plan_ingress(status, known=True, disconnected_at=NOW - timedelta(seconds=away_s), now=NOW)
    assert (action.start_whole if action else None) is start_whole


def test_an_ingress_nobody_has_heard_of_is_started() -> None:
    action = plan_ingress(ProviderStatus.GONE, known=False, disconnected_at=None, now=NOW)
    assert action is not None
    assert action.start_whole
