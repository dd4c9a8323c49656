"""A unit is launched once, whole and in one zone, although answers are lost and processes crash."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fleet.capacity.planning.pools import LaunchOutcome, PausePool, PoolView, Scope, UnitView, pauses
from fleet.clouds.planning.launches import (
    SETTINGS,
    AttemptView,
    CancelUnit,
    EndAttempt,
    FindMachines,
    KeepAttempt,
    RepeatCall,
    Step,
    UnitLaunched,
    WaitUntil,
    WriteAttempt,
    after_call,
    after_search,
    next_step,
    token_of,
)
from tests.fleet.capacity.test_pools_planner import UNIT, later, pool
from tests.fleet.fleets import NOW

POOLS = (pool(1), pool(2))
FIRST = AttemptView(1, token_of("sw-1", "u-1", 1), POOLS[0], 2, NOW, NOW)


def step(*attempts: AttemptView, now: datetime = NOW, unit: UnitView = UNIT, pools: Sequence[PoolView] = POOLS) -> Step:
    return next_step(unit, attempts, pools, "sw-1", now)


def test_the_first_attempt_is_written_with_a_token_of_its_own() -> None:
    first = step()
    assert first == WriteAttempt(1, FIRST.token, POOLS[0], "on_demand in us-east-1b")
    assert len(FIRST.token) == 64
    assert len({token_of("sw-1", "u-1", 1), token_of("sw-1", "u-1", 2), token_of("sw-2", "u-1", 1)}) == 3


@pytest.mark.parametrize("outcome", [None, LaunchOutcome.UNKNOWN, LaunchOutcome.LATER])
def test_what_may_have_been_carried_out_is_repeated_as_it_was(outcome: LaunchOutcome | None) -> None:
    attempt = replace(FIRST, outcome=outcome)
    changed = (replace(POOLS[0], image="ami-2", enabled=False), POOLS[1])
    assert step(attempt, pools=changed) == RepeatCall(attempt)
    assert step(replace(attempt, again_at=later(5))) == WaitUntil(
        later(5), "attempt 1 in on_demand in us-east-1b is in doubt"
    )


@pytest.mark.parametrize("outcome", [LaunchOutcome.NO_CAPACITY, LaunchOutcome.NO_QUOTA, LaunchOutcome.ATTEMPT_ENDED])
def test_another_attempt_follows_a_definite_end(outcome: LaunchOutcome) -> None:
    ended = replace(FIRST, outcome=outcome, ended_at=NOW)
    resting = replace(POOLS[0], paused_until=later(180), pause_reason=outcome)
    second = step(ended, pools=(resting, POOLS[1]))
    assert isinstance(second, WriteAttempt)
    assert (second.number, second.pool) == (2, POOLS[1])


def test_a_refusal_ends_the_unit_and_tries_no_other_pool() -> None:
    refused = replace(FIRST, outcome=LaunchOutcome.REFUSED, ended_at=NOW)
    assert step(refused) == CancelUnit("attempt 1 in on_demand in us-east-1b was refused")


def test_what_nobody_wants_is_cancelled_but_only_once_nothing_of_it_may_run() -> None:
    unwanted = replace(UNIT, wanted=False)
    assert step(unit=unwanted) == CancelUnit("it is no longer wanted")
    assert isinstance(step(FIRST, unit=unwanted), FindMachines)
    launched = replace(FIRST, outcome=LaunchOutcome.LAUNCHED, ended_at=NOW)
    assert step(launched, unit=unwanted) == UnitLaunched(launched)


@pytest.mark.parametrize(
    ("changes", "now", "why"),
    [
        ({"outcome": LaunchOutcome.MISMATCHED}, NOW,
         "the token of attempt 1 in on_demand in us-east-1b was used for another request"),
        ({"outcome": LaunchOutcome.REFUSED}, NOW,
         "attempt 1 in on_demand in us-east-1b was refused when it was repeated, and may have been carried out before"),
        ({"outcome": LaunchOutcome.NO_CAPACITY}, NOW,
         "attempt 1 in on_demand in us-east-1b found no capacity when it was repeated, and may have been carried out "
         "before"),
        ({"outcome": LaunchOutcome.NO_QUOTA}, NOW,
         "attempt 1 in on_demand in us-east-1b found no quota when it was repeated, and may have been carried out "
         "before"),
        ({"outcome": LaunchOutcome.UNKNOWN}, later(3600),
         "the token of attempt 1 in on_demand in us-east-1b is too old to be repeated"),
    ],
)  # fmt: skip
def test_where_repeating_proves_nothing_its_machines_are_looked_for(
    changes: dict[str, Any], now: datetime, why: str
) -> None:
    attempt = replace(FIRST, **changes)
    assert step(attempt, now=now) == FindMachines(attempt, why)


UNTOLD = [LaunchOutcome.REFUSED, LaunchOutcome.NO_CAPACITY, LaunchOutcome.NO_QUOTA]
"""Outcomes of a repeated call that prove nothing about earlier calls."""


@pytest.mark.parametrize("outcome", UNTOLD)
@pytest.mark.parametrize("called_s", [5, -5], ids=["later", "by a host whose clock is behind"])
def test_what_a_first_call_proves_a_repeated_one_does_not(outcome: LaunchOutcome, called_s: float) -> None:
    assert after_call(FIRST, outcome, NOW) == EndAttempt(outcome)
    repeated = replace(FIRST, called_at=later(called_s))
    assert after_call(repeated, outcome, later(6)) == KeepAttempt(outcome, later(11))


@pytest.mark.parametrize("outcome", [LaunchOutcome.LAUNCHED, LaunchOutcome.ATTEMPT_ENDED])
def test_what_a_token_was_looked_up_for_is_definite_however_often_it_was_called(outcome: LaunchOutcome) -> None:
    assert after_call(replace(FIRST, called_at=later(5)), outcome, later(6)) == EndAttempt(outcome)


def test_pauses_grow_with_the_age_of_an_attempt_and_heed_what_is_asked_for() -> None:
    ages = [0, 20, 200, 2000]
    kept = [after_call(FIRST, LaunchOutcome.UNKNOWN, later(age)) for age in ages]
    assert kept == [
        KeepAttempt(LaunchOutcome.UNKNOWN, later(age + pause))
        for age, pause in zip(ages, [5, 10, 100, 300], strict=True)
    ]
    asked = after_call(FIRST, LaunchOutcome.LATER, NOW, retry_after_s=30)
    assert asked == KeepAttempt(LaunchOutcome.LATER, later(30))


def test_machines_count_as_absent_only_in_a_complete_list_and_late_enough() -> None:
    old = later(SETTINGS.visible_after_s)
    assert after_search(FIRST, 2, complete=False, now=NOW) == EndAttempt(LaunchOutcome.LAUNCHED)
    assert after_search(FIRST, 0, complete=True, now=old) == EndAttempt(LaunchOutcome.ATTEMPT_ENDED)
    assert isinstance(after_search(FIRST, 0, complete=False, now=old), KeepAttempt)
    assert isinstance(after_search(FIRST, 0, complete=True, now=later(599)), KeepAttempt)
    for outcome in UNTOLD:
        untold = replace(FIRST, outcome=outcome)
        assert after_search(untold, 0, complete=True, now=old) == EndAttempt(outcome)
        assert after_search(untold, 2, complete=True, now=old) == EndAttempt(LaunchOutcome.LAUNCHED)


def test_where_no_pool_may_be_used_it_is_looked_at_again_later() -> None:
    assert step(pools=()) == WaitUntil(later(180), "us-east-1 has no pool of trn1.32xlarge")


@dataclass
class ModelCloud:
    """EC2 as documented: all or none, once for a token while it remembers it, and lagging lists. `forbids`: its answer
    to every launch before it checks the token; None: it checks."""

    now: datetime = NOW
    room: dict[int, int] = field(default_factory=dict)
    asked: dict[str, tuple[object, list[str]]] = field(default_factory=dict)
    machines: dict[str, tuple[str, str, datetime]] = field(default_factory=dict)
    """Machine to its attempt's token, its zone and its time of launch."""
    forbids: LaunchOutcome | None = None

    def launch(self, attempt: AttemptView) -> LaunchOutcome:
        if self.forbids is not None:
            return self.forbids
        said = (attempt.pool, attempt.count)
        if attempt.token in self.asked:
            before, ids = self.asked[attempt.token]
            if before != said:
                return LaunchOutcome.MISMATCHED
            return LaunchOutcome.LAUNCHED if set(ids) & set(self.machines) else LaunchOutcome.ATTEMPT_ENDED
        if self.room.get(attempt.pool.id, 0) < attempt.count:
            return LaunchOutcome.NO_CAPACITY
        self.room[attempt.pool.id] -= attempt.count
        ids = [f"i-{attempt.token[:6]}-{index}" for index in range(attempt.count)]
        self.asked[attempt.token] = (said, ids)
        self.machines |= dict.fromkeys(ids, (attempt.token, attempt.pool.zone, self.now))
        return LaunchOutcome.LAUNCHED

    def visible(self, token: str) -> int:
        lag = timedelta(seconds=SETTINGS.visible_after_s)
        return sum(own == token and self.now - born >= lag for own, _, born in self.machines.values())

    def end(self, machine: str) -> None:
        del self.machines[machine]

    def forget_tokens(self) -> None:
        self.asked.clear()


@dataclass
class Unit:
    view: UnitView
    attempts: list[AttemptView] = field(default_factory=list)
    done: Step | None = None

    def open(self) -> Iterator[AttemptView]:
        return (one for one in self.attempts if one.ended_at is None)

    def change(self, attempt: AttemptView, **changes: Any) -> AttemptView:
        changed = replace(attempt, **changes)
        self.attempts[self.attempts.index(attempt)] = changed
        return changed


class Crash(Exception):
    """The process exits; what it wrote stays."""


class UnitsInAModelCloud(RuleBasedStateMachine):
    """Units are wanted and given up, capacity changes, answers are lost, processes crash at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.cloud = ModelCloud()
        self.pools: dict[int, PoolView] = {}
        self.units: list[Unit] = []
        self.said: dict[str, object] = {}

    @initialize(rooms=st.lists(st.integers(1, 6), min_size=1, max_size=3))
    def begin(self, rooms: list[int]) -> None:
        self.pools = {number: pool(number) for number in range(len(rooms))}
        self.cloud.room = dict(enumerate(rooms))

    @rule(count=st.integers(1, 3))
    @precondition(lambda self: sum(unit.done is None for unit in self.units) < 3)
    def a_unit_is_wanted(self, count: int) -> None:
        self.units.append(Unit(replace(UNIT, id=f"u-{len(self.units)}", count=count)))

    @rule()
    @precondition(lambda self: self.units)
    def the_oldest_open_unit_is_given_up(self) -> None:
        unit = next((one for one in self.units if one.done is None), self.units[-1])
        unit.view = replace(unit.view, wanted=False)

    @rule(hours=st.sampled_from([2, 48]))
    def nothing_runs_for_so_long_that_tokens_are_forgotten(self, hours: int) -> None:
        self.cloud.now += timedelta(hours=hours)
        self.cloud.forget_tokens()

    @rule(number=st.integers(0, 2), room=st.integers(0, 6))
    def capacity_changes(self, number: int, room: int) -> None:
        self.cloud.room[number] = room

    @rule(number=st.integers(0, 2), image=st.sampled_from(["ami-1", "ami-2"]), enabled=st.booleans())
    def a_person_changes_a_pool(self, number: int, image: str, enabled: bool) -> None:
        if number in self.pools:
            self.pools[number] = replace(self.pools[number], image=image, enabled=enabled)

    @rule(data=st.data())
    @precondition(lambda self: self.cloud.machines)
    def a_machine_ends(self, data: st.DataObject) -> None:
        self.cloud.end(data.draw(st.sampled_from(sorted(self.cloud.machines))))

    @rule(
        after_s=st.sampled_from([6, 6, 60, 700]),
        dies=st.sampled_from([None, None, None, "written", "called"]),
        lost=st.sampled_from([None, None, "after", "after", "before", "throttled"]),
        complete=st.booleans(),
        forbids=st.sampled_from([None, *UNTOLD]),
    )
    @precondition(lambda self: self.units)
    def a_pass(
        self, after_s: int, dies: str | None, lost: str | None, complete: bool, forbids: LaunchOutcome | None
    ) -> None:
        self.cloud.now += timedelta(seconds=after_s)
        self.cloud.forbids = forbids
        for unit in self.units:
            with suppress(Crash):
                self.work(unit, dies, lost, complete)

    @rule(forbids=st.sampled_from(UNTOLD))
    @precondition(lambda self: self.units)
    def answers_are_lost_and_the_same_calls_are_forbidden(self, forbids: LaunchOutcome) -> None:
        self.a_pass(6, None, "after", True, None)
        self.a_pass(6, None, None, True, forbids)

    def work(self, unit: Unit, dies: str | None = None, lost: str | None = None, complete: bool = True) -> None:
        """Carries out a step as the service does: writes, calls, writes."""
        now = self.cloud.now
        planned = next_step(unit.view, unit.attempts, list(self.pools.values()), "sw-1", now)
        match planned:
            case WriteAttempt(number, token, chosen):
                attempt = AttemptView(number, token, chosen, unit.view.count, now, now)
                unit.attempts.append(attempt)
                self.call(unit, attempt, dies, lost)
            case RepeatCall(attempt):
                self.call(unit, unit.change(attempt, called_at=now), dies, lost)
            case FindMachines(attempt):
                found = self.cloud.visible(attempt.token) if complete else 0
                self.write(unit, attempt, after_search(attempt, found, complete, now))
            case CancelUnit() | UnitLaunched():
                unit.done = planned

    def call(self, unit: Unit, attempt: AttemptView, dies: str | None, lost: str | None) -> None:
        now = self.cloud.now
        if dies == "written":
            raise Crash
        if lost == "before":
            outcome = LaunchOutcome.UNKNOWN
        elif lost == "throttled":
            outcome = LaunchOutcome.LATER
        else:
            self.watch(attempt)
            outcome = self.cloud.launch(attempt)
            outcome = LaunchOutcome.UNKNOWN if lost == "after" else outcome
        if dies == "called":
            raise Crash
        for rest in pauses(outcome, Scope.POOL, "full", attempt.pool.id, list(self.pools.values()), now):
            one = self.pools[rest.pool]
            if isinstance(rest, PausePool):
                changed = replace(one, paused_until=rest.until, failures=rest.failures, pause_reason=rest.reason)
            else:
                changed = replace(one, paused_until=None, failures=0)
            self.pools[rest.pool] = changed
        self.write(unit, attempt, after_call(attempt, outcome, now))

    def write(self, unit: Unit, attempt: AttemptView, after: EndAttempt | KeepAttempt) -> None:
        if isinstance(after, EndAttempt):
            unit.change(attempt, outcome=after.outcome, ended_at=self.cloud.now)
        else:
            unit.change(attempt, outcome=after.outcome, again_at=after.again_at)

    def watch(self, attempt: AttemptView) -> None:
        """A token is never used for two requests."""
        said = (attempt.pool, attempt.count)
        assert self.said.setdefault(attempt.token, said) == said

    @invariant()
    def at_most_one_attempt_of_a_unit_is_open_and_it_is_the_last(self) -> None:
        for unit in self.units:
            assert list(unit.open()) in ([], unit.attempts[-1:])
            assert [one.number for one in unit.attempts] == list(range(1, len(unit.attempts) + 1))

    @invariant()
    def never_more_machines_than_a_unit_wants_and_never_in_two_zones(self) -> None:
        for unit in self.units:
            tokens = {one.token for one in unit.attempts}
            there = [(zone, token) for token, zone, _ in self.cloud.machines.values() if token in tokens]
            assert len(there) <= unit.view.count
            assert len(set(there)) <= 1

    @invariant()
    def every_machine_is_known_to_be_launched_or_in_doubt(self) -> None:
        known = {
            one.token
            for unit in self.units
            for one in unit.attempts
            if one.ended_at is None or one.outcome is LaunchOutcome.LAUNCHED
        }
        assert {token for token, _, _ in self.cloud.machines.values()} <= known

    @invariant()
    def what_is_cancelled_runs_nowhere(self) -> None:
        for unit in self.units:
            if isinstance(unit.done, CancelUnit):
                tokens = {one.token for one in unit.attempts}
                assert not [token for token, _, _ in self.cloud.machines.values() if token in tokens]

    def teardown(self) -> None:
        """With a cloud that answers and has room, each unit is soon launched or given up."""
        self.cloud.forbids = None
        for number, one in self.pools.items():
            self.pools[number] = replace(one, enabled=True)
            self.cloud.room[number] = 100
        for unit in self.units:
            for _ in range(40):
                if unit.done is not None:
                    break
                self.work(unit)
                self.cloud.now += timedelta(seconds=300)
            assert unit.done is not None, unit
            assert not list(unit.open())
        self.never_more_machines_than_a_unit_wants_and_never_in_two_zones()
        self.every_machine_is_known_to_be_launched_or_in_doubt()


TestUnitsInAModelCloud = UnitsInAModelCloud.TestCase
TestUnitsInAModelCloud.settings = settings(stateful_step_count=40)
