"""What never happens to the entry of all clients, in any world and any sequence."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from hypothesis import example, given
from hypothesis import strategies as st

from traffic.planning.entry import (
    WHOLE,
    EntryRegion,
    EntrySettings,
    EntryView,
    PublishEntry,
    plan_entry,
    weights_of,
)

START = datetime(2026, 11, 23, 12, tzinfo=UTC)
SETTINGS = EntrySettings()
NAMES = ("a", "b", "c", "d")
shares = st.one_of(st.just(0.0), st.floats(1e-6, 1e6))
several = st.dictionaries(st.sampled_from(NAMES), shares, min_size=1).filter(lambda each: sum(each.values()) > 0)
changes = st.tuples(
    st.sampled_from(NAMES),
    st.sampled_from(["dies", "lives", "evacuated", "open", "share"]),
    shares,
    st.integers(1, 200),
)


@given(several)
@example({"a": 903.4259278020527, "b": 903.4259278020528, "c": 397.23997685875156})
def test_weights_sum_to_all_and_the_greater_share_has_no_lesser_weight(planned: dict[str, float]) -> None:
    weights = weights_of(planned)
    assert sum(weights.values()) == WHOLE
    assert all(not weights[name] for name, share in planned.items() if not share)
    by_share = sorted(planned, key=lambda name: (planned[name], weights[name]))
    assert [weights[name] for name in by_share] == sorted(weights.values())


@given(several, st.sampled_from(NAMES), st.floats(1.0, 1e3))
def test_a_share_that_grows_costs_no_weight(planned: dict[str, float], name: str, factor: float) -> None:
    grown = {**planned, name: planned.get(name, 0.0) * factor}
    assert weights_of(grown).get(name, 0) >= weights_of(planned).get(name, 0)


class World:
    """Regions of which one thing changes at a time; what is published is in force a minute later."""

    def __init__(self) -> None:
        self.now = START
        self.regions = {name: EntryRegion(name, 1.0, alive_since=START) for name in NAMES}
        self.view = EntryView((), {}, 0)
        self.published: list[tuple[datetime, PublishEntry]] = []

    def change(self, name: str, what: str, share: float) -> None:
        region = self.regions[name]
        self.regions[name] = {
            "dies": replace(region, alive_since=None, dead_since=region.dead_since or self.now),
            "lives": replace(region, dead_since=None, alive_since=region.alive_since or self.now),
            "evacuated": replace(region, evacuated=True),
            "open": replace(region, evacuated=False),
            "share": replace(region, share=share),
        }[what]

    def look(self, after_s: float) -> PublishEntry | None:
        self.now += timedelta(seconds=after_s)
        pending = self.view.pending_since
        if pending is not None and (self.now - pending).total_seconds() >= 60:
            pending = None
        seen = replace(self.view, regions=tuple(self.regions.values()), pending_since=pending)
        decision = plan_entry(seen, SETTINGS, self.now)
        self.view = seen
        if not isinstance(decision, PublishEntry):
            return None
        self.view = replace(
            seen,
            weights=decision.weights,
            revision=decision.revision,
            changed_at=self.now,
            pending_since=self.now,
        )
        self.published.append((self.now, decision))
        return decision


@given(st.lists(changes, max_size=25))
def test_in_every_sequence_who_lives_gets_clients(steps: list[tuple[str, str, float, int]]) -> None:
    world = World()
    world.look(0)
    for name, what, share, seconds in steps:
        world.change(name, what, share)
        before = world.view
        decision = world.look(seconds)
        if decision is None:
            continue
        assert sum(decision.weights.values()) == WHOLE
        assert decision.revision == decision.seen + 1 == before.revision + 1
        live = {region.name for region in world.regions.values() if region.alive_since is not None}
        assert any(decision.weights[each] for each in live), "the last region that lives is never 0"
        assert plan_entry(replace(world.view, pending_since=None), SETTINGS, world.now) is None, "once is enough"
        pause_s = (world.now - before.changed_at).total_seconds() if before.changed_at else SETTINGS.pause_s
        if pause_s < SETTINGS.pause_s:
            lost = {each for each, weight in before.weights.items() if weight and not decision.weights[each]}
            assert any(world.regions[each].evacuated or each not in live for each in lost), "only in a hurry"


@given(st.lists(changes, max_size=12))
def test_what_is_wanted_is_in_force_soon_after_things_are_quiet(steps: list[tuple[str, str, float, int]]) -> None:
    world = World()
    for name, what, share, seconds in steps:
        world.change(name, what, share)
        world.look(seconds)
    for _ in range(6):
        world.look(61)
    live = {region.name for region in world.regions.values() if region.alive_since is not None}
    if not live:
        return
    serving = {name for name in live if not world.regions[name].evacuated} or live
    assert {name for name, weight in world.view.weights.items() if weight} <= serving
