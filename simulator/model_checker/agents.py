"""What the machines of the small model do: the live agents' decisions, with engines that start when they report health
and stop without delay."""

from dataclasses import replace
from datetime import datetime

from engine_agent.node.planning.converge import observe, plan_convergence
from engine_agent.node.planning.node import (
    Failure,
    MarkFailed,
    Membership,
    NodeSnapshot,
    RunningProcess,
    StartEngine,
    StopEngine,
    StopProxy,
    membership_of,
    refusal,
)
from engine_agent.protocol.messages import Desired, Health
from engine_agent.protocol.states import Phase
from fleet.reconcile.planning.snapshot import ReportView
from simulator.model_checker.state import AgentState


class AgentModel:
    """How agents react. Results that depend on an agent alone are cached; `violations` are those of I5."""

    def __init__(self, connected_at: datetime | None, reported_at: datetime) -> None:
        self.violations: list[str] = []
        self._connected_at = connected_at
        self._reported_at = reported_at
        self._converged: dict[tuple[object, ...], AgentState] = {}
        self._reports: dict[tuple[object, ...], ReportView] = {}

    def received(self, agent: AgentState, order: Desired, node: str) -> AgentState:
        if refusal(agent.order, order, node) is not None:
            return agent
        return self.converged(replace(agent, order=order))

    def crashed(self, agent: AgentState) -> AgentState:
        return self.converged(replace(agent, engine=None, healthy=False, failed=agent.engine))

    def converged(self, agent: AgentState) -> AgentState:
        if agent.key not in self._converged:
            self._converged[agent.key] = self._take_steps(agent)
        return self._converged[agent.key]

    def report(self, agent: AgentState) -> ReportView:
        if agent.key not in self._reports:
            assignment = agent.order.assignment if agent.order is not None else None
            seen = observe(assignment, _snapshot(agent), 0.0)
            self._reports[agent.key] = ReportView(
                True, self._reported_at, self._connected_at, seen.state, seen.cell or "", seen.generation
            )
        return self._reports[agent.key]

    def _take_steps(self, agent: AgentState) -> AgentState:
        """Stops take no time here; starts do."""
        while True:
            assignment = agent.order.assignment if agent.order is not None else None
            before = agent
            for step in plan_convergence(assignment, _snapshot(agent), 0.0):
                match step:
                    case StartEngine(assignment=given):
                        agent = self._started(agent, membership_of(given), given.plan.served_model)
                    case StopEngine() | StopProxy():
                        agent = replace(agent, engine=None, version="", healthy=False)
                    case MarkFailed(membership=member):
                        agent = replace(agent, failed=member)
            if agent == before:
                return agent

    def _started(self, agent: AgentState, member: Membership, version: str) -> AgentState:
        if member.generation < agent.highest:
            self.violations.append(f"I5: {member} starts after generation {agent.highest}")
        if agent.engine is not None:
            self.violations.append(f"I5: {member} starts while {agent.engine} runs")
        return replace(
            agent,
            engine=member,
            version=version,
            healthy=False,
            failed=None,
            highest=max(agent.highest, member.generation),
        )


def _snapshot(agent: AgentState) -> NodeSnapshot:
    process = RunningProcess(agent.engine, 1, 0.0) if agent.engine is not None else None
    failure = Failure(agent.failed, "crashed", 0.0) if agent.failed is not None else None
    health = Health(ok=agent.healthy) if agent.engine is not None else None
    return NodeSnapshot(
        engine=process, proxy=process, health=health, was_ready=agent.healthy, proxy_phase=Phase.SERVE, failure=failure
    )
