"""Starts of ingresses that are not connected, and acknowledgement of drains by all ingresses."""

from datetime import UTC, datetime, timedelta

import pytest

from fleet.reconcile.planning.snapshot import ProviderStatus
from traffic.routing.planning.ingresses import FollowingIngress, TableInForce, plan_ingress, plan_unrouted

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


def test_an_ingress_that_never_reported_is_started() -> None:
    action = plan_ingress(ProviderStatus.GONE, known=False, disconnected_at=None, started_at=None, now=NOW)
    assert action is not None
    assert action.start_whole


TABLES = {"east": TableInForce(7, frozenset({"c1"})), "west": TableInForce(3, frozenset())}


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def follows(region: str, revision: int, silent_s: float = 1) -> FollowingIngress:
    return FollowingIngress(region, revision, ago(silent_s))


LISTENING = ago(600)
FOLLOWING = [follows("east", 7), follows("west", 3)]


def unrouted(ingresses: list[FollowingIngress], *, listening_since: datetime | None = LISTENING) -> tuple[str, ...]:
    return plan_unrouted(["c1", "c2", "c3"], TABLES, ingresses, listening_since=listening_since, now=NOW)


def test_what_no_table_sends_anything_to_is_unrouted_once_all_follow() -> None:
    assert unrouted(FOLLOWING) == ("c2", "c3")


def test_one_ingress_that_is_behind_holds_up_the_cells_of_every_region() -> None:
    assert unrouted([follows("east", 7), follows("west", 2)]) == ()


@pytest.mark.parametrize(("silent_s", "expected"), [(10, ()), (11, ("c2", "c3"))])
def test_a_silent_ingress_holds_up_drains_until_it_counts_as_dead(silent_s: float, expected: tuple[str, ...]) -> None:
    assert unrouted([follows("east", 7), follows("west", 2, silent_s)]) == expected


def test_silence_is_counted_only_while_somebody_listened() -> None:
    assert unrouted([follows("west", 2, 300)], listening_since=ago(9)) == ()


def test_nothing_is_unrouted_while_no_ingress_can_acknowledge() -> None:
    assert unrouted(FOLLOWING, listening_since=None) == ()


def test_an_ingress_that_never_spoke_routes_nothing() -> None:
    assert unrouted([*FOLLOWING, FollowingIngress("west", 0, None)]) == ("c2", "c3")


def test_a_region_without_a_table_holds_up_nothing() -> None:
    assert unrouted([*FOLLOWING, follows("new", 0)]) == ("c2", "c3")
