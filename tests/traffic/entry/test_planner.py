"""When DNS changes and when it does not (tables and invariants), Route 53 batches, and load balancer targets."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from traffic.entry.planner import (
    WHOLE,
    EntryRegion,
    EntrySettings,
    EntryTargetName,
    EntryView,
    HoldEntry,
    PublishedRecords,
    PublishEntry,
    Target,
    TargetIngress,
    TargetPlan,
    is_same,
    plan_entry,
    plan_targets,
    records_of,
    swap,
    text_value,
    token_of,
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


def test_a_dead_entry_gets_no_clients_after_half_a_minute_and_without_a_pause() -> None:
    assert decide(view(dead("a", since_s=29), alive("b"), changed_at=ago(1))) is None
    decision = decide(view(dead("a", since_s=30), alive("b"), changed_at=ago(1)))
    assert decision == PublishEntry({"a": 0, "b": 255}, 4, 5, "the entry of a is dead")


def test_an_evacuated_region_gets_no_clients_without_a_pause() -> None:
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


def test_if_no_entry_answers_nothing_is_changed() -> None:
    assert "a fault of observation" in held(view(dead("a"), dead("b")))


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
        assert "not on all servers yet" in held(view(*regions, pending_since=ago(seconds)))
    assert published(view(*evacuated, pending_since=ago(120))) == {"a": 0, "b": 255}


def test_a_foreign_revision_holds_all_else() -> None:
    decision = decide(view(dead("a"), alive("b"), foreign="somebody wrote rev=9"))
    assert decision == HoldEntry("somebody wrote rev=9", needs_person=True)


def test_a_region_that_is_no_more_loses_its_record() -> None:
    decision = decide(view(alive("a"), weights={"a": 255, "b": 0}))
    assert isinstance(decision, PublishEntry)
    assert (decision.weights, decision.reason) == ({"a": 255}, "b no longer has an entry")


def test_without_any_entry_there_is_nothing_to_do() -> None:
    assert decide(view()) is None


def test_weights_without_a_region_are_refused() -> None:
    with pytest.raises(ValueError, match="no region is left"):
        weights_of({"a": 0.0})


START = datetime(2026, 11, 23, 12, tzinfo=UTC)
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
    """Regions of which one property changes at a time; published weights are in force a minute later."""

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
        assert any(decision.weights[each] for each in live), "the last living region never gets weight 0"
        assert plan_entry(replace(world.view, pending_since=None), SETTINGS, world.now) is None, "it is published once"
        pause_s = (world.now - before.changed_at).total_seconds() if before.changed_at else SETTINGS.pause_s
        if pause_s < SETTINGS.pause_s:
            lost = {each for each, weight in before.weights.items() if weight and not decision.weights[each]}
            assert any(world.regions[each].evacuated or each not in live for each in lost), "only if urgent"


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


NAME = "llm.example.com"
TARGETS = {"a": EntryTargetName("a.elb.amazonaws.com", "Z1"), "b": EntryTargetName("b.elb.amazonaws.com", "Z1")}
TOKEN = "0123456789abcdef" * 2


def test_a_batch_deletes_what_was_read_exactly_and_creates_all_anew() -> None:
    old = {"Name": f"{NAME}.", "Type": "A", "TTL": 60, "ResourceRecords": [{"Value": "192.0.2.1"}]}
    text = {"Name": f"_switchyard.{NAME}.", "Type": "TXT", "TTL": 10, "ResourceRecords": [{"Value": '"theirs"'}]}
    changes = swap(NAME, PublishedRecords((old,), text), records_of(NAME, {"b": 1, "a": 254}, TARGETS), 8, TOKEN)
    assert [(each["Action"], each["ResourceRecordSet"]["Type"]) for each in changes] == [
        ("DELETE", "TXT"), ("DELETE", "A"), ("CREATE", "TXT"), ("CREATE", "A"), ("CREATE", "A"),
    ]  # fmt: skip
    assert changes[0]["ResourceRecordSet"] == text
    assert changes[1]["ResourceRecordSet"] == old
    assert [each["ResourceRecordSet"]["Weight"] for each in changes[3:]] == [254, 1]


def test_a_token_is_read_from_our_text_alone() -> None:
    assert token_of(text_value(12, TOKEN)) == TOKEN
    for text in ("", '"rev=12"', f"{text_value(12, TOKEN)} {text_value(12, TOKEN)}", '"switchyard rev=1 token=zz"'):
        assert token_of(text) == ""


def test_names_may_be_spelt_otherwise_and_values_may_not() -> None:
    ours = records_of(NAME, {"a": 255}, TARGETS)[0]
    read = {
        **ours,
        "Name": "LLM.example.com.",
        "AliasTarget": {**ours["AliasTarget"], "DNSName": "a.elb.amazonaws.com."},
    }
    assert is_same([ours], [read])
    assert not is_same([ours], [{**read, "Weight": 254}])
    assert not is_same([ours], [])


def test_the_fingerprint_knows_no_order() -> None:
    records = records_of(NAME, {"a": 100, "b": 155}, TARGETS)
    assert PublishedRecords(records).fingerprint == PublishedRecords(records[::-1]).fingerprint
    assert PublishedRecords(records).fingerprint != PublishedRecords(records[:1]).fingerprint


A = TargetIngress("i-a", "10.0.0.1", 8080, ready=True)
B = TargetIngress("i-b", "10.0.0.2", 8080, ready=True)


def target(ingress: TargetIngress, **columns: object) -> Target:
    return replace(Target(ingress.id, "g", ingress.address, ingress.port), **columns)  # type: ignore[arg-type]


def test_one_is_registered_once_it_runs_a_table() -> None:
    assert plan_targets(["g"], [replace(A, ready=False)], []) == TargetPlan()
    assert plan_targets(["g"], [A], []) == TargetPlan(register=(target(A),))
    assert plan_targets(["g"], [A], [target(A)]) == TargetPlan()


def test_one_that_falls_silent_stays() -> None:
    assert plan_targets(["g"], [replace(A, ready=False)], [target(A)]) == TargetPlan()


def test_one_that_leaves_is_taken_out_if_another_serves() -> None:
    leaving = replace(A, leaving=True)
    assert plan_targets(["g"], [leaving], [target(A)]) == TargetPlan()
    assert plan_targets(["g"], [leaving, B], [target(A), target(B)]) == TargetPlan(deregister=(target(A),))
    assert plan_targets(["g"], [leaving, B], [target(A, draining=True), target(B)]) == TargetPlan()


def test_one_that_is_no_more_is_taken_out_also_as_the_last() -> None:
    assert plan_targets(["g"], [], [target(A)]) == TargetPlan(deregister=(target(A),))


def test_an_address_that_another_ingress_has_by_now_is_left_registered() -> None:
    heir = TargetIngress("i-heir", A.address, A.port, ready=True)
    assert plan_targets(["g"], [heir], [target(A)]) == TargetPlan(register=(target(heir),), forget=(target(A),))
    assert plan_targets(["g"], [heir], [target(A), target(heir)]) == TargetPlan(forget=(target(A),))


addresses = st.sampled_from(["10.0.0.1", "10.0.0.2", "10.0.0.3"])
ingress = st.builds(
    TargetIngress, st.sampled_from("abcd"), addresses, st.just(80), ready=st.booleans(), leaving=st.booleans()
)


@given(
    st.lists(ingress, unique_by=lambda each: each.id),
    st.lists(
        st.builds(Target, st.sampled_from("abcdef"), st.just("g"), addresses, st.just(80), draining=st.booleans()),
        unique_by=lambda each: each.ingress,
    ),
)
def test_nothing_is_said_twice_and_who_serves_is_never_taken_out(
    ingresses: list[TargetIngress], targets: list[Target]
) -> None:
    plan = plan_targets(["g"], ingresses, targets)
    ended = {(each.group, each.address, each.port) for each in plan.deregister}
    assert not ended & {(each.group, each.address, each.port) for each in plan.register}
    assert not {each.ingress for each in plan.deregister} & {
        each.id for each in ingresses if not each.leaving and target(each) in targets
    }
