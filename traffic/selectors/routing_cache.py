"""What publication reads of a large fleet, cells that can be routed and tables in force: loaded whole once, and then
only what has changed. Whoever makes many passes keeps one; a new one looks at everything.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import reduce
from operator import or_
from time import monotonic

from django.db.models import Q

from engine_agent.protocol.ingress_messages import RoutingTable as TableMessage
from engine_agent.protocol.messages import JsonObject
from engine_agent.protocol.ports import PROXY
from fleet.models import Cell, Incident, Region
from fleet.planning.states import IncidentState
from fleet.selectors.model_version import concurrency_by_type
from kernel.row_cache import FullLooks, RowCache, RowCaches, WrittenTables
from models_registry.models import ModelVersion
from models_registry.planning.adapters import adapter_names
from models_registry.planning.roles import role_concurrency
from traffic.models import RoutingTable
from traffic.planning.ingress import TableInForce
from traffic.planning.key import KeyStanding
from traffic.planning.routing import HeldDeployment, IngressAddress, RoutableCell, ServedDeployment, Steering
from traffic.selectors.key import KEY_RING, key_standing
from traffic.selectors.routing import (
    UnreadableTable,
    held_deployments,
    ingress_addresses,
    latest_revisions,
    routed_cells,
    served_deployments,
    table_message,
)
from traffic.selectors.steering import STEERING_TABLES, steerings

_VERSIONS = "models_registry_modelversion"
_DEPLOYMENTS = ("fleet_deployment", _VERSIONS)
_INGRESSES = ("traffic_ingress",)
_REGIONS = ("fleet_region",)
_KEYS = ("traffic_keypolicy",)
_INCIDENTS = ("fleet_incident",)
_HOLDS = ("traffic_poolhold", "fleet_deploymentregion")
_SELDOM_WRITTEN = (*_DEPLOYMENTS, *_INGRESSES, *_REGIONS, *_KEYS, *_INCIDENTS, *_HOLDS, *STEERING_TABLES)


@dataclass(frozen=True, slots=True)
class KnownTable:
    """The newest table of a region, or why nobody can read it. `keys`: which version of the keys goes with it."""

    revision: int
    message: TableMessage | None
    keys: JsonObject
    problem: UnreadableTable | None = None


@dataclass(frozen=True, slots=True)
class ServedVersion:
    """What of a cell's version its ingresses must know."""

    max_concurrency: int
    adapters: tuple[str, ...]
    of_roles: Mapping[str, int] = field(default_factory=dict)
    of_types: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """By instance type and role, where it differs by type."""

    def concurrency(self, instance_type: str, role: str) -> int:
        return self.of_types.get((instance_type, role), self.of_roles.get(role, self.max_concurrency))


class RoutingCache:
    """For one thread. `published`: what the last pass that had nothing to publish looked at."""

    def __init__(self, now_s: Callable[[], float] = monotonic) -> None:
        self._looks = FullLooks(now_s)
        self._forget()

    def _forget(self) -> None:
        self._cells = RowCache(
            "fleet_cell",
            ("id", "deployment_id", "region_id", "state", "generation", "model_version_id", "role", "instance_type_id"),
            kept="state IN ('ready', 'draining') AND role <> 'prefill'",
        )
        self._leaders = RowCache("fleet_cellmember", ("id", "cell_id", "node_id"), kept="rank = 0")
        self._nodes = RowCache("fleet_node", ("id", "address", "port_base"), kept="port_base IS NOT NULL")
        self._routed = RowCaches(self._cells, self._leaders, self._nodes)
        self._written = WrittenTables(_SELDOM_WRITTEN)
        self._versions: dict[int, ServedVersion] = {}
        self._routable: list[RoutableCell] = []
        self._tables: dict[str, KnownTable] = {}
        self.published: object = None

    def begin(self) -> None:
        """A pass begins; it may be time to look at everything. `end` must follow where nothing went wrong."""
        if self._looks.begin():
            self._forget()

    def end(self) -> None:
        self._looks.end()

    def tables(self) -> Mapping[str, KnownTable]:
        """Region -> its newest table. One that was published is never changed, so only new revisions are read."""
        newest = latest_revisions()
        missing = [
            Q(region_id=region, revision=revision)
            for region, revision in newest.items()
            if region not in self._tables or self._tables[region].revision != revision
        ]
        for table in RoutingTable.objects.filter(reduce(or_, missing)) if missing else ():
            self._tables[table.region_id] = _known(table)
        self._tables = {region: self._tables[region] for region in newest if region in self._tables}
        return self._tables

    def tables_in_force(self) -> dict[str, TableInForce]:
        """Region -> its newest table, as far as drains care. One that cannot be read may route every cell there."""
        return {
            region: TableInForce(
                table.revision,
                routed_cells(table.message)
                if table.message
                else frozenset(Cell.objects.filter(region=region).values_list("id", flat=True)),
            )
            for region, table in self.tables().items()
        }

    def routable_cells(self) -> list[RoutableCell]:
        """The same list as before where nothing has changed. A cell whose leader has no ports yet cannot be routed."""
        changed = self._routed.refresh()
        versions = self._written.get("versions", (_VERSIONS,), _versions)
        if any(changed) or versions is not self._versions:
            self._versions = versions
            self._routable = [self._cell(*leader) for leader in self._leaders.rows.values() if self._is_there(*leader)]
        return self._routable

    def look(self) -> None:
        """See what was written to the tables of what follows, which is loaded again only then."""
        self._written.look()

    def deployments(self) -> list[ServedDeployment]:
        return self._written.get("deployments", _DEPLOYMENTS, served_deployments)

    def ingresses(self) -> list[IngressAddress]:
        return self._written.get("ingresses", _INGRESSES, ingress_addresses)

    def regions(self) -> list[str]:
        return self._written.get("regions", _REGIONS, lambda: list(Region.objects.values_list("name", flat=True)))

    def key_standing(self) -> KeyStanding:
        return self._written.get("keys", _KEYS, key_standing)

    def open_subjects(self, kind: str) -> list[str]:
        """Of the open incidents of this kind."""
        rows = Incident.objects.filter(kind=kind, state=IncidentState.OPEN).values_list("subject", flat=True)
        return self._written.get(f"incidents {kind}", _INCIDENTS, lambda: list(rows))

    def holds(self) -> dict[str, HeldDeployment]:
        return self._written.get("holds", _HOLDS, held_deployments)

    def steerings(self, now: datetime) -> tuple[dict[str, Steering], dict[str, str]]:
        """As `traffic.selectors.steering.steerings`, of all deployments."""
        return steerings((deployment.name for deployment in self.deployments()), now, self._written)

    def _is_there(self, cell: str, node: str) -> bool:
        return cell in self._cells.rows and node in self._nodes.rows and self._cells.rows[cell][4] in self._versions

    def _cell(self, cell: str, node: str) -> RoutableCell:
        deployment, region, state, generation, version, role, kind = self._cells.rows[cell]
        address, port_base = self._nodes.rows[node]
        return RoutableCell(
            id=cell,
            deployment=deployment,
            region=region,
            state=state,
            generation=generation,
            node=node,
            address=address,
            port=port_base + PROXY,
            max_connections=self._versions[version].concurrency(kind, role),
            adapters=self._versions[version].adapters,
        )


def _versions() -> dict[int, ServedVersion]:
    rows = list(ModelVersion.objects.values_list("pk", "max_concurrency", "adapters", "roles", "by_type"))
    differing = [pk for pk, *_, by_type in rows if by_type]
    versions = ModelVersion.objects.in_bulk(differing) if differing else {}
    of_types = {pk: concurrency_by_type(version) for pk, version in versions.items()}
    return {
        pk: ServedVersion(most, adapter_names(adapters), role_concurrency(roles), of_types.get(pk, {}))
        for pk, most, adapters, roles, _ in rows
    }


def _known(table: RoutingTable) -> KnownTable:
    try:
        return KnownTable(table.revision, table_message(table), table.body.get(KEY_RING, {}))
    except UnreadableTable as problem:
        return KnownTable(table.revision, None, {}, problem)
