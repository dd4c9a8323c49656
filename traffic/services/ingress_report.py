"""Stores what ingress agents report. Ingresses are few, so the ORM is fast enough here."""

import logging
from datetime import datetime
from typing import Any

import msgspec
from django.db import transaction

from engine_agent.protocol.machine_messages import VERSION_MOST
from fleet.services.autoscaling import AUTOSCALE_TASK
from fleet.services.fault_evidence import cell_sightings_store
from fleet.services.refusals import refusals_store
from kernel import live, wake_ups
from kernel.sanitize import UNSTORABLE_ERRORS, json_without_nul
from traffic.models import Ingress, IngressReport, RoutingTable
from traffic.planning.load_window import pools_waiting
from traffic.selectors.routing import UnreadableTable, table_message

DOWN = "down"

log = logging.getLogger(__name__)


class IngressRow(msgspec.Struct, frozen=True):
    """The latest report of one ingress agent."""

    ingress: str
    connection: str
    connected: bool
    changed_at: datetime
    seen_at: datetime
    agent_version: str = ""
    revision: int = 0
    haproxy_pid: int | None = None
    reason: str = ""
    cells: Any = {}
    telemetry: Any = {}


def ingress_reports_store(rows: list[IngressRow]) -> None:
    """Write the rows. A row that ends a connection counts only for that connection.

    A row that PostgreSQL refuses is dropped, and its ingress is logged: it costs the others nothing.
    """
    for row in rows:
        try:
            with transaction.atomic():
                _store(msgspec.json.decode(json_without_nul(msgspec.json.encode(row)), type=IngressRow))
        except UNSTORABLE_ERRORS as refusal:
            log.warning("dropped what %s reported: %s", row.ingress, refusal)


def _store(row: IngressRow) -> None:
    reports = IngressReport.objects.filter(ingress_id=row.ingress)
    if not row.connected:
        ended = reports.filter(connection=row.connection, connected=True)
        changed = ended.update(connected=False, connection_changed_at=row.changed_at) > 0
    elif region := Ingress.objects.filter(id=row.ingress).values_list("region_id", flat=True).first():
        before = reports.values("connected", "revision", "cells").first()
        IngressReport.objects.update_or_create(ingress_id=row.ingress, defaults=_columns(row))
        cell_sightings_store(witness=row.ingress, down=_down(row), now=row.seen_at)
        refusals_store(ingress=row.ingress, region=region, refusals=row.telemetry.get("refusals"), now=row.seen_at)
        changed = before != {"connected": True, "revision": row.revision, "cells": row.cells}
    else:
        return
    if pools_waiting(row.telemetry):
        wake_ups.send("traffic.autopilot")
        wake_ups.send(AUTOSCALE_TASK)
    if changed:
        live.push("traffic")
        wake_ups.send("traffic.publish")
        wake_ups.send("traffic.autopilot")


def _down(row: IngressRow) -> dict[str, int]:
    """Cells that the ingress routes to and cannot reach, with the generation that its table speaks of."""
    down = {cell for cell, state in row.cells.items() if state == DOWN}
    if not down:
        return {}
    table = RoutingTable.objects.filter(region__ingresses=row.ingress, revision=row.revision).first()
    try:
        pools = table_message(table).pools if table else ()
    except UnreadableTable:
        return {}
    return {cell.cell: cell.generation for pool in pools for cell in pool.cells if cell.cell in down and not cell.drain}


def _columns(row: IngressRow) -> dict[str, Any]:
    return {
        "connection": row.connection,
        "connected": True,
        "connection_changed_at": row.changed_at,
        "last_seen_at": row.seen_at,
        "agent_version": row.agent_version[:VERSION_MOST],
        "revision": row.revision,
        "haproxy_pid": row.haproxy_pid,
        "reason": row.reason,
        "cells": row.cells,
        "telemetry": row.telemetry,
    }
