"""Rows of the ingress page: ingresses with their tables, the last published tables, entry names and certificates."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

import msgspec
from django.db.models import F, Field, Func, IntegerField, JSONField, Max, QuerySet

from controlplane.dashboard.fragments import PageRequest
from controlplane.dashboard.lists import Column, List
from engine_agent.protocol.ingress_messages import CellTraffic
from fleet.agents.models import ApplicationCertificate
from fleet.load.planner import FRESH_FOR_S
from fleet.regions.planner import ENDS_NOW, ENDS_SOON, ending
from kernel.tones import Tone
from traffic.entry.models import Entry, EntryRevision
from traffic.entry.planner import WHOLE, RevisionState
from traffic.entry.selectors import PUBLISHED_STATES, entries_described
from traffic.routing.models import Ingress, IngressReport, RoutingTable


class Following(StrEnum):
    """Whether an ingress runs the latest table of its region."""

    CURRENT = "current"
    BEHIND = "behind"
    SILENT = "silent"
    NEVER_REPORTED = "never reported"


FOLLOWING_TONE: dict[Following, Tone] = {
    Following.CURRENT: Tone.OK,
    Following.BEHIND: Tone.MOVING,
    Following.SILENT: Tone.WARN,
    Following.NEVER_REPORTED: Tone.IDLE,
}


@dataclass(frozen=True, slots=True)
class SharedCell:
    """A cell as an ingress uses it: its requests there, the limit and weight in force, and the load behind them."""

    cell: str
    in_flight: int
    limit: int
    weight: int
    why: str


@dataclass(frozen=True, slots=True)
class IngressRow:
    """An ingress. `published` is its region's latest revision; `cells` is HAProxy's state of each cell; `shared` are
    those whose places it shares with other ingresses."""

    ingress: Ingress
    report: IngressReport | None
    published: int
    following: Following
    cells: tuple[tuple[str, str], ...]
    shared: tuple[SharedCell, ...] = ()

    @property
    def tone(self) -> Tone:
        return FOLLOWING_TONE[self.following]

    @property
    def cells_up(self) -> int:
        return sum(state == "up" for _, state in self.cells)


@dataclass(frozen=True, slots=True)
class TableRow:
    """A published table without its body: names of its pools, number of cells and of draining ones, and whether it is
    the newest of its region."""

    table: RoutingTable
    pools: str
    cells: int
    draining: int
    newest: bool


REVISION_TONE: dict[RevisionState, Tone] = {
    RevisionState.SENDING: Tone.WARN,
    RevisionState.PENDING: Tone.MOVING,
    RevisionState.IN_FORCE: Tone.OK,
    RevisionState.REPLACED: Tone.IDLE,
    RevisionState.LOST: Tone.WARN,
}
REVISIONS_SHOWN = 5


@dataclass(frozen=True, slots=True)
class EntryRegionRow:
    """`percent` of all clients as published; `planned` is the region's share before measured capacity."""

    region: str
    percent: float
    planned: float
    seen: int | None


@dataclass(frozen=True, slots=True)
class RevisionRow:
    revision: EntryRevision

    @property
    def tone(self) -> Tone:
        return REVISION_TONE[RevisionState(self.revision.state)]


@dataclass(frozen=True, slots=True)
class EntryRow:
    """A DNS name that covers all regions, with its last revisions, newest first."""

    entry: Entry
    regions: tuple[EntryRegionRow, ...]
    revisions: tuple[RevisionRow, ...]


def entry_rows() -> tuple[EntryRow, ...]:
    """Returns every entry with its last revisions, in two queries."""
    return tuple(_entry_row(entry) for entry in entries_described())


def _entry_row(entry: Entry) -> EntryRow:
    revisions = tuple(RevisionRow(each) for each in entry.revisions.all())
    published = next((each.revision for each in revisions if each.revision.state in PUBLISHED_STATES), None)
    weights = published.weights if published else {}
    regions = tuple(
        EntryRegionRow(region, 100 * weight / WHOLE, entry.shares.get(region, 1.0), entry.seen_weights.get(region))
        for region, weight in sorted(weights.items())
    )
    return EntryRow(entry, regions, revisions[:REVISIONS_SHOWN])


def ingress_rows(ingresses: Sequence[Ingress], now: datetime) -> list[IngressRow]:
    published = _latest_revisions()
    return [_ingress_row(ingress, published.get(ingress.region_id, 0), now) for ingress in ingresses]


def _table_rows(tables: Sequence[RoutingTable], now: datetime) -> list[TableRow]:
    published = _latest_revisions()
    return [_table_row(table, published) for table in tables]


def _latest_revisions() -> dict[str, int]:
    rows = RoutingTable.objects.order_by().values("region_id").annotate(newest=Max("revision"))
    return {row["region_id"]: row["newest"] for row in rows}


def _ingress_row(ingress: Ingress, published: int, now: datetime) -> IngressRow:
    report: IngressReport | None = getattr(ingress, "report", None)
    return IngressRow(
        ingress=ingress,
        report=report,
        published=published,
        following=_following_state(report, published, now),
        cells=tuple(sorted(report.cells.items())) if report else (),
        shared=shared_cells(report.telemetry.get("cells")) if report else (),
    )


def shared_cells(traffic: object) -> tuple[SharedCell, ...]:
    """Returns the cells of a stored report whose limit and weight follow from a reported load, without those that have
    another shape."""
    try:
        counted = msgspec.convert(traffic or {}, dict[str, CellTraffic])
    except msgspec.ValidationError:
        return ()
    return tuple(
        SharedCell(cell, one.in_flight, one.max_connections, one.weight, one.why)
        for cell, one in sorted(counted.items())
        if one.why
    )


def _following_state(report: IngressReport | None, published: int, now: datetime) -> Following:
    if report is None or report.last_seen_at is None:
        return Following.NEVER_REPORTED
    if not report.connected or (now - report.last_seen_at).total_seconds() > FRESH_FOR_S:
        return Following.SILENT
    return Following.CURRENT if report.revision >= published else Following.BEHIND


def _table_row(table: RoutingTable, published: dict[str, int]) -> TableRow:
    names, cells, draining = (getattr(table, name, None) for name in ("pool_names", "cell_count", "drain_count"))
    pools = ", ".join(map(str, names or ()))
    return TableRow(table, pools, cells or 0, draining or 0, newest=published.get(table.region_id) == table.revision)


def _in_body(select: str, path: str, output: "Field[Any, Any]") -> Func:
    """A figure of the body by PostgreSQL: a body has hundreds of cells. JSON paths never fail on odd bodies."""
    template = f"(SELECT {select} FROM jsonb_path_query(%(expressions)s, '{path}') AS found)"  # noqa: S608 - constants
    return Func(F("body"), template=template, output_field=output)


def _tables(request: PageRequest) -> "QuerySet[RoutingTable]":
    return RoutingTable.objects.defer("body").annotate(
        pool_names=_in_body("jsonb_agg(found)", "$.pools[*].name", JSONField()),
        cell_count=_in_body("sum(found::int)", "$.pools[*].cells.size()", IntegerField()),
        drain_count=_in_body("count(*)", "$.pools[*].cells[*].drain ? (@ == true)", IntegerField()),
    )


# Certificates that ingresses present to applications, earliest expiry first.


class CertificateState(StrEnum):
    GOOD = "good"
    ENDS_SOON = "ends soon"
    ENDS_NOW = "ends today"
    ENDED = "ended"


STATE_OF = {None: CertificateState.GOOD, ENDS_SOON: CertificateState.ENDS_SOON, ENDS_NOW: CertificateState.ENDS_NOW}
TONE_OF = {
    CertificateState.GOOD: Tone.OK,
    CertificateState.ENDS_SOON: Tone.WARN,
    CertificateState.ENDS_NOW: Tone.BAD,
    CertificateState.ENDED: Tone.BAD,
}


@dataclass(frozen=True, slots=True)
class CertificateRow:
    certificate: ApplicationCertificate
    state: CertificateState

    @property
    def tone(self) -> Tone:
        return TONE_OF[self.state]


def _certificates(request: PageRequest) -> "QuerySet[ApplicationCertificate]":
    """All for operators, none for viewers."""
    rows = ApplicationCertificate.objects.defer("chain", "sealed_secret")
    return rows if request.caller.access.operate else rows.none()


def _certificate_state(not_after: datetime, now: datetime) -> CertificateState:
    return CertificateState.ENDED if not_after <= now else STATE_OF[ending(not_after, now)]


def _reported(name: str) -> Callable[[IngressRow], object]:
    return lambda row: getattr(row.report, name, None)


IN_FORCE = "Revision of the routing table that the ingress runs"
INGRESS_LIST: List[IngressRow] = List(
    name="ingresses",
    prefix="ingresses-",
    columns=(
        Column("ingress", "Ingress", lambda row: row.ingress.pk),
        Column("state", "State", lambda row: row.following, choices=tuple(Following)),
        Column("region", "Region", lambda row: row.ingress.region_id, css="wide"),
        Column("address", "Address", lambda row: f"{row.ingress.address}:{row.ingress.port}", css="wide"),
        Column("revision", "In force", _reported("revision"), css="number", title=IN_FORCE),
        Column("published", "Published", lambda row: row.published, css="number"),
        Column("cells", "Cells up", lambda row: row.cells_up, css="wide number", is_newest_first=True),
        Column("agent", "Agent", _reported("agent_version"), css="wide"),
        Column("seen", "Last report", _reported("last_seen_at"), css="wide number", is_newest_first=True),
    ),
    query=lambda request: Ingress.objects.select_related("region", "report"),
    rows=ingress_rows,
    order=("region__position", "region_id", "id"),
    find=("ingress", "region", "address"),
    by_value=True,
)
TABLE_LIST: List[TableRow] = List(
    name="routing-tables",
    prefix="tables-",
    columns=(
        Column("region", "Region", lambda row: row.table.region_id, ("region_id",)),
        Column("revision", "Revision", lambda row: row.table.revision, ("revision",), "number", is_newest_first=True),
        Column("why", "Why", lambda row: row.table.reason, ("reason",)),
        Column("pools", "Pools", lambda row: row.pools, css="wide"),
        Column("cells", "Cells", lambda row: row.cells, css="wide number"),
        Column("draining", "Draining", lambda row: row.draining, css="wide number"),
        Column("at", "Published", lambda row: row.table.created_at, ("created_at",), "number", is_newest_first=True),
    ),
    query=_tables,
    rows=_table_rows,
    order=("-created_at", "-id"),
    find=("region__name", "reason"),
)
CERTIFICATE_LIST: List[CertificateRow] = List(
    name="certificates",
    prefix="certificates-",
    columns=(
        Column("certificate", "Certificate", lambda row: row.certificate.name),
        Column("state", "State", lambda row: row.state, choices=tuple(CertificateState)),
        Column("region", "Region", lambda row: row.certificate.region_id or "all regions"),
        Column("hosts", "Hosts", lambda row: ", ".join(row.certificate.names), css="wide"),
        Column("issuer", "Issuer", lambda row: row.certificate.issuer, css="wide"),
        Column("ends", "Ends", lambda row: row.certificate.not_after, css="number"),
    ),
    query=_certificates,
    rows=lambda rows, now: [CertificateRow(row, _certificate_state(row.not_after, now)) for row in rows],
    order=("not_after", "name"),
    find=("certificate", "region", "hosts", "issuer"),
    by_value=True,
)
