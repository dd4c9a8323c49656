"""Reads routing tables, ingresses and the planner's input. `RoutingCache` loads routable cells and tables in force once
and then only changed rows, so that publication scales to large fleets. It never writes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import reduce
from operator import or_
from time import monotonic

import msgspec
from django.conf import settings
from django.db import connection
from django.db.models import Exists, Max, OuterRef, Q, QuerySet, Subquery, TextField, Value
from django.db.models.functions import Coalesce
from django.utils.crypto import salted_hmac

from engine_agent.protocol.ingress_messages import Hold, Withheld
from engine_agent.protocol.ingress_messages import RoutingTable as TableMessage
from engine_agent.protocol.machine_messages import release_of
from engine_agent.protocol.messages import JsonObject
from engine_agent.protocol.ports import PROXY
from engine_agent.protocol.states import AgentKind
from fleet.cells.models import Cell
from fleet.deployments.models import Deployment
from fleet.deployments.selectors import concurrency_by_type
from fleet.faults.models import Incident
from fleet.reconcile.planning.states import CellState, IncidentState
from fleet.regions.models import Region
from fleet.releases.planner import AgentView, Standing
from kernel.row_cache import FullLooks, RowCache, RowCaches, WrittenTables
from models_registry.versions.models import ModelVersion, VersionState
from models_registry.versions.planning.answers import answers_name
from models_registry.versions.planning.roles import role_concurrency
from traffic.keys.planner import KeyRingVersion, shared_keys
from traffic.keys.selectors import KEY_RING, key_ring_version, keys_for_ingresses, keys_stopped, tenants_stopped
from traffic.region_shares.selectors.traffic import STEERING_TABLES, steerings
from traffic.routing.models import Ingress, IngressReport, PoolHold, RoutingTable
from traffic.routing.planning.ingresses import FollowingIngress, TableInForce
from traffic.routing.planning.tables import HeldDeployment, IngressAddress, RoutableCell, ServedDeployment, Steering


def served_deployments() -> list[ServedDeployment]:
    return [
        ServedDeployment(
            name=deployment.name,
            models=tuple(dict.fromkeys((deployment.name, deployment.model_version.model_id))),
            serving_class=deployment.serving_class,
            max_model_len=deployment.model_version.spec().max_model_len,
            created_at=int(deployment.model_version.created_at.timestamp()),
            adapters=deployment.model_version.adapter_names,
        )
        for deployment in Deployment.objects.select_related("model_version")
    ]


def held_deployments() -> dict[str, HeldDeployment]:
    rows = PoolHold.objects.filter(deployment__regions__cells_max__isnull=False).distinct()
    return {
        row.deployment_id: HeldDeployment(
            Hold(row.for_s, row.cold_start_s, row.ready_at, Withheld(row.withheld)), frozenset(row.regions)
        )
        for row in rows
    }


def ingress_addresses() -> list[IngressAddress]:
    return [
        IngressAddress(ingress.id, ingress.region_id, ingress.address, ingress.port)
        for ingress in Ingress.objects.exclude(address="")
    ]


def latest_tables() -> dict[str, RoutingTable]:
    """Returns the table in force, by region."""
    return {
        table.region_id: table
        for table in RoutingTable.objects.order_by("region_id", "-revision").distinct("region_id")
    }


def latest_revisions() -> dict[str, int]:
    rows = RoutingTable.objects.order_by().values("region_id").annotate(latest=Max("revision"))
    return {row["region_id"]: row["latest"] for row in rows}


class UnreadableTable(Exception):
    """A stored table has a shape that this release cannot read."""


def table_message(table: RoutingTable) -> TableMessage:
    """Returns a stored table as a message, without its keys. All readers of stored tables use this function. Raises
    UnreadableTable if the body is invalid; callers that read several regions skip this one."""
    try:
        stated = {**table.body, "revision": table.revision, "region": table.region_id, "type": "routing_table"}
        return msgspec.convert(stated, TableMessage)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        raise UnreadableTable(f"{table.region_id} revision {table.revision} cannot be read: {error}") from error


def table_for_ingresses(table: RoutingTable) -> TableMessage:
    """Returns a stored table as ingresses receive it: with its keys, and with hop secrets if there are several regions.
    One region gets none, because proving hops costs time in every request."""
    has_regions = Ingress.objects.values("region").distinct().count() > 1
    message = msgspec.structs.replace(table_message(table), hop_secrets=hop_secrets() if has_regions else ())
    ring = table.body.get(KEY_RING)
    if not ring:
        return message
    keys = shared_keys(keys_for_ingresses(), ring["ingresses"])
    return msgspec.structs.replace(
        message,
        keys=keys,
        keys_required=ring["required"],
        tenants_over_quota=tenants_stopped(),
        keys_over_quota=keys_stopped(),
    )


def routed_cells(table: TableMessage) -> frozenset[str]:
    return frozenset(cell.cell for pool in table.pools for cell in pool.cells if not cell.drain)


def following_ingresses() -> list[FollowingIngress]:
    reports = IngressReport.objects.values_list("ingress__region_id", "revision", "last_seen_at")
    return [FollowingIngress(*columns) for columns in reports]


def routing_tables_described() -> QuerySet[RoutingTable]:
    """Returns every revision; `current` marks the newest of its region."""
    newer = RoutingTable.objects.filter(region_id=OuterRef("region_id"), revision__gt=OuterRef("revision"))
    return RoutingTable.objects.annotate(current=~Exists(newer))


def table_by_reference(tables: QuerySet[RoutingTable], reference: str) -> RoutingTable | None:
    region, _, revision = reference.partition("@")
    return tables.filter(region_id=region, revision=int(revision)).first()


SALT = "switchyard.traffic.hops"
MAX_SECRETS = 2
"""Ingresses accept the current secret and the previous one."""


def hop_secrets() -> tuple[str, ...]:
    """Returns the signing secret first. Each is derived from SECRET_KEY or the first of SECRET_KEY_FALLBACKS."""
    keys = [settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS][:MAX_SECRETS]
    return tuple(salted_hmac(SALT, "", secret=key, algorithm="sha256").hexdigest() for key in keys)


_VERSIONS = "models_registry_modelversion"
_DEPLOYMENTS = ("fleet_deployment", _VERSIONS)
_INGRESSES = ("traffic_ingress",)
_REGIONS = ("fleet_region",)
_KEYS = ("traffic_keypolicy",)
_INCIDENTS = ("fleet_incident",)
_HOLDS = ("traffic_poolhold", "fleet_deploymentregion")
_SELDOM_WRITTEN = (*_DEPLOYMENTS, *_INGRESSES, *_REGIONS, *_KEYS, *_INCIDENTS, *_HOLDS, *STEERING_TABLES)
_ROUTED = ("fleet_cell", "fleet_cellmember", "fleet_node")
_READ = (*_SELDOM_WRITTEN, *_ROUTED, "traffic_routingtable", "traffic_applicationkey")
"""All that a pass of the publisher reads, but what concerns only drains."""
_REST = "rest"
_UNFINISHED = """
SELECT EXISTS (SELECT FROM fleet_cell WHERE state = %s AND unrouted_at IS NULL)
    OR EXISTS (SELECT FROM traffic_applicationkey WHERE revoked_at IS NOT NULL AND refused_everywhere_at IS NULL)
    OR EXISTS (SELECT FROM traffic_trafficoverride WHERE ended_at IS NULL)
"""
"""Whether time or reports of ingresses may give the publisher work, without a change of `_READ`."""


@dataclass(frozen=True, slots=True)
class KnownTable:
    """The newest table of a region, or the reason why it cannot be read. `keys` names the version of its keys."""

    revision: int
    message: TableMessage | None
    keys: JsonObject
    problem: UnreadableTable | None = None


@dataclass(frozen=True, slots=True)
class ServedVersion:
    """The part of a cell's model version that ingresses need."""

    max_concurrency: int
    adapters: tuple[str, ...]
    of_roles: Mapping[str, int] = field(default_factory=dict)
    of_types: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """By instance type and role, for versions whose concurrency depends on the type."""
    answers: str = ""
    """Streams continue at cells whose version has the same name here."""

    def concurrency(self, instance_type: str, role: str) -> int:
        return self.of_types.get((instance_type, role), self.of_roles.get(role, self.max_concurrency))


class RoutingCache:
    """Caches the publisher's input, for one thread. `published` is the input of the last pass that published
    nothing."""

    def __init__(self, now_s: Callable[[], float] = monotonic) -> None:
        self._looks = FullLooks(now_s)
        self._rest_looks, self._read = FullLooks(now_s), WrittenTables(_READ)
        self._clear()

    def is_at_rest(self) -> bool:
        """Whether nothing was written since `rest` that a pass reads: one query instead of all of its queries."""
        if self._rest_looks.begin():
            self._read = WrittenTables(_READ)
        self._read.look()
        self._rest_looks.end()
        return self._read.has(_REST)

    def rest(self) -> None:
        """Call it after a pass that changed nothing and began with `is_at_rest`. Does nothing while work is left."""
        with connection.cursor() as cursor:
            cursor.execute(_UNFINISHED, [CellState.DRAINING.value])
            if cursor.fetchone() == (False,):
                self._read.get(_REST, _READ, lambda: True)

    def _clear(self) -> None:
        self._cells = RowCache(
            "fleet_cell",
            ("id", "deployment_id", "region_id", "state", "generation", "model_version_id", "role", "instance_type_id"),
            kept="state IN ('ready', 'draining') AND role <> 'prefill'",
        )
        self._leaders = RowCache("fleet_cellmember", ("id", "cell_id", "node_id"), kept="rank = 0")
        self._nodes = RowCache("fleet_node", ("id", "address", "port_base"), kept="port_base IS NOT NULL")
        self._routed = RowCaches(self._cells, self._leaders, self._nodes)
        self._written = WrittenTables(_SELDOM_WRITTEN)
        self._served_versions_by_id: dict[int, ServedVersion] = {}
        self._routable: list[RoutableCell] = []
        self._tables: dict[str, KnownTable] = {}
        self.published: object = None

    def begin(self) -> None:
        """Starts a pass, and reloads everything if a full read is due. Call `end` only if the pass succeeded."""
        if self._looks.begin():
            self._clear()

    def end(self) -> None:
        self._looks.end()

    def tables(self) -> Mapping[str, KnownTable]:
        """Returns the newest table by region. Published tables never change, so only new revisions are read."""
        newest = latest_revisions()
        missing = [
            Q(region_id=region, revision=revision)
            for region, revision in newest.items()
            if region not in self._tables or self._tables[region].revision != revision
        ]
        for table in RoutingTable.objects.filter(reduce(or_, missing)) if missing else ():
            self._tables[table.region_id] = _known_table(table)
        self._tables = {region: self._tables[region] for region in newest if region in self._tables}
        return self._tables

    def tables_in_force(self) -> dict[str, TableInForce]:
        """Returns what drains need of the newest tables, by region. An unreadable table counts as routing to every cell
        of its region."""
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
        """Returns the same list object if nothing has changed. A cell whose leader has no ports yet is not routable."""
        changed = self._routed.refresh()
        versions = self._written.get("versions", (_VERSIONS,), _served_versions_by_id)
        if any(changed) or versions is not self._served_versions_by_id:
            self._served_versions_by_id = versions
            self._routable = [
                self._routable_cell(*leader) for leader in self._leaders.rows.values() if self._is_there(*leader)
            ]
        return self._routable

    def check_written(self) -> None:
        """Checks which tables were written to. Only these are loaded again."""
        self._written.look()

    def deployments(self) -> list[ServedDeployment]:
        return self._written.get("deployments", _DEPLOYMENTS, served_deployments)

    def ingresses(self) -> list[IngressAddress]:
        return self._written.get("ingresses", _INGRESSES, ingress_addresses)

    def regions(self) -> dict[str, bool]:
        """Returns whether ingresses serve gRPC, by region."""
        return self._written.get("regions", _REGIONS, lambda: dict(Region.objects.values_list("name", "grpc")))

    def key_ring_version(self) -> KeyRingVersion:
        return self._written.get("keys", _KEYS, key_ring_version)

    def open_subjects(self, kind: str) -> list[str]:
        rows = Incident.objects.filter(kind=kind, state=IncidentState.OPEN).values_list("subject", flat=True)
        return self._written.get(f"incidents {kind}", _INCIDENTS, lambda: list(rows))

    def holds(self) -> dict[str, HeldDeployment]:
        return self._written.get("holds", _HOLDS, held_deployments)

    def steerings(self, now: datetime) -> tuple[dict[str, Steering], dict[str, str]]:
        """Returns `region_shares.selectors.traffic.steerings` for all deployments."""
        return steerings((deployment.name for deployment in self.deployments()), now, self._written)

    def _is_there(self, cell: str, node: str) -> bool:
        return (
            cell in self._cells.rows
            and node in self._nodes.rows
            and self._cells.rows[cell][4] in self._served_versions_by_id
        )

    def _routable_cell(self, cell: str, node: str) -> RoutableCell:
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
            max_connections=self._served_versions_by_id[version].concurrency(kind, role),
            adapters=self._served_versions_by_id[version].adapters,
            version=self._served_versions_by_id[version].answers,
        )


def _served_versions_by_id() -> dict[int, ServedVersion]:
    return {version.pk: _served_version(version) for version in ModelVersion.objects.all()}


def _served_version(version: ModelVersion) -> ServedVersion:
    is_draft = version.state == VersionState.DRAFT.value  # it may still change
    return ServedVersion(
        max_concurrency=version.max_concurrency,
        adapters=version.adapter_names,
        of_roles=role_concurrency(version.roles),
        of_types=concurrency_by_type(version),
        answers=("" if is_draft else answers_name(version.spec())) or str(version.pk),
    )


def _known_table(table: RoutingTable) -> KnownTable:
    try:
        return KnownTable(table.revision, table_message(table), table.body.get(KEY_RING, {}))
    except UnreadableTable as problem:
        return KnownTable(table.revision, None, {}, problem)


PROTOCOL = "protocol"
"""Key in a report's telemetry: protocol of the agent that sent it."""


def ingresses_described() -> QuerySet[Ingress]:
    """Returns ingresses with their last report and `wanted_revision`, the newest table of their region (0 if none). An
    ingress that never reported has `connected` False, `revision` 0 and an empty `reason`."""
    newest = RoutingTable.objects.filter(region_id=OuterRef("region_id")).order_by("-revision")
    return Ingress.objects.select_related("report", "region").annotate(
        connected=Coalesce("report__connected", Value(False)),
        revision=Coalesce("report__revision", Value(0)),
        reason=Coalesce("report__reason", Value(""), output_field=TextField()),
        wanted_revision=Coalesce(Subquery(newest.values("revision")[:1]), Value(0)),
    )


def ingress_agents() -> list[AgentView]:
    rows = Ingress.objects.select_related("report", "region").exclude(report=None)
    return [
        AgentView(
            id=row.id,
            kind=AgentKind.INGRESS.value,
            region=row.region_id,
            provider=row.region.provider,
            release=release_of(row.report.agent_version),
            connected=row.report.connected,
            connection_since=row.report.connection_changed_at,
            unwell=row.report.reason,
            serves_requests=True,
            standing=Standing(pid=row.report.haproxy_pid),
        )
        for row in rows
    ]


def ingresses_waiting() -> tuple[str, ...]:
    """Returns one sentence for each condition that keeps requests from being answered."""
    tables = latest_tables()
    waiting = []
    for ingress in Ingress.objects.select_related("report"):
        table, report = tables.get(ingress.region_id), getattr(ingress, "report", None)
        if table is None:
            waiting.append(f"{ingress.region_id} has no routing table yet")
        elif report is None or not report.connected:
            waiting.append(f"ingress {ingress.id} is not connected")
        elif report.revision < table.revision:
            waiting.append(f"ingress {ingress.id} runs revision {report.revision} of {table.revision}")
        else:
            waiting += _cells_not_up(ingress.id, table, report.cells)
    return tuple(waiting)


def _cells_not_up(ingress: str, table: RoutingTable, seen: dict[str, str]) -> list[str]:
    try:
        routed = sorted(routed_cells(table_message(table)))
    except UnreadableTable as error:
        return [str(error)]
    return [
        f"cell {cell} is {seen.get(cell, 'unknown')} at ingress {ingress}" for cell in routed if seen.get(cell) != "up"
    ]
