"""Initial fleets in a few lines: regions, machines in racks, deployments with their cells in service."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import count

from engine_agent.protocol.states import EngineState
from fleet.deployments.planner import UNSTATED, ClaimView, QuotaView, SharingPolicy, UpdatePolicy
from fleet.machines.planner import ProviderLimits
from fleet.reconcile.planning.snapshot import (
    CellView,
    DeploymentView,
    FleetView,
    MemberView,
    NodeView,
    RegionView,
    ReportView,
    VersionView,
)
from fleet.reconcile.planning.states import CellState, NodeState
from simulator.clock import EPOCH

KIND = "simulated.8xl"


@dataclass(frozen=True, slots=True)
class DeploymentSpec:
    """`cells` per region, of `size` nodes each, all in service at `version`. Up to `floor` cells are not surplus; None
    means all."""

    name: str
    cells: Mapping[str, int]
    size: int = 2
    version: str = "v1"
    policy: UpdatePolicy = field(default_factory=UpdatePolicy)
    drain_deadline_s: float = 60.0
    ready_timeout_s: float = 120.0
    others: Mapping[str, VersionView] = field(default_factory=dict)
    floor: int | None = None
    sharing: SharingPolicy = UNSTATED
    team: str = ""


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """`spares` idle machines per region, of which as many are kept warm; 16 machines in a rack, 8 racks in a zone.
    `pool`: further free machines in each region, where no machines can be launched; None: machines are launched.
    `devices`: accelerators of each machine; `has_power_control`: whether providers can reboot machines."""

    deployments: tuple[DeploymentSpec, ...]
    spares: int = 2
    per_rack: int = 16
    racks_per_zone: int = 8
    pool: int | None = None
    quotas: tuple[QuotaView, ...] = ()
    devices: int = 0
    has_power_control: bool = False

    @property
    def regions(self) -> tuple[str, ...]:
        return tuple(sorted({region for shape in self.deployments for region in shape.cells}))


def build_fleet(shape: FleetSpec, now: datetime = EPOCH) -> FleetView:
    """Returns the fleet as a snapshot that has been healthy for an hour."""
    before = now - timedelta(hours=1)
    nodes: dict[str, NodeView] = {}
    cells: dict[str, CellView] = {}
    for region in shape.regions:
        in_region = count()

        def node(report: ReportView, region: str = region, in_region: Iterator[int] = in_region) -> str:
            view = _node(f"n-{len(nodes) + 1:06d}", region, _topology(shape, region, next(in_region)), report, before)
            view = replace(view, devices=shape.devices)
            nodes[view.id] = view
            return view.id

        for spec in shape.deployments:
            for _ in range(spec.cells.get(region, 0)):
                name = f"{spec.name}-{region}-{len(cells) + 1}"
                report = ReportView(True, now, before, EngineState.READY, name, 1, in_flight=0)
                members = tuple(MemberView(node(report), rank) for rank in range(spec.size))
                cells[name] = _cell(name, spec, region, members, before)
        for _ in range(shape.spares):
            node(ReportView(True, now, before))
    return FleetView(
        regions={region: _region(shape, region) for region in shape.regions},
        nodes=nodes,
        cells=cells,
        deployments={spec.name: _deployment(spec) for spec in shape.deployments},
        listening_since=before,
        quotas=shape.quotas,
    )


def _region(shape: FleetSpec, name: str) -> RegionView:
    limits = ProviderLimits(has_power_control=shape.has_power_control)
    free = None if shape.pool is None else {KIND: shape.pool}
    return RegionView(name, {KIND: shape.spares}, free=free, limits=limits)


def _topology(shape: FleetSpec, region: str, number: int) -> tuple[str, ...]:
    zone, rack = divmod(number // shape.per_rack, shape.racks_per_zone)
    return f"{region}-zone-{zone + 1}", region, f"{region}-{zone + 1}-rack-{rack + 1}"


def _node(name: str, region: str, topology: tuple[str, ...], report: ReportView, since: datetime) -> NodeView:
    return NodeView(
        id=name,
        region=region,
        instance_type=KIND,
        state=NodeState.READY,
        created_at=since,
        state_since=since,
        report=report,
        topology=topology,
        spare_since=None if report.cell else since,
    )


def _cell(name: str, spec: DeploymentSpec, region: str, members: tuple[MemberView, ...], since: datetime) -> CellView:
    return CellView(
        id=name,
        deployment=spec.name,
        region=region,
        instance_type=KIND,
        state=CellState.READY,
        generation=1,
        created_at=since,
        state_since=since,
        members=members,
        version=spec.version,
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
        claims={} if spec.floor is None else {name: ClaimView(cells, spec.floor) for name, cells in spec.cells.items()},
        sharing=spec.sharing,
        team=spec.team,
    )
