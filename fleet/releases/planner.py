"""Plans rollouts of agent releases in rings (one agent, a tenth, all others), each watched before the next, and the way
back if an agent gets worse. Also decides which releases are no longer kept. Pure. An agent here is what moves alone: a
node's or ingress's agent, or a machine with its node or ingress. While all agents are silent nothing is concluded.
Absent agents are skipped and catch up when they return."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import ceil

from fleet.reconcile.planning.states import AgentRolloutState
from kernel.ages import age_text

RING_SHARE = 0.1
"""Share of all agents in the second ring; the first is one agent, the last all others."""
CATCH_UP_SHARE = 0.1
BACK_AT_LEAST, BACK_SHARE = 2, 0.05
"""All agents go back if at least so many, and this share of the moved ones, are unhealthy. A single one may be off, cut
off or hostile: it is skipped and named, unless it is the first one and reports its error, or no other agent is left to
try."""


@dataclass(frozen=True, slots=True)
class AgentRolloutSettings:
    """`move_limit_s`: for an agent to be healthy with the new release; on hosts it includes the download and three
    starts. `away_limit_s`: for a healthy one to return. `wait_limit_s`: before a ring continues without an unhealthy or
    starting agent. `again_s`: before a failed catch-up is retried. `silence_limit_s`: how long a silence of all agents
    is ignored."""

    move_limit_s: float = 60.0
    host_limit_s: float = 420.0
    away_limit_s: float = 30.0
    wait_limit_s: float = 120.0
    again_s: float = 600.0
    silence_limit_s: float = 300.0


SETTINGS = AgentRolloutSettings()


@dataclass(frozen=True, slots=True)
class Standing:
    """State of an agent: desired (`cell`, `generation`, `drains`; "" and 0 outside cells) and running. `pid`: of its
    engine or HAProxy."""

    cell: str = ""
    generation: int = 0
    drains: bool = False
    state: str = ""
    pid: int | None = None

    def why_not(self, now: "Standing") -> str:
        """Returns what got worse although the desired state is the same, or ""."""
        if (self.cell, self.generation, self.drains) != (now.cell, now.generation, now.drains):
            return ""  # its desired state changed for another reason
        if self.state != now.state:
            return f"is {now.state or 'silent'} instead of {self.state}"
        if self.pid is not None and self.pid != now.pid:
            return f"has process {now.pid or 'none'} instead of {self.pid}"
        return ""


@dataclass(frozen=True, slots=True)
class Move:
    """The last order of an agent. `rollout` None: to catch up."""

    rollout: int | None
    ring: int
    release: str
    moved_at: datetime | None = None
    before: Standing | None = None
    settled_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class AgentView:
    """`release` "": unknown. `unwell`: why it is unhealthy; `unsteady`: it is about to change, such as a starting
    engine. `serves_requests`: an ingress. `failed`: why its host could not change its release. `connection_since`:
    since when it is connected or disconnected."""

    id: str
    kind: str
    region: str
    provider: str
    release: str
    connected: bool
    connection_since: datetime | None = None
    unwell: str = ""
    unsteady: bool = False
    failed: str = ""
    standing: Standing = Standing()
    serves_requests: bool = False
    move: Move | None = None

    @property
    def serves(self) -> bool:
        return bool(self.standing.cell) or self.serves_requests


@dataclass(frozen=True, slots=True)
class AgentRolloutView:
    """`target` and `source` are release IDs; `ring` is the current one."""

    id: int
    source: str
    target: str
    state: AgentRolloutState
    ring: int
    rings: int
    ring_since: datetime
    soak_s: float


@dataclass(frozen=True, slots=True)
class MoveAgent:
    """Order an agent to run a release. `rollout` None: to catch up."""

    agent: str
    release: str
    rollout: int | None
    ring: int
    before: Standing


@dataclass(frozen=True, slots=True)
class SettleAgent:
    agent: str
    rollout: int


@dataclass(frozen=True, slots=True)
class EnterRing:
    rollout: int
    ring: int
    reason: str


@dataclass(frozen=True, slots=True)
class ChangeAgentRollout:
    rollout: int
    to: AgentRolloutState
    reason: str


AgentDecision = MoveAgent | SettleAgent | EnterRing | ChangeAgentRollout


def plan_rings(agents: Sequence[AgentView]) -> tuple[tuple[str, ...], ...]:
    """Returns the agents of each ring: spares first, then cells with all members together, then ingresses; of each kind
    from all regions in turn."""
    order = [name for group in _groups(agents) for name in group]
    if not order:
        return ()
    cells = {agent.id: agent.standing.cell for agent in agents}
    end = 1 + ceil(RING_SHARE * len(order))
    while 1 < end < len(order) and cells[order[end]] and cells[order[end]] == cells[order[end - 1]]:
        end += 1
    return tuple(ring for ring in (tuple(order[:1]), tuple(order[1:end]), tuple(order[end:])) if ring)


def _groups(agents: Sequence[AgentView]) -> Iterator[tuple[str, ...]]:
    together: dict[tuple[int, str, str], list[str]] = {}
    for agent in sorted(agents, key=lambda one: one.id):
        rank = 1 if agent.standing.cell else 2 if agent.serves else 0
        together.setdefault((rank, agent.region, agent.standing.cell or agent.id), []).append(agent.id)
    for rank in range(3):
        waiting: dict[str, list[tuple[str, ...]]] = {}
        for (own, region, _), names in sorted(together.items()):
            if own == rank:
                waiting.setdefault(region, []).append(tuple(names))
        while waiting:
            for region in sorted(waiting):
                yield waiting[region].pop(0)
            waiting = {region: groups for region, groups in waiting.items() if groups}


def plan_agent_rollout(
    rollout: AgentRolloutView,
    agents: Sequence[AgentView],
    now: datetime,
    settings: AgentRolloutSettings = SETTINGS,
    gone: Sequence[str] = (),
) -> tuple[AgentDecision, ...]:
    """Returns the next steps of the active rollout. `gone`: moved agents that never became healthy and that the fleet
    has given up."""
    if rollout.state is AgentRolloutState.ROLLING_BACK:
        return _plan_back(rollout, agents, now, settings)
    return _plan_ahead(rollout, agents, now, settings, gone)


def _plan_ahead(
    rollout: AgentRolloutView,
    agents: Sequence[AgentView],
    now: datetime,
    settings: AgentRolloutSettings,
    gone: Sequence[str],
) -> tuple[AgentDecision, ...]:
    moved = [agent for agent in agents if _is_moved(agent, rollout)]
    others = [agent for agent in agents if not _is_moved(agent, rollout)]
    if _all_went_silent(agents, now, settings):
        return ()
    silent = _silent_regions(agents)
    whys = {agent.id: why for agent in moved if (why := _why_back(agent, rollout, now, settings))}
    failing = {agent.id: whys[agent.id] for agent in moved if agent.id in whys and agent.region not in silent}
    failing |= {name: f"{name} was given up before it was healthy with {rollout.target}" for name in gone}
    passed_over = {*whys, *(agent.id for agent in moved if agent.region in silent)}
    if why := _all_back(rollout, agents, moved, failing):
        return (ChangeAgentRollout(rollout.id, AgentRolloutState.ROLLING_BACK, why),)
    moved = [agent for agent in moved if agent.id not in passed_over]
    steps: list[AgentDecision] = [
        SettleAgent(agent.id, rollout.id) for agent in moved if _is_well(agent, rollout) and not _settled_at(agent)
    ]
    waits = False
    for agent in others:
        if _ring_of(agent, rollout) > rollout.ring or not agent.connected or agent.release == rollout.target:
            continue
        if not agent.unwell and not agent.unsteady:
            ring = _ring_of(agent, rollout)
            steps.append(MoveAgent(agent.id, rollout.target, rollout.id, ring, agent.standing))
        elif (now - rollout.ring_since).total_seconds() < settings.wait_limit_s:
            waits = True
    if steps or waits or not all(_has_soaked(agent, rollout, now) for agent in moved):
        return tuple(steps)
    ready = [one for one in others if one.connected and one.release != rollout.target]
    if (failing or passed_over) and not moved and ready:  # the release is unproven: another agent tries it alone
        one = min(ready, key=lambda each: (bool(each.unwell), each.serves, _ring_of(each, rollout), each.id))
        return (MoveAgent(one.id, rollout.target, rollout.id, rollout.ring, one.standing),)
    return (_next_ring(rollout, agents, failing),)


def _all_back(
    rollout: AgentRolloutView, agents: Sequence[AgentView], moved: Sequence[AgentView], failing: Mapping[str, str]
) -> str:
    """Why all agents must go back, or ""."""
    if not failing:
        return ""
    by_id = {agent.id: agent for agent in moved}
    reporting = [name for name in failing if name in by_id and by_id[name].connected]
    tried = [agent for agent in moved if agent.id not in failing]
    left = [agent for agent in agents if agent.connected and agent.id not in failing and agent not in tried]
    many = len(failing) >= max(BACK_AT_LEAST, ceil(BACK_SHARE * len(moved)))
    if not many and not (rollout.ring == 0 and reporting) and (tried or left):
        return ""
    first = failing[reporting[0]] if reporting else next(iter(failing.values()))
    others = len(failing) - 1
    return first + (f"; and {others} {'others are' if others > 1 else 'other is'} not healthy" if others else "")


def _silent_regions(agents: Sequence[AgentView]) -> frozenset[str]:
    """Regions with several agents, all silent: cut off, which is no fault of a release that works elsewhere."""
    heard = {agent.region for agent in agents if agent.connected}
    counts = Counter(agent.region for agent in agents)
    return frozenset(region for region, count in counts.items() if heard and count > 1 and region not in heard)


def _all_went_silent(agents: Sequence[AgentView], now: datetime, settings: AgentRolloutSettings) -> bool:
    """Then the control plane is the likely cause, for a while."""
    if any(agent.connected for agent in agents):
        return False
    newest = max((agent.connection_since for agent in agents if agent.connection_since), default=None)
    return newest is not None and (now - newest).total_seconds() < settings.silence_limit_s


def _next_ring(rollout: AgentRolloutView, agents: Sequence[AgentView], failing: Mapping[str, str]) -> AgentDecision:
    over = f"; passed over: {'; '.join(list(failing.values())[:3])}" if failing else ""
    if rollout.ring + 1 < rollout.rings:
        return EnterRing(rollout.id, rollout.ring + 1, f"ring {rollout.ring + 1} of {rollout.rings} is healthy{over}")
    behind = sum(agent.release != rollout.target for agent in agents)
    are, catch = ("is", "catches") if behind == 1 else ("are", "catch")
    left = f"; {behind} of {len(agents)} {are} away or not healthy, and {catch} up" if behind else ""
    there = len(agents) - behind
    run = "agent runs" if there == 1 else "agents run"
    return ChangeAgentRollout(rollout.id, AgentRolloutState.SUCCEEDED, f"{there} {run} {rollout.target}{left}{over}")


def _plan_back(
    rollout: AgentRolloutView, agents: Sequence[AgentView], now: datetime, settings: AgentRolloutSettings
) -> tuple[AgentDecision, ...]:
    """All moved agents are ordered back together, because they were healthy before. Absent ones are not waited for."""
    steps: list[AgentDecision] = []
    late: list[str] = []
    waits = False
    for agent in agents:
        if not _is_of(agent, rollout) or agent.move is None or agent.move.moved_at is None:
            continue
        if agent.move.release != rollout.source:
            steps.append(MoveAgent(agent.id, rollout.source, rollout.id, agent.move.ring, agent.standing))
        elif agent.release == rollout.source and agent.connected:
            continue
        elif (now - agent.move.moved_at).total_seconds() < _limit_s(agent, settings):
            waits = True
        else:
            late.append(agent.id)
    if steps or waits:
        return tuple(steps)
    named = f"; not back yet: {', '.join(late[:5])}{' and more' if len(late) > 5 else ''}" if late else ""
    return (
        ChangeAgentRollout(rollout.id, AgentRolloutState.ROLLED_BACK, f"all run {rollout.source} as before{named}"),
    )


def plan_catch_up(
    current: str, agents: Sequence[AgentView], now: datetime, settings: AgentRolloutSettings = SETTINGS
) -> tuple[MoveAgent, ...]:
    """Agents that were absent during a rollout move now, a few at a time. Agents without a known release are left
    alone."""
    behind = [agent for agent in agents if agent.release not in ("", current)]
    under_way = [agent for agent in behind if _tried_s(agent, current, now) < _limit_s(agent, settings)]
    free = max(1, int(CATCH_UP_SHARE * len(agents))) - len(under_way)
    ready = (
        agent
        for agent in behind
        if agent.connected
        and not agent.unwell
        and not agent.unsteady
        and _tried_s(agent, current, now) >= settings.again_s
    )
    return tuple(MoveAgent(one.id, current, None, 0, one.standing) for one, _ in zip(ready, range(free), strict=False))


def _tried_s(agent: AgentView, release: str, now: datetime) -> float:
    move = agent.move
    if move is None or move.moved_at is None or move.release != release:
        return float("inf")
    return (now - move.moved_at).total_seconds()


def _is_of(agent: AgentView, rollout: AgentRolloutView) -> bool:
    return agent.move is not None and agent.move.rollout == rollout.id


def _is_moved(agent: AgentView, rollout: AgentRolloutView) -> bool:
    return _is_of(agent, rollout) and agent.move is not None and agent.move.moved_at is not None


def _ring_of(agent: AgentView, rollout: AgentRolloutView) -> int:
    """Agents that joined after the rings were planned are in the last one."""
    return agent.move.ring if agent.move is not None and _is_of(agent, rollout) else rollout.rings - 1


def _settled_at(agent: AgentView) -> datetime | None:
    return agent.move.settled_at if agent.move is not None else None


def _limit_s(agent: AgentView, settings: AgentRolloutSettings) -> float:
    return settings.host_limit_s if agent.kind == "machine" else settings.move_limit_s


def _is_well(agent: AgentView, rollout: AgentRolloutView) -> bool:
    same = agent.move is None or agent.move.before is None or not agent.move.before.why_not(agent.standing)
    return agent.connected and agent.release == rollout.target and not agent.unwell and same


def _has_soaked(agent: AgentView, rollout: AgentRolloutView, now: datetime) -> bool:
    settled_at = _settled_at(agent)
    if settled_at is None or not _is_well(agent, rollout):
        return False
    return (now - settled_at).total_seconds() >= rollout.soak_s


def _why_back(agent: AgentView, rollout: AgentRolloutView, now: datetime, settings: AgentRolloutSettings) -> str:
    """Why the rollout must go back for this agent, or ""."""
    move = agent.move
    if move is None or move.moved_at is None:
        return ""
    if agent.failed:
        return f"{agent.id}: {agent.failed}"
    if move.settled_at is None:
        if agent.connected and agent.standing.pid and move.before and move.before.why_not(agent.standing):
            return f"{agent.id} {move.before.why_not(agent.standing)}"  # a new process never becomes the previous one
        if _is_well(agent, rollout) or (now - move.moved_at).total_seconds() < _limit_s(agent, settings):
            return ""
        limit_s = _limit_s(agent, settings)
        return (
            f"{agent.id} was not healthy with {rollout.target} within {limit_s:.0f} s: {_health_text(agent, rollout)}"
        )
    if not agent.connected:
        since = agent.connection_since or move.settled_at
        away_s = (now - since).total_seconds()
        return f"{agent.id} has been away for {age_text(away_s)}" if away_s >= settings.away_limit_s else ""
    return "" if _is_well(agent, rollout) else f"{agent.id} is no longer healthy: {_health_text(agent, rollout)}"


def _health_text(agent: AgentView, rollout: AgentRolloutView) -> str:
    if not agent.connected:
        return "it is not connected"
    if agent.release != rollout.target:
        return f"it runs {agent.release or 'no release'}"
    before = agent.move.before if agent.move is not None else None
    return agent.unwell or (f"it {before.why_not(agent.standing)}" if before else "it is not healthy")


@dataclass(frozen=True, slots=True)
class RetentionSettings:
    """Releases that are kept although nothing names them. `newest`: last registered ones. `rollouts`: last completed
    rollouts, with both of their releases: the way back."""

    newest: int = 5
    rollouts: int = 5


RETENTION = RetentionSettings()


@dataclass(frozen=True, slots=True)
class RolloutReleases:
    id: int
    source: str
    target: str
    is_active: bool


@dataclass(frozen=True, slots=True)
class Removal:
    """Rows to delete: rollouts first, because they reference releases. `kept`: the remaining releases."""

    rollouts: tuple[int, ...]
    releases: tuple[str, ...]
    kept: frozenset[str]


def plan_removal(
    newest_first: Sequence[str],
    named: Collection[str],
    rollouts: Sequence[RolloutReleases],
    settings: RetentionSettings = RETENTION,
) -> Removal:
    """Returns the releases and rollouts to remove. `named`: releases that are current, carried here, run by an agent,
    or ordered."""
    ended = sorted((rollout for rollout in rollouts if not rollout.is_active), key=lambda each: -each.id)
    forgotten = ended[settings.rollouts :]
    gone = {rollout.id for rollout in forgotten}
    used_by_rollouts = {name for each in rollouts if each.id not in gone for name in (each.source, each.target)}
    kept = frozenset({*newest_first[: settings.newest], *named, *used_by_rollouts} - {""})
    return Removal(
        rollouts=tuple(sorted(gone)), releases=tuple(name for name in newest_first if name not in kept), kept=kept
    )
