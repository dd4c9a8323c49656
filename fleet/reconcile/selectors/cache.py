"""The large tables, nodes with reports and cells with members, as planners need them: loaded once, and then only
changed rows. For processes that run many passes."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import lru_cache
from time import monotonic
from typing import Any, TypeVar

from engine_agent.protocol.fingerprint import Fingerprint, fingerprint_digest
from engine_agent.protocol.states import CellRole, EngineState
from fleet.capacity.planning.pools import Markets, parse_markets
from fleet.cells.models import Disruption
from fleet.faults.planning.liveness import status_in_force
from fleet.faults.planning.views import StepWindow
from fleet.faults.selectors.faults import step_windows
from fleet.load.planner import CellCounters
from fleet.nodes.models import NodeReport
from fleet.reconcile.planning.settings import FleetSettings
from fleet.reconcile.planning.snapshot import CellView, Holdings, MemberView, NodeView, ProviderStatus, ReportView
from fleet.reconcile.planning.states import CellState, DisruptionCause, MachineState, NodeState, ProviderAction
from fleet.rollouts.selectors import counters_reported
from kernel.row_cache import FullLooks, Row, RowCache, RowCaches, WrittenTables
from models_registry.versions.models import ModelVersion

V = TypeVar("V")
_VERSIONS = ("models_registry_model", "models_registry_modelversion")
_SELDOM_WRITTEN = (
    *_VERSIONS,
    *("fleet_region", "fleet_deployment", "fleet_deploymentregion", "fleet_rollout", "fleet_disruption", "fleet_quota"),
    *("models_registry_instancetype", "fleet_rate", "fleet_capacitypool"),
    *("fleet_signal", "fleet_incident", "fleet_replacement", "fleet_repair", "fleet_faultrule", "fleet_node"),
    *("fleet_cloudnotice", "models_registry_benchmark", "fleet_dayplan", "fleet_scalingswitch"),
    "models_registry_enginebuild",
)


def _epoch(column: str) -> str:
    """A time as a number, which is parsed ten times faster. Reports are read every other second."""
    return f"extract(epoch FROM {column})::float8"


_NODES = (
    *("id", "region_id", "instance_type_id", "state", _epoch("created_at"), _epoch("state_since"), "cordoned"),
    *("topology::text", _epoch("spare_since"), "fingerprint::text", "cordoned_for_notice", "markets::text"),
    *("jsonb_array_length(accelerators)", "prefetch::text"),
)
# Keeps all members, because planners look up every node of a cell, and all machines that may still run.
_NODE_KEPT = """state <> 'retired' OR terminated_at IS NULL
    OR EXISTS (SELECT 1 FROM fleet_cellmember WHERE node_id = fleet_node.id)"""
_BOUGHT_KEPT = f"price_per_hour IS NOT NULL AND runs <> '' AND state <> '{MachineState.GONE}'"
_SHARED_KEPT = "runs <> '' AND coalesce((owns ->> 'share')::float8, 1) < 1"
_REPORTS = (
    *("node_id", "connected", _epoch("last_seen_at"), _epoch("connection_changed_at"), "state", "cell", "generation"),
    *("reason", _epoch("unhealthy_since"), "health ->> 'reason'", "load ->> 'in_flight'", "listener", "quiet"),
    "xmin::text",
    *("(telemetry -> 'builds')::text", "(telemetry -> 'prefetched')::text"),
)
_CELLS = (
    *("id", "deployment_id", "region_id", "state", "generation", _epoch("created_at"), _epoch("state_since")),
    *("restarts", _epoch("unrouted_at"), "reason", "failed_by", "role", "instance_type_id", "model_version_id"),
)
_VERSION = -1
_SILENT = ReportView(connected=False, last_seen_at=None)


def _open_disruptions() -> dict[str, str]:
    entries = Disruption.objects.filter(closed_at__isnull=True, machine=None)
    return dict(entries.values_list("cell_id", "cause"))


class FleetCache:
    """For one thread. Results belong to the caller, except parts from rarely `written` tables."""

    def __init__(self, now_s: Callable[[], float] = monotonic) -> None:
        self._looks = FullLooks(now_s)
        self._forget()

    def _forget(self) -> None:
        self.written = WrittenTables(_SELDOM_WRITTEN)
        self._nodes = RowCache("fleet_node", _NODES, kept=_NODE_KEPT)
        self._reports = RowCache("fleet_nodereport", _REPORTS)
        self._machines = RowCache("fleet_machinestatus", ("node_id", "status", "described_at"))
        self._bought = RowCache("fleet_machine", ("id", "runs", "price_per_hour"), kept=_BOUGHT_KEPT)
        self._shared = RowCache("fleet_machineslot", ("id", "runs", "owns -> 'devices' ->> 0"), kept=_SHARED_KEPT)
        self._orders = RowCache("fleet_providercall", ("node_id", "action", "unit"))
        self._cells = RowCache("fleet_cell", _CELLS, kept=f"state <> '{CellState.STOPPED}'")
        self._members = RowCache("fleet_cellmember", ("id", "cell_id", "node_id", "rank"))
        self._steps = RowCache("fleet_steprecord", ("node_id", "cell", "generation", "windows::text"))
        # In this order, a cell's nodes are known once the cell is. Reports change in each pass.
        self._tables = RowCaches(
            self._cells,
            self._members,
            self._nodes,
            self._machines,
            self._bought,
            self._shared,
            self._orders,
            self._steps,
            self._reports,
        )
        self._members_of: dict[str, dict[int, MemberView]] = defaultdict(dict)
        self._disruptions: dict[str, str] = {}
        self._versions: dict[int, ModelVersion] = {}
        self._price_of: dict[str, float] = {}
        self._device_of: dict[str, str] = {}
        self._node_views: dict[str, NodeView] = {}
        self._cell_views: dict[str, CellView] = {}
        self._windows: dict[str, tuple[StepWindow, ...]] = {}
        self._counted: dict[str, tuple[Row, str, CellCounters | None]] = {}

    def refresh(self, settings: FleetSettings, now: datetime) -> None:
        """Loads what has changed since the last call, or everything when that is due."""
        if self._looks.begin():
            self._forget()
        self.written.look()
        cells, members, nodes, machines, bought, shared, orders, steps, reports = self._tables.refresh()
        self._take_cells(cells.keys() | self._take_members(members))
        facts = self._take_prices(bought) | self._take_devices(shared)
        self._take_nodes(nodes.keys() | machines.keys() | facts | orders.keys() | reports.keys(), settings, now)
        for node in steps:
            self._windows.pop(node, None)
            if (row := self._steps.rows.get(node)) is not None:
                self._windows[node] = step_windows(row[0], row[1], json.loads(row[2]))
        self._looks.end()

    @property
    def nodes(self) -> dict[str, NodeView]:
        """By ID, ordered by region and ID."""
        return dict(self._node_views)

    @property
    def cells(self) -> dict[str, CellView]:
        """By ID, ordered by deployment, region and age."""
        return dict(self._cell_views)

    @property
    def windows(self) -> dict[str, tuple[StepWindow, ...]]:
        """Node -> its rank's recent step windows, oldest first."""
        return dict(self._windows)

    def with_counters(self, cells: Iterable[CellView]) -> Iterator[CellView]:
        """These cells with the counters that their leaders reported for this generation."""
        about = {
            cell.members[0].node: cell
            for cell in cells
            if cell.members and self._node_views[cell.members[0].node].report.is_about(cell)
        }
        # Thousands of large columns: read only after a new report.
        known = {node: self._counted[node] for node in about.keys() & self._counted.keys()}
        fresh = [node for node in about if node not in known or known[node][0] is not self._reports.rows[node]]
        for report in NodeReport.objects.filter(node_id__in=fresh).only("cell", "generation", "load"):
            row = self._reports.rows[report.node_id]
            known[report.node_id] = (row, report.cell, counters_reported(report))
        self._counted = known
        for node, (_, counted, counters) in known.items():
            cell = about[node]
            if counters is not None and (counted, counters.generation) == (cell.id, cell.generation):
                yield replace(cell, counters=counters)

    @property
    def versions(self) -> Mapping[str, dict[str, ModelVersion]]:
        """Deployment -> versions of its cells, by reference."""
        found: dict[str, dict[str, ModelVersion]] = defaultdict(dict)
        for deployment, pk in {(row[0], row[_VERSION]) for row in self._cells.rows.values()}:
            version = self._versions[pk]
            found[deployment][version.reference] = version
        return found

    def _take_cells(self, changed: set[str]) -> None:
        disruptions = self.written.get("disruptions", ["fleet_disruption"], _open_disruptions)
        changed = changed | {cell for cell, _ in disruptions.items() ^ self._disruptions.items()}
        self._disruptions = disruptions
        used = sorted({row[_VERSION] for row in self._cells.rows.values()})
        self._versions = self.written.get(f"versions {used}", _VERSIONS, lambda: ModelVersion.objects.in_bulk(used))
        self._cell_views = _with_changes(
            self._cell_views,
            changed,
            self._cells,
            self._cell_view,
            lambda c: (c.deployment, c.region, c.created_at, c.id),
        )

    def _take_members(self, members: Mapping[int, Row | None]) -> set[str]:
        changed = set()
        for key, before in members.items():
            if before is not None:
                del self._members_of[before[0]][key]
                changed.add(before[0])
            if (row := self._members.rows.get(key)) is not None:
                self._members_of[row[0]][key] = MemberView(row[1], row[2])
                changed.add(row[0])
        return changed

    def _cell_view(self, cell: str, row: Row) -> CellView:
        deployment, region, state, generation, created_at, state_since, restarts, unrouted_at, *rest = row
        reason, failed_by, role, instance_type, version = rest
        disruption = self._disruptions.get(cell)
        return CellView(
            id=cell,
            deployment=deployment,
            region=region,
            instance_type=instance_type,
            state=CellState(state),
            role=CellRole(role),
            generation=generation,
            created_at=_time(created_at),
            state_since=_time(state_since),
            members=tuple(sorted(self._members_of.get(cell, {}).values(), key=lambda member: member.rank)),
            restarts=restarts,
            unrouted_at=_time_or_none(unrouted_at),
            reason=reason,
            failed_by=failed_by,
            version=self._versions[version].reference,
            disruption=DisruptionCause(disruption) if disruption else None,
        )

    def _take_prices(self, machines: Mapping[str, Row | None]) -> set[str]:
        if not machines:
            return set()
        known, self._price_of = self._price_of, dict(self._bought.rows.values())
        return {node for node, _ in known.items() ^ self._price_of.items()}

    def _take_devices(self, slots: Mapping[int, Row | None]) -> set[str]:
        if not slots:
            return set()
        known, self._device_of = self._device_of, dict(self._shared.rows.values())
        return {node for node, _ in known.items() ^ self._device_of.items()}

    def _take_nodes(self, changed: set[str], settings: FleetSettings, now: datetime) -> None:
        if not all(member[1] in self._nodes.rows for member in self._members.rows.values()):
            self._nodes.forget()  # a node outside the cache has joined a cell
            changed |= self._nodes.refresh().keys()
        self._node_views = _with_changes(
            self._node_views, changed, self._nodes, self._node_view, lambda node: (node.region, node.id)
        )
        for node in self._machines.rows.keys() & self._node_views.keys():
            view = self._node_views[node]
            provider = self._provider(node, view.report, settings, now)
            if provider is not view.provider:
                self._node_views[node] = replace(view, provider=provider)

    def _provider(self, node: str, report: ReportView, settings: FleetSettings, now: datetime) -> ProviderStatus:
        """A provider's status of a node is used for a limited time."""
        status, described_at = self._machines.rows[node]
        return status_in_force(ProviderStatus(status), described_at, report, settings, now)

    def _node_view(self, node: str, row: Row) -> NodeView:
        """Without the provider's status."""
        region, instance_type, state, created_at, state_since, cordoned, topology, *rest = row
        spare_since, fingerprint, cordoned_for_notice, markets, devices, prefetch = rest
        reported, order = self._reports.rows.get(node), self._orders.rows.get(node)
        software, digest = _software(fingerprint)
        return NodeView(
            id=node,
            region=region,
            instance_type=instance_type,
            state=NodeState(state),
            created_at=_time(created_at),
            state_since=_time(state_since),
            report=_SILENT if reported is None else _report_view(reported),
            cordoned=cordoned,
            cordoned_for_notice=cordoned_for_notice,
            topology=_texts(topology),
            spare_since=_time_or_none(spare_since),
            ordered=None if order is None else ProviderAction(order[0]),
            unit="" if order is None else order[1],
            markets=_markets(markets),
            price_per_hour=self._price_of.get(node),
            shared_device=self._device_of.get(node, ""),
            fingerprint=digest,
            software=software,
            devices=devices,
            prefetch=_texts(prefetch),
        )


def _with_changes(
    views: dict[str, V],
    changed: Iterable[str],
    table: RowCache,
    view: Callable[[str, Row], V],
    place: Callable[[V], Any],
) -> dict[str, V]:
    """Updates the views of changed rows, and sorts by `place` again after an insertion."""
    known = len(views)
    for key in changed:
        row = table.rows.get(key)
        if row is not None:
            views[key] = view(key, row)
        elif views.pop(key, None) is not None:
            known -= 1
    return dict(sorted(views.items(), key=lambda item: place(item[1]))) if len(views) > known else views


def _report_view(row: Row) -> ReportView:
    connected, last_seen_at, changed_at, state, cell, generation, reason, unhealthy_since, *rest = row
    why, in_flight, listener, quiet, _, builds, prefetched = rest
    return ReportView(
        connected=connected,
        last_seen_at=_time_or_none(last_seen_at),
        connection_changed_at=_time_or_none(changed_at),
        state=EngineState(state),
        cell=cell,
        generation=generation,
        reason=reason,
        unhealthy_since=_time_or_none(unhealthy_since),
        health_reason=why or "",
        in_flight=int(in_flight) if in_flight else 0,
        listener=listener,
        quiet=quiet,
        holdings=None if prefetched is None else _holdings(builds or "[]", prefetched),
    )


def _time(epoch_s: float) -> datetime:
    """Exact to the microsecond until 2106."""
    return datetime.fromtimestamp(epoch_s, UTC)


def _time_or_none(epoch_s: float | None) -> datetime | None:
    return None if epoch_s is None else _time(epoch_s)


@lru_cache(4096)
def _software(stated: str) -> tuple[Fingerprint, str]:
    """A machine's fingerprint and its digest. Most machines are alike."""
    fields: Fingerprint = json.loads(stated)
    return fields, fingerprint_digest(fields) if fields else ""


@lru_cache(4096)
def _holdings(builds: str, prefetched: str) -> Holdings:
    """What a node holds. Most nodes are alike."""
    stated = json.loads(prefetched)
    present = [*json.loads(builds), *stated.get("artifacts", ())]
    complete = frozenset(one["digest"] for one in present if not one.get("fetching"))
    return Holdings(complete, stated.get("troubles", {}))


@lru_cache(4096)
def _texts(stated: str) -> tuple[str, ...]:
    return tuple(json.loads(stated))


@lru_cache
def _markets(stated: str) -> Markets:
    return parse_markets(json.loads(stated))
