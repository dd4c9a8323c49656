"""One state of the small model: the rows, the machines, messages on their way, and which faults may still happen.
States with equal keys have equal futures, so a state is visited once per key."""

from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from engine_agent.node.planning.node import Membership
from engine_agent.protocol.messages import Desired
from fleet.reconcile.planning.decisions import Decision
from fleet.reconcile.planning.snapshot import CellView, ReportView, RolloutView

T = TypeVar("T")


@dataclass(frozen=True)
class AgentState:
    """A machine: the order in its journal, what runs, whether that has failed, the highest generation ever started."""

    order: Desired | None
    engine: Membership | None
    version: str = ""
    healthy: bool = True
    failed: Membership | None = None
    highest: int = 1

    @cached_property
    def key(self) -> tuple[object, ...]:
        return order_key(self.order), self.engine, self.version, self.healthy, self.failed, self.highest


@dataclass(frozen=True, slots=True)
class FaultBudget:
    """How many faults of each kind may still happen."""

    crashes: int
    duplicates: int
    stalls: int

    def __str__(self) -> str:
        kinds = {"crash": self.crashes, "duplicate": self.duplicates, "stalled write": self.stalls}
        return ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count) or "no faults"


@dataclass(frozen=True)
class State:
    """Rows, machines, one old order per machine that may be repeated, and a decision that a stalled process holds."""

    cells: tuple[CellView, ...]
    reports: tuple[ReportView, ...]
    versions: tuple[int, ...]
    rollout: RolloutView | None
    deployed: str
    agents: tuple[AgentState, ...]
    old_orders: tuple[Desired | None, ...]
    budget: FaultBudget
    held: Decision | None = None

    @cached_property
    def key(self) -> tuple[object, ...]:
        rollout = self.rollout
        progress = None
        if rollout is not None:
            progress = (rollout.state, rollout.stage, tuple((one.cell, one.generation) for one in rollout.failed))
        return (
            self.cells, self.reports, self.versions, progress, self.deployed,
            tuple(agent.key for agent in self.agents), tuple(order_key(order) for order in self.old_orders),
            self.budget, self.held,
        )  # fmt: skip


def order_key(order: Desired | None) -> tuple[object, ...]:
    """The fields in which orders of one machine differ here."""
    if order is None or order.assignment is None:
        return (order.version if order is not None else 0,)
    given = order.assignment
    return order.version, given.cell, given.generation, given.phase, given.plan.served_model


def with_item(values: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    return (*values[:index], value, *values[index + 1 :])
