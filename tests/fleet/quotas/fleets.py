"""Fleets of one pool and deployments that want its machines."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from engine_agent.protocol.states import EngineState
from fleet.deployments.planner import ClaimView, GrantRule, Preempts, QuotaView, SharingPolicy, UpdatePolicy
from fleet.quotas.planning.planner import plan_shares
from fleet.reconcile.planning.decisions import GrantCells
from fleet.reconcile.planning.settings import FleetSettings
from fleet.reconcile.planning.snapshot import CellView, DeploymentView, FleetView, NodeView, RegionView
from fleet.reconcile.planning.states import CellState
from tests.fleet.fleets import KIND, LISTENING, NOW, ago, cell, node

SETTINGS = FleetSettings()


@dataclass(frozen=True)
class Wants:
    """A deployment in `east`: `ready` cells have machines, of `asked`; the others have waited `waiting_s`."""

    name: str
    asked: int
    ready: int
    floor: int | None = None
    priority: int = 5
    preemptible: bool = False
    preempts: Preempts = Preempts.MIN
    team: str = ""
    size: int = 1
    granted: int | None = None
    rule: GrantRule | None = None
    granted_s: float = 0.0
    waiting_s: float = 60.0
    max_unavailable: int = 1


def pool(*wants: Wants, spare: int = 0, free: int | None = 0, quotas: Iterable[QuotaView] = ()) -> FleetView:
    """A region with machines for the ready cells, `spare` ones, and `free` ones in its pool; None: machines are
    bought."""
    nodes: list[NodeView] = [node(f"spare-{number}") for number in range(spare)]
    cells: list[CellView] = []
    for one in wants:
        for number in range(one.ready):
            name = f"{one.name}-{number}"
            members = [f"{name}-n{rank}" for rank in range(one.size)]
            report = {"state": EngineState.READY, "cell": name, "generation": 3}
            nodes += [node(member, report=report, spare_since=None) for member in members]
            cells.append(cell(name, *members, deployment=one.name, state_since=ago(300)))
        in_force = min(one.asked, one.asked if one.granted is None else one.granted)
        for number in range(one.ready, in_force):
            since = ago(one.waiting_s)
            cells.append(cell(f"{one.name}-{number}", deployment=one.name, state=CellState.PENDING, state_since=since))
    return FleetView(
        regions={"east": RegionView("east", free=None if free is None else {KIND: free})},
        nodes={one.id: one for one in nodes},
        cells={one.id: one for one in cells},
        deployments={one.name: deployment(one) for one in wants},
        listening_since=LISTENING,
        quotas=tuple(quotas),
    )


def deployment(one: Wants) -> DeploymentView:
    claim = ClaimView(one.asked, one.floor, one.granted, ago(one.granted_s), one.rule, "as before")
    return DeploymentView(
        one.name,
        KIND,
        one.size,
        {"east": claim.in_force},
        policy=UpdatePolicy(max_unavailable=one.max_unavailable),
        team=one.team,
        sharing=SharingPolicy(one.priority, one.preemptible, one.preempts),
        claims={"east": claim},
    )


def granted(fleet: FleetView, now: datetime = NOW) -> dict[str, tuple[int | None, GrantRule]]:
    """The grant of each deployment after one check, with its rule."""
    decided = [one for one in plan_shares(fleet, SETTINGS, now) if isinstance(one, GrantCells)]
    return {one.deployment: (one.granted, one.rule) for one in decided}
