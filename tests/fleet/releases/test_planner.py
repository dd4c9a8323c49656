"""Kept releases: those that something names, new ones, and the way back. Rollouts: tables of single steps, and a
simulated fleet with late, changed and lost agents and crashing controllers."""

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.reconcile.planning.states import AgentRolloutState
from fleet.releases.planner import (
    AgentDecision,
    AgentRolloutSettings,
    AgentRolloutView,
    AgentView,
    ChangeAgentRollout,
    EnterRing,
    Move,
    MoveAgent,
    RetentionSettings,
    RolloutReleases,
    SettleAgent,
    Standing,
    plan_agent_rollout,
    plan_catch_up,
    plan_removal,
    plan_rings,
)

TWO = RetentionSettings(newest=2, rollouts=1)
KNOWN = ["e", "d", "c", "b", "a"]


def ended(number: int, source: str, target: str) -> RolloutReleases:
    return RolloutReleases(number, source, target, is_active=False)


@pytest.mark.parametrize(
    ("named", "rollouts", "releases", "forgotten"),
    [
        ((), [], ("c", "b", "a"), ()),
        (("b", ""), [], ("c", "a"), ()),
        ((), [ended(1, "a", "b")], ("c",), ()),
        ((), [ended(1, "a", "b"), ended(2, "b", "c")], ("a",), (1,)),
        ((), [RolloutReleases(1, "a", "b", is_active=True), ended(2, "b", "c"), ended(3, "c", "d")], (), (2,)),
    ],
)
def test_what_nothing_names_goes(
    named: tuple[str, ...], rollouts: list[RolloutReleases], releases: tuple[str, ...], forgotten: tuple[int, ...]
) -> None:
    removal = plan_removal(KNOWN, named, rollouts, TWO)
    assert (removal.releases, removal.rollouts) == (releases, forgotten)


names = st.sampled_from("abcdefgh")
rollouts = st.builds(RolloutReleases, st.integers(1, 20), names, names, st.booleans())


@given(st.lists(names, unique=True), st.sets(names), st.lists(rollouts, unique_by=lambda each: each.id))
def test_nothing_that_is_named_goes(known: list[str], named: set[str], told: list[RolloutReleases]) -> None:
    removal = plan_removal(known, named, told, TWO)
    stay = [each for each in told if each.id not in removal.rollouts]
    assert {each for each in told if each.is_active} <= set(stay)
    assert len([each for each in stay if not each.is_active]) <= TWO.rollouts
    gone = set(removal.releases)
    assert not gone & (named | {name for each in stay for name in (each.source, each.target)} | set(known[:2]))
    assert gone | removal.kept >= set(known)
    assert not gone & removal.kept


NOW = datetime(2026, 11, 23, 12, 0, tzinfo=UTC)
OLD, NEW = "0" * 16, "1" * 16
SETTINGS = AgentRolloutSettings(
    move_limit_s=20, host_limit_s=40, away_limit_s=10, wait_limit_s=15, again_s=60, silence_limit_s=60
)
SOAK_S = 3.0


def agent(name: str, *, cell: str = "", region: str = "east", **changes: object) -> AgentView:
    ingress = name.startswith("i-")
    standing = Standing(cell, 1 if cell else 0, False, "ready" if cell else "idle", 100 if cell or ingress else None)
    kind = "ingress" if ingress else "machine" if name.startswith("m-") else "node"
    made = AgentView(name, kind, region, "local", OLD, True, NOW, standing=standing, serves_requests=ingress)
    return replace(made, **changes)  # type: ignore[arg-type]


def rollout(**changes: object) -> AgentRolloutView:
    made = AgentRolloutView(7, OLD, NEW, AgentRolloutState.RUNNING, 0, 3, NOW, SOAK_S)
    return replace(made, **changes)  # type: ignore[arg-type]


def moved(one: AgentView, *, ago_s: float = 1.0, settled_ago_s: float | None = None, **changes: object) -> AgentView:
    """Ordered to the new release so long ago, and there, unless `changes` differ."""
    settled = NOW - timedelta(seconds=settled_ago_s) if settled_ago_s is not None else None
    move = Move(7, 0, NEW, NOW - timedelta(seconds=ago_s), one.standing, settled)
    return replace(one, **{"release": NEW, "move": move, **changes})  # type: ignore[arg-type]


def steps(*agents: AgentView, **changes: object) -> tuple[AgentDecision, ...]:
    return plan_agent_rollout(rollout(**changes), agents, NOW, SETTINGS)


def reason(decisions: tuple[AgentDecision, ...]) -> str:
    [decision] = decisions
    assert isinstance(decision, ChangeAgentRollout)
    assert decision.to is AgentRolloutState.ROLLING_BACK
    return decision.reason


def test_first_who_serves_nothing_then_cells_whole_then_ingresses_of_all_regions_in_turn() -> None:
    agents = [
        *(agent(f"n-w{number}", region="west") for number in range(3)),
        *(agent(f"n-e{number}", region="east") for number in range(3)),
        *(agent(f"n-c{number}", cell=f"cell-{number // 2}") for number in range(12)),
        agent("i-east"),
        agent("i-west", region="west"),
    ]
    first, tenth, rest = plan_rings(agents)
    assert first == ("n-e0",)
    assert tenth == ("n-w0", "n-e1")
    assert rest[:3] == ("n-w1", "n-e2", "n-w2")
    assert rest[-2:] == ("i-east", "i-west")
    assert rest[3:5] == ("n-c0", "n-c1")


def test_rings_do_not_part_a_cell() -> None:
    agents = [agent(f"n-c{number:02}", cell=f"cell-{number // 5}") for number in range(20)]
    assert [len(ring) for ring in plan_rings(agents)] == [1, 4, 15]
    assert plan_rings([]) == ()
    assert plan_rings([agent("n-1")]) == (("n-1",),)


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["east", "west"])), max_size=40))
def test_everybody_is_in_one_ring(made: list[tuple[int, str]]) -> None:
    agents = [
        agent(f"n-{number:03}", cell=f"{region}-{cell}" if cell else "", region=region)
        for number, (cell, region) in enumerate(made)
    ]
    rings = plan_rings(agents)
    assert sorted(name for ring in rings for name in ring) == [one.id for one in agents]
    assert [len(ring) for ring in rings[:1]] == [1] * bool(agents)


def test_a_ring_is_told_and_others_wait() -> None:
    mine, later = Move(7, 0, NEW), Move(7, 1, NEW)
    told = agent("n-1", move=mine)
    assert steps(told, agent("n-2", move=later)) == (MoveAgent("n-1", NEW, 7, 0, told.standing),)


def test_who_is_away_is_passed_over_and_told_when_it_is_back() -> None:
    away = agent("n-1", connected=False, move=Move(7, 0, NEW))
    other = agent("n-2", move=Move(7, 1, NEW))
    assert steps(away, other) == (EnterRing(7, 1, "ring 1 of 3 is healthy"),)
    back = replace(away, connected=True)
    assert steps(back, moved(other, settled_ago_s=9), ring=1) == (MoveAgent("n-1", NEW, 7, 0, back.standing),)


def test_who_is_not_well_is_waited_for_and_then_passed_over() -> None:
    for changes in ({"unwell": "its engine has failed"}, {"unsteady": True}):
        hurt = agent("n-1", move=Move(7, 0, NEW), **changes)
        assert steps(hurt) == ()
        assert steps(hurt, ring_since=NOW - timedelta(seconds=16)) == (EnterRing(7, 1, "ring 1 of 3 is healthy"),)


def test_a_ring_settles_soaks_and_is_followed_by_the_next() -> None:
    one = agent("n-1", cell="c")
    assert steps(moved(one)) == (SettleAgent("n-1", 7),)
    assert steps(moved(one, settled_ago_s=2)) == ()
    assert steps(moved(one, settled_ago_s=3)) == (EnterRing(7, 1, "ring 1 of 3 is healthy"),)


def test_the_last_ring_ends_it_and_says_who_is_left() -> None:
    gone = agent("n-2", connected=False, move=Move(7, 2, NEW))
    [ended] = steps(moved(agent("n-1"), settled_ago_s=9), gone, ring=2)
    assert ended == ChangeAgentRollout(
        7, AgentRolloutState.SUCCEEDED, f"1 agent runs {NEW}; 1 of 2 is away or not healthy, and catches up"
    )


def test_it_goes_back_for_who_does_not_come_back() -> None:
    one = agent("n-1", cell="c")
    others = agent("n-2", region="west", connected=False, move=Move(7, 1, NEW))
    assert steps(moved(one, ago_s=19, release=OLD), others) == ()
    alone = moved(one, ago_s=20, connected=False, connection_since=NOW - timedelta(seconds=90))
    why = reason(steps(alone, ring_since=NOW))
    assert why == f"n-1 was not healthy with {NEW} within 20 s: it is not connected"
    assert f"it runs {OLD}" in reason(steps(moved(one, ago_s=20, release=OLD), others))
    host = agent("m-1")
    assert steps(moved(host, ago_s=39, release=OLD), others) == ()
    assert reason(steps(moved(host, failed="the disk is full"), others)) == "m-1: the disk is full"


def test_one_alone_that_is_away_is_passed_over_and_named() -> None:
    """Powered off, cut off or hostile: it must not stop the rollout."""
    off = moved(agent("n-1", cell="c"), ago_s=20, connected=False)
    well, later = moved(agent("n-2"), settled_ago_s=9), agent("n-3", move=Move(7, 2, NEW))
    [entered] = steps(off, well, later, ring=1)
    assert isinstance(entered, EnterRing)
    assert entered.reason.endswith(f"passed over: n-1 was not healthy with {NEW} within 20 s: it is not connected")
    says = moved(agent("m-1"), failed="the disk is full")
    assert isinstance(steps(says, well, later, ring=1)[0], EnterRing)
    assert reason(steps(says, off, later, ring=1)) == "m-1: the disk is full; and 1 other is not healthy"
    alone = replace(off, connection_since=NOW - timedelta(seconds=90))
    assert reason(steps(alone, ring=2)).startswith("n-1 was not healthy")  # the release is unproven
    assert reason(plan_agent_rollout(rollout(ring=1), [well, later], NOW, SETTINGS, gone=["n-1", "n-4"]))


def test_where_the_first_is_lost_another_tries_it_alone_before_the_rings_go_on() -> None:
    """Preferably a spare: a release that never starts costs two spares."""
    lost = moved(agent("n-1"), ago_s=20, connected=False)
    serves, spare = agent("n-2", cell="c", move=Move(7, 1, NEW)), agent("n-3", move=Move(7, 2, NEW))
    told = (MoveAgent("n-3", NEW, 7, 0, spare.standing),)
    assert steps(lost, serves, spare) == told
    assert plan_agent_rollout(rollout(), [serves, spare], NOW, SETTINGS, gone=["n-1"]) == told
    assert steps(lost, serves, moved(spare)) == (SettleAgent("n-3", 7),)
    assert isinstance(steps(lost, serves, moved(spare, settled_ago_s=9))[0], EnterRing)
    assert reason(steps(lost, serves, moved(spare, ago_s=20, connected=False))).startswith("n-1 was not healthy")


def test_a_region_that_is_cut_off_whole_takes_nobody_back() -> None:
    away = [moved(agent(f"n-w{number}", region="west"), ago_s=90, connected=False) for number in range(3)]
    well = moved(agent("n-e1"), settled_ago_s=9)
    [ended] = steps(*away, well, ring=2)
    assert isinstance(ended, ChangeAgentRollout)
    assert ended.to is AgentRolloutState.SUCCEEDED


def test_it_goes_back_for_an_engine_that_was_started_again() -> None:
    one = agent("n-1", cell="c")
    again = replace(one.standing, pid=101)
    assert reason(steps(moved(one, standing=again))) == "n-1 has process 101 instead of 100"
    assert "no longer healthy" in reason(steps(moved(one, settled_ago_s=1, standing=again)))
    starts = replace(one.standing, state="starting", pid=None)
    assert reason(steps(moved(one, settled_ago_s=1, standing=starts))).endswith("it is starting instead of ready")


def test_what_the_fleet_itself_changed_is_no_fault_of_the_release() -> None:
    one = agent("n-1", cell="c")
    for other in (
        Standing("c", 2, False, "ready", 200),
        Standing("", 0, False, "idle", None),
        replace(one.standing, drains=True, state="draining"),
    ):
        assert steps(moved(one, settled_ago_s=1, standing=other)) == ()


def test_while_nobody_is_heard_nothing_is_concluded() -> None:
    gone, other = moved(agent("n-1"), ago_s=900, connected=False), agent("n-2", connected=False)
    assert steps(gone, other) == ()
    long_ago = NOW - timedelta(seconds=60)
    reason(steps(*(replace(one, connection_since=long_ago) for one in (gone, other))))


def test_back_go_all_that_went_and_nobody_else() -> None:
    back = AgentRolloutState.ROLLING_BACK
    went, never = moved(agent("n-1"), settled_ago_s=9), agent("n-2", move=Move(7, 1, NEW))
    assert steps(went, never, state=back) == (MoveAgent("n-1", OLD, 7, 0, went.standing),)
    home = Move(7, 0, OLD, NOW - timedelta(seconds=1), went.standing)
    waits = replace(went, move=home)
    assert steps(waits, never, state=back) == ()
    [done] = steps(replace(waits, release=OLD), never, state=back)
    assert done == ChangeAgentRollout(7, AgentRolloutState.ROLLED_BACK, f"all run {OLD} as before")
    late = replace(waits, move=replace(home, moved_at=NOW - timedelta(seconds=20)))
    [ended] = steps(late, never, state=back)
    assert isinstance(ended, ChangeAgentRollout)
    assert ended.reason.endswith("not back yet: n-1")


def test_who_was_away_catches_up_a_few_at_a_time_and_not_for_ever() -> None:
    agents = [agent(f"n-{number:02}") for number in range(20)]
    told = plan_catch_up(NEW, agents, NOW, SETTINGS)
    assert [step.agent for step in told] == ["n-00", "n-01"]
    assert {step.rollout for step in told} == {None}
    tried = Move(None, 0, NEW, NOW - timedelta(seconds=10))
    busy = [replace(one, move=tried) for one in agents[:2]]
    assert plan_catch_up(NEW, [*busy, *agents[2:]], NOW, SETTINGS) == ()
    failed = replace(agents[0], move=replace(tried, moved_at=NOW - timedelta(seconds=30)))
    assert [one.agent for one in plan_catch_up(NEW, [failed, *agents[1:]], NOW, SETTINGS)] == ["n-01", "n-02"]
    for other in ({"connected": False}, {"unwell": "x"}, {"unsteady": True}, {"release": NEW}, {"release": ""}):
        assert plan_catch_up(NEW, [agent("n-1", **other)], NOW, SETTINGS) == ()


# --- a world ----------------------------------------------------------------------------------------------------------

FATES = st.sampled_from(["well", "well", "well", "slow", "dies", "breaks its engine", "away", "comes late"])


@dataclass
class World:
    """Agents that follow orders after some seconds, each by its fate; and the fleet's rows."""

    agents: dict[str, AgentView]
    fates: dict[str, str]
    now: datetime = NOW
    view: AgentRolloutView = field(default_factory=rollout)
    told: int = 0

    def apply(self, decision: AgentDecision) -> None:
        if isinstance(decision, MoveAgent):
            self.told += 1
            one = self.agents[decision.agent]
            move = Move(decision.rollout, decision.ring, decision.release, self.now, decision.before)
            self.agents[one.id] = replace(one, move=move)
        elif isinstance(decision, SettleAgent):
            one = self.agents[decision.agent]
            assert one.move is not None
            self.agents[one.id] = replace(one, move=replace(one.move, settled_at=self.now))
        elif isinstance(decision, EnterRing):
            self.view = replace(self.view, ring=decision.ring, ring_since=self.now)
        else:
            self.view = replace(self.view, state=decision.to)

    def live(self) -> None:
        self.now += timedelta(seconds=1)
        for one in list(self.agents.values()):
            fate, move = self.fates[one.id], one.move
            connected = one.connected
            if fate == "comes late" and self.now > NOW + timedelta(seconds=30):
                connected = True
            if move is not None and move.moved_at is not None and move.release != one.release:
                age_s = (self.now - move.moved_at).total_seconds()
                forward = move.release == NEW
                if fate == "dies" and forward:
                    connected = False
                elif age_s >= (5 if fate == "slow" else 1):
                    pid = one.standing.pid
                    if fate == "breaks its engine" and forward and pid is not None:
                        pid += 1000
                    standing = replace(one.standing, pid=pid)
                    one = replace(one, release=move.release, standing=standing)  # noqa: PLW2901 - the same agent
                    connected = True
            changed = connected != one.connected
            since = self.now if changed else one.connection_since
            self.agents[one.id] = replace(one, connected=connected, connection_since=since)

    def run(self, *, killed_after: int | None, seconds: int = 400) -> None:
        """Passes of a controller, which may crash after so many steps of its first plan."""
        for _ in range(seconds):
            if self.view.state not in (AgentRolloutState.RUNNING, AgentRolloutState.ROLLING_BACK):
                return
            decisions = plan_agent_rollout(self.view, list(self.agents.values()), self.now, SETTINGS)
            for decision in decisions if killed_after is None else decisions[:killed_after]:
                self.apply(decision)
                self.check()
            self.live()

    def check(self) -> None:
        """No agent moves before its ring's turn."""
        for one in self.agents.values():
            if one.move is not None and one.move.moved_at is not None and one.move.rollout == 7:
                assert one.move.ring <= self.view.ring


@given(st.lists(FATES, min_size=1, max_size=12), st.sampled_from([None, 1, 2]))
def test_it_ends_and_all_who_can_be_are_where_it_ended(fates: list[str], killed_after: int | None) -> None:
    agents = [
        agent(f"n-{number:02}", cell=f"c-{number}" if number % 2 else "", connected=fate not in ("away", "comes late"))
        for number, fate in enumerate(fates)
    ]
    rings = plan_rings(agents)
    ring_of = {name: number for number, ring in enumerate(rings) for name in ring}
    known = {one.id: replace(one, move=Move(7, ring_of[one.id], NEW)) for one in agents}
    by_fate = {one.id: fate for one, fate in zip(agents, fates, strict=True)}
    world = World(known, by_fate, view=rollout(rings=len(rings)))
    world.run(killed_after=killed_after)
    quiet = {name for name, fate in by_fate.items() if fate == "dies"}
    loud = {name for name, fate in by_fate.items() if fate.startswith("breaks") and known[name].standing.pid}
    ended = world.view.state
    assert ended in (AgentRolloutState.SUCCEEDED, AgentRolloutState.ROLLED_BACK)
    if not quiet | loud:
        assert ended is AgentRolloutState.SUCCEEDED
    if len(quiet | loud) > 1 or rings[0][0] in loud:
        assert ended is AgentRolloutState.ROLLED_BACK
    end = NEW if ended is AgentRolloutState.SUCCEEDED else OLD
    for one in world.agents.values():
        if one.id not in quiet and by_fate[one.id] != "away" and (by_fate[one.id] != "comes late" or end == OLD):
            assert one.release == end, (one.id, by_fate[one.id])
    assert world.told <= 2 * len(agents)
