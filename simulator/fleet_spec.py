"""Fleets to begin with, said in a few words: regions, machines in racks, deployments with their cells in service."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from engine_agent.protocol.states import EngineState
from fleet.planning.policy import UpdatePolicy
from fleet.planning.snapshot import (
    CellView,
    DeploymentView,
    FleetView,
    MemberView,
    NodeView,
    RegionView,
    ReportView,
    VersionView,
)
from fleet.planning.states import CellState, NodeState
from simulator.clock import EPOCH

KIND = "simulated.8xl"


@dataclass(frozen=True, slots=True)
class DeploymentSpec:
    """`cells` per region, of `size` nodes each, all in service at `version`."""

    name: str
    cells: Mapping[str, int]
    size: int = 2
    version: str = "v1"
    policy: UpdatePolicy = field(default_factory=UpdatePolicy)
    drain_deadline_s: float = 60.0
    ready_timeout_s: float = 120.0
    others: Mapping[str, VersionView] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """`spares` idle machines per region, of which as many are kept warm; 16 machines to a rack, 8 racks to a zone."""

    deployments: tuple[DeploymentSpec, ...]
    spares: int = 2
    per_rack: int = 16
    racks_per_zone: int = 8

    @property
    def regions(self) -> tuple[str, ...]:
        return tuple(sorted({region for shape in self.deployments for region in shape.cells}))


def build_fleet(shape: FleetSpec, now: datetime = EPOCH) -> FleetView:
    """The fleet as a snapshot in which all is well since an hour."""
    before = now - timedelta(hours=1)
    nodes: dict[str, NodeView] = {}
    cells: dict[str, CellView] = {}
    for region in shape.regions:
        placed = 0

        def node(report: ReportView, region: str = region) -> str:
            nonlocal placed
            zone, rack = divmod(placed // shape.per_rack, shape.racks_per_zone)
            name = f"n-{len(nodes) + 1:06d}"
            nodes[name] = NodeView(
                id=name,
                region=region,
                instance_type=KIND,
                state=NodeState.READY,
                created_at=before,
                state_since=before,
                report=report,
                topology=(f"{region}-zone-{zone + 1}", region, f"{region}-{zone + 1}-rack-{rack + 1}"),
                spare_since=None if report.cell else before,
            )
            placed += 1
            return name

        for spec in shape.deployments:
            for _ in range(spec.cells.get(region, 0)):
                name = f"{spec.name}-{region}-{len(cells) + 1}"
                said = ReportView(True, now, before, EngineState.READY, name, 1, in_flight=0)
                members = tuple(MemberView(node(said), rank) for rank in range(spec.size))
                cells[name] = CellView(
                    id=name,
                    deployment=spec.name,
                    region=region,
                    state=CellState.READY,
                    generation=1,
                    created_at=before,
                    state_since=before,
                    members=members,
                    version=spec.version,
                )
        for _ in range(shape.spares):
            node(ReportView(True, now, before))
    return FleetView(
        regions={region: RegionView(region, {KIND: shape.spares}) for region in shape.regions},
        nodes=nodes,
        cells=cells,
        deployments={spec.name: _deployment(spec) for spec in shape.deployments},
        listening_since=before,
    )


def _deployment(spec: DeploymentSpec) -> DeploymentView:
    return DeploymentView(
        name=spec.name,
        instance_type=KIND,
        nodes_per_cell=spec.size,
        cells_wanted=spec.cells,
        ready_timeout_s=spec.ready_timeout_s,
        drain_deadline_s=spec.drain_deadline_s,
        engine="sim",
        version=spec.version,
        others=spec.others,
        policy=spec.policy,
    )
