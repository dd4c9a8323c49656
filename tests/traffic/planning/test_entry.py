"""When DNS is changed, and when it is left alone: tables of cases."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from traffic.planning.entry import (
    EntryRegion,
    EntrySettings,
    EntryView,
    HoldEntry,
    PublishEntry,
    plan_entry,
    weights_of,
)

NOW = datetime(2026, 11, 23, 12, tzinfo=UTC)
SETTINGS = EntrySettings()


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def alive(name: str, share: float = 1.0, since_s: float = 600.0) -> EntryRegion:
    return EntryRegion(name, share, alive_since=ago(since_s))


def dead(name: str, share: float = 1.0, since_s: float = 600.0) -> EntryRegion:
    return EntryRegion(name, share, dead_since=ago(since_s))


def view(*regions: EntryRegion, **stated: object) -> EntryView:
    seen = EntryView(regions, {"a": 128, "b": 127}, 4, changed_at=ago(600))
    return replace(seen, **stated)  # type: ignore[arg-type]


def decide(seen: EntryView) -> PublishEntry | HoldEntry | None:
    return plan_entry(seen, SETTINGS, NOW)


def published(seen: EntryView) -> dict[str, int]:
    decision = decide(seen)
    assert isinstance(decision, PublishEntry), decision
    return dict(decision.weights)


def held(seen: EntryView) -> str:
    decision = decide(seen)
    assert isinstance(decision, HoldEntry), decision
    return decision.reason


def test_the_first_weights_are_published_at_once() -> None:
    decision = decide(view(alive("a", 3), alive("b", 1), weights={}, revision=0, changed_at=None))
    assert decision == PublishEntry({"a": 191, "b": 64}, 0, 1, "the first weights")


def test_what_is_as_planned_is_left_alone() -> None:
    assert decide(view(alive("a"), alive("b"))) is None


def test_a_dead_entry_gets_nobody_after_half_a_minute_and_without_a_pause() -> None:
    assert decide(view(dead("a", since_s=29), alive("b"), changed_at=ago(1))) is None
    decision = decide(view(dead("a", since_s=30), alive("b"), changed_at=ago(1)))
    assert decision == PublishEntry({"a": 0, "b": 255}, 4, 5, "the entry of a is dead")


def test_an_evacuated_region_gets_nobody_without_a_pause() -> None:
    assert published(view(replace(alive("a"), evacuated=True), alive("b"), changed_at=ago(1))) == {"a": 0, "b": 255}


@pytest.mark.parametrize(
    ("regions", "in_force"),
    [
        ((replace(alive("a"), evacuated=True), dead("b")), {"a": 255, "b": 0}),
        ((alive("a", 0.0), dead("b", 1.0)), {"a": 255, "b": 0}),
        ((replace(alive("a"), evacuated=True), replace(alive("b"), evacuated=True)), {"a": 128, "b": 127}),
    ],
)
def test_the_last_region_that_lives_is_never_0(regions: tuple[EntryRegion, ...], in_force: dict[str, int]) -> None:
    assert published(view(*regions, weights={"a": 1, "b": 254})) == in_force


def test_a_region_that_only_just_came_back_is_better_than_none() -> None:
    seen = view(dead("a"), alive("b", since_s=5), weights={"a": 255, "b": 0})
    assert published(seen) == {"a": 0, "b": 255}


def test_if_nobody_answers_nothing_is_changed() -> None:
    assert "rather nothing is seen" in held(view(dead("a"), dead("b")))


def test_entries_that_die_together_are_not_believed_for_a_minute() -> None:
    regions = dead("a", since_s=40), dead("b", since_s=45), alive("c")
    weights = {"a": 85, "b": 85, "c": 85}
    assert held(view(*regions, weights=weights)).startswith("the entries of a, b fell silent together")
    late = dead("a", since_s=90), dead("b", since_s=95), alive("c")
    assert published(view(*late, weights=weights)) == {"a": 0, "b": 0, "c": 255}


def test_a_region_comes_back_after_a_minute_of_health_and_the_pause() -> None:
    weights = {"a": 0, "b": 255}
    assert decide(view(alive("a", since_s=59), alive("b"), weights=weights)) is None
    assert "59 s ago" in held(view(alive("a", since_s=60), alive("b"), weights=weights, changed_at=ago(59)))
    assert published(view(alive("a", since_s=60), alive("b"), weights=weights, changed_at=ago(60))) == {
        "a": 128,
        "b": 127,
    }


def test_a_move_of_few_points_is_not_worth_it() -> None:
    assert "4.7 points are too few" in held(view(alive("a", 0.55), alive("b", 0.45)))
    assert published(view(alive("a", 0.56), alive("b", 0.44))) == {"a": 143, "b": 112}


def test_a_pending_change_holds_the_next_and_an_urgent_one_for_two_minutes_only() -> None:
    planned = alive("a", 3), alive("b")
    evacuated = replace(alive("a"), evacuated=True), alive("b")
    for regions, seconds in ((planned, 600), (evacuated, 119)):
        assert "not yet known to all servers" in held(view(*regions, pending_since=ago(seconds)))
    assert published(view(*evacuated, pending_since=ago(120))) == {"a": 0, "b": 255}


def test_a_strangers_revision_holds_all_else() -> None:
    decision = decide(view(dead("a"), alive("b"), foreign="somebody wrote rev=9"))
    assert decision == HoldEntry("somebody wrote rev=9", needs_person=True)


def test_a_region_that_is_no_more_loses_its_record() -> None:
    decision = decide(view(alive("a"), weights={"a": 255, "b": 0}))
    assert isinstance(decision, PublishEntry)
    assert (decision.weights, decision.reason) == ({"a": 255}, "b has no entry any more")


def test_without_any_entry_there_is_nothing_to_do() -> None:
    assert decide(view()) is None


def test_weights_of_nobody_are_refused() -> None:
    with pytest.raises(ValueError, match="no region is left"):
        weights_of({"a": 0.0})
