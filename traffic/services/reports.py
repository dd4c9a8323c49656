"""Stores what ingress agents report. Ingresses are few, so the ORM is fast enough here."""

from datetime import datetime
from typing import Any

import msgspec
from django.db import transaction

from controlplane.kernel import hints, live
from traffic.models import Ingress, IngressReport


class IngressRow(msgspec.Struct, frozen=True):
    """The latest word of one ingress agent."""

    ingress: str
    connection: str
    connected: bool
    changed_at: datetime
    seen_at: datetime
    revision: int = 0
    haproxy_pid: int | None = None
    reason: str = ""
    cells: Any = {}
    telemetry: Any = {}


def ingress_reports_store(rows: list[IngressRow]) -> None:
    """Write the rows. A row that ends a connection counts only for that connection."""
    for row in rows:
        with transaction.atomic():
            if not row.connected:
                IngressReport.objects.filter(ingress_id=row.ingress, connection=row.connection).update(
                    connected=False, connection_changed_at=row.changed_at
                )
            elif Ingress.objects.filter(id=row.ingress).exists():
                before = IngressReport.objects.filter(ingress_id=row.ingress).values("revision", "cells").first()
                IngressReport.objects.update_or_create(ingress_id=row.ingress, defaults=_columns(row))
                if before != {"revision": row.revision, "cells": row.cells}:
                    live.push("traffic")
                    hints.ring("traffic.publish")


def _columns(row: IngressRow) -> dict[str, Any]:
    return {
        "connection": row.connection,
        "connected": True,
        "connection_changed_at": row.changed_at,
        "last_seen_at": row.seen_at,
        "revision": row.revision,
        "haproxy_pid": row.haproxy_pid,
        "reason": row.reason,
        "cells": row.cells,
        "telemetry": row.telemetry,
    }
