"""When a draining cell gets nothing new any more: acknowledged by all, and never merely because nobody speaks."""

from datetime import UTC, datetime, timedelta

import pytest

from traffic.planning.ingress import FollowingIngress, TableInForce, plan_unrouted

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
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


def test_nothing_is_unrouted_while_nobody_can_acknowledge() -> None:
    assert unrouted(FOLLOWING, listening_since=None) == ()


def test_an_ingress_that_never_spoke_routes_nothing() -> None:
    assert unrouted([*FOLLOWING, FollowingIngress("west", 0, None)]) == ("c2", "c3")


def test_a_region_without_a_table_holds_up_nothing() -> None:
    assert unrouted([*FOLLOWING, follows("new", 0)]) == ("c2", "c3")
