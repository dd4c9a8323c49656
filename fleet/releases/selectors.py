"""Reads agents for rollouts and pages: nodes and machines from here, other kinds from registered sources. A fixed
number of queries. Never writes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import msgspec
from django.contrib.postgres.aggregates import ArrayAgg
from django.db.models import Q, QuerySet, Value

from engine_agent.protocol.machine_messages import release_of
from engine_agent.protocol.states import AgentKind, EngineState
from fleet.machines.models import Machine
from fleet.machines.planner import WITH_MACHINE_AGENT, has_machine_agent
from fleet.nodes.models import Node, NodeReport
from fleet.reconcile.planning.states import AGENT_ROLLOUT_ACTIVE, AgentRolloutState, CellState, MachineState, NodeState
from fleet.releases.models import AgentMove, AgentRelease, AgentRollout
from fleet.releases.planner import AgentRolloutView, AgentView, Move, Standing

UNHEALTHY_FOR = timedelta(seconds=5)
"""A cell that answers late once is not a reason to roll back."""
BAD_NODE = frozenset({NodeState.FAULTY, NodeState.LOST})
MOVING_CELL = frozenset({CellState.PENDING, CellState.STARTING, CellState.DRAINING})
MOVING_ENGINE = frozenset({EngineState.STARTING, EngineState.DRAINING})

AgentSource = Callable[[], list[AgentView]]

_sources: list[AgentSource] = []


def agent_source_register(source: AgentSource) -> None:
    """Adds agents of another app, without their moves. Called once, when that app is ready."""
    if source not in _sources:
        _sources.append(source)


def agents_seen(now: datetime) -> list[AgentView]:
    """Returns every agent that moves alone, by ID, with its last order."""
    return _agent_views(now, {move.agent: move for move in AgentMove.objects.all()})


def _agent_views(now: datetime, moves: Mapping[str, AgentMove]) -> list[AgentView]:
    alone = {agent.id: agent for agent in _node_agents(now)}
    alone |= {agent.id: agent for source in _sources for agent in source()}
    hosts = [_machine_agent(machine, alone, moves.get(machine.id)) for machine in _joined_machines()]
    agents = [*hosts, *(agent for agent in alone.values() if not has_machine_agent(agent.provider))]
    return sorted((_with_last_order(agent, moves.get(agent.id)) for agent in agents), key=lambda agent: agent.id)


def active_rollout() -> AgentRollout | None:
    return AgentRollout.objects.filter(state__in=[state.value for state in AGENT_ROLLOUT_ACTIVE]).first()


def current_release() -> AgentRelease | None:
    """Returns the release of new agents; None before the first controller has started."""
    return AgentRelease.objects.filter(is_current=True).first()


def rollout_seen(rollout: AgentRollout) -> AgentRolloutView:
    return AgentRolloutView(
        id=rollout.pk,
        source=rollout.source_id,
        target=rollout.target_id,
        state=AgentRolloutState(rollout.state),
        ring=rollout.ring,
        rings=rollout.rings,
        ring_since=rollout.ring_since,
        soak_s=rollout.soak_s,
    )


def agents_by_release() -> dict[str, list[str]]:
    """Release -> IDs of the agents that run it, in order; "" for agents without one, such as from a checkout. Pages
    show it, so it reads only three columns of a node."""
    alone: dict[str, tuple[str, str]] = {}
    for node, provider, version in _joined_nodes().values_list("id", "region__provider", "report__agent_version"):
        alone[node] = provider, release_of(version)
    for source in _sources:
        alone |= {agent.id: (agent.provider, agent.release) for agent in source()}
    agents = [(name, release) for name, (provider, release) in alone.items() if not has_machine_agent(provider)]
    for machine in _joined_machines():
        inner = [alone[name][1] for name in _runs_of(machine) if name in alone]
        agents.append((machine.id, _common_release(release_of(machine.agent_version), inner)))
    found: dict[str, list[str]] = {}
    for name, release in sorted(agents):
        found.setdefault(release, []).append(name)
    return found


def releases_named(now: datetime) -> set[str]:
    """Releases that an agent last reported or was ordered to run, connected or not."""
    there = Machine.objects.exclude(state=MachineState.GONE.value)
    versions = [
        *NodeReport.objects.values_list("agent_version", flat=True),
        *there.values_list("agent_version", flat=True),
    ]
    reported = {release_of(version) for version in versions} | {
        agent.release for source in _sources for agent in source()
    }
    ordered = {agent.move.release for agent in agents_seen(now) if agent.move is not None}
    return (reported | ordered) - {""}


def _joined_nodes() -> QuerySet[Node]:
    joined = Node.objects.exclude(state__in=[NodeState.RETIRED.value, NodeState.JOINING.value])
    return joined.exclude(report=None).order_by()


def _node_agents(now: datetime) -> Iterator[AgentView]:
    """Plain rows: objects of 5,000 nodes with reports and cells would take a second."""
    for row in _joined_nodes().values_list(*_NODE_COLUMNS):
        node, region, provider, version, connected, changed_at, pid, cell, generation, cell_state, *health = row
        engine = health[0]
        yield AgentView(
            id=node,
            kind=AgentKind.NODE.value,
            region=region,
            provider=provider,
            release=release_of(version),
            connected=connected,
            connection_since=changed_at,
            unwell=_unhealthy_reason(now, node, *health),
            unsteady=engine in MOVING_ENGINE or cell_state in MOVING_CELL,
            standing=Standing(cell or "", generation or 0, cell_state == CellState.DRAINING, engine, pid),
        )


_NODE_COLUMNS = (
    "id", "region_id", "region__provider", "report__agent_version", "report__connected",
    "report__connection_changed_at", "report__engine_pid", "member__cell_id", "member__cell__generation",
    "member__cell__state", "report__state", "report__reason", "report__health", "report__unhealthy_since", "state",
    "reason",
)  # fmt: skip
"""The last six are the arguments of `_unhealthy_reason`."""


def _unhealthy_reason(
    now: datetime,
    node: str,
    engine: str,
    engine_reason: str,
    health: Mapping[str, Any] | None,
    since: datetime | None,
    state: str,
    reason: str,
) -> str:
    if state in BAD_NODE:
        return f"{node} is {state}: {reason}"
    if engine == EngineState.FAILED:
        return f"its engine has failed: {engine_reason}"
    if since is not None and now - since > UNHEALTHY_FOR:
        return f"its engine is not healthy: {(health or {}).get('reason') or engine_reason}"
    return ""


def _joined_machines() -> list[Machine]:
    there = [MachineState.POOL.value, MachineState.TAKEN.value]
    rows = Machine.objects.filter(provider__in=WITH_MACHINE_AGENT, state__in=there, leaving=False)
    shared = ArrayAgg("slots__runs", filter=~Q(slots__runs="") & Q(slots__isnull=False), default=Value([]))
    return list(rows.annotate(shared=shared))


def _machine_agent(machine: Machine, runs: Mapping[str, AgentView], move: AgentMove | None) -> AgentView:
    """A machine and its nodes or ingress as one agent: they have one release, or none in common. A node that serves
    stands for the others."""
    own = release_of(machine.agent_version)
    names = _runs_of(machine)
    there = [runs[name] for name in names if name in runs]
    inner = max(there, key=lambda agent: agent.serves) if there else None
    tried = move is not None and move.attempt == machine.release_attempt
    host = AgentView(
        id=machine.id,
        kind=AgentKind.MACHINE.value,
        region=machine.region_id,
        provider=machine.provider,
        release=own,
        connected=machine.connected,
        connection_since=machine.last_seen_at,
        unsteady=len(there) < len(names),
        failed=machine.release_trouble if tried else "",
    )
    if inner is None:
        return host
    return replace(
        host,
        release=_common_release(own, [agent.release for agent in there]),
        connected=machine.connected and all(agent.connected for agent in there),
        unwell=next((agent.unwell for agent in there if agent.unwell), ""),
        unsteady=host.unsteady or any(agent.unsteady for agent in there),
        standing=inner.standing,
        serves_requests=inner.serves,
    )


def _runs_of(machine: Machine) -> list[str]:
    """IDs of its nodes or ingress. Of a machine of `_joined_machines`."""
    return [machine.runs] if machine.runs else getattr(machine, "shared", [])


def _common_release(own: str, inner: Sequence[str]) -> str:
    other = next((release for release in inner if release != own), own)
    return own if other == own else f"{own or 'none'} and {other or 'none'}"


def _with_last_order(agent: AgentView, row: AgentMove | None) -> AgentView:
    if row is None:
        return agent
    before = msgspec.convert(row.before, Standing) if row.before else None
    move = Move(row.rollout_id, row.ring, row.release, row.moved_at, before, row.settled_at)
    return replace(agent, move=move, failed=agent.failed or row.trouble)
