"""Keeps what ingress agents report and tells them their region's routing table."""

from collections.abc import Sequence

import msgspec

from engine_agent.protocol.messages import DownMessage, IngressReport, UpMessage
from fleet.consumers.hub import AgentConnection
from fleet.consumers.latest import LatestRows
from kernel import clock
from traffic.selectors.routing import latest_revisions, latest_tables, told_table
from traffic.services.reports import IngressRow, ingress_reports_store


class IngressDesk:
    """The desk for agents of kind `ingress`."""

    def __init__(self) -> None:
        self._reports: LatestRows[IngressRow] = LatestRows()

    def introduced(self, connection: AgentConnection) -> None:
        """Its hello says nothing that is kept."""

    def heard(self, connection: AgentConnection, message: UpMessage) -> bool:
        if not isinstance(message, IngressReport):
            return False
        row = _row(connection, message)
        before = self._reports.note(connection.identity.id, row)
        return before is None or _gist(before) != _gist(row)

    def left(self, connection: AgentConnection) -> None:
        self._reports.end(connection.identity.id, connection.key, _disconnected)

    def flush(self) -> None:
        self._reports.write(ingress_reports_store)

    def to_tell(self, connections: Sequence[AgentConnection]) -> dict[str, tuple[int, DownMessage]]:
        newest = latest_revisions()
        regions = {
            connection.identity.id: connection.identity.region
            for connection in connections
            if newest.get(connection.identity.region, connection.told) != connection.told
        }
        if not regions:
            return {}
        tables = latest_tables()
        return {ingress: (tables[region].revision, told_table(tables[region])) for ingress, region in regions.items()}


def _gist(row: IngressRow) -> tuple[object, ...]:
    """What somebody may want to act upon at once."""
    return row.connection, row.revision, row.cells


def _disconnected(row: IngressRow) -> IngressRow:
    return msgspec.structs.replace(row, connected=False, changed_at=clock.now())


def _row(connection: AgentConnection, report: IngressReport) -> IngressRow:
    seen = report.observed
    return IngressRow(
        ingress=connection.identity.id,
        connection=connection.key,
        connected=True,
        changed_at=connection.since,
        seen_at=clock.now(),
        revision=seen.revision,
        haproxy_pid=seen.haproxy_pid,
        reason=seen.reason,
        cells=seen.cells,
        telemetry={
            **report.telemetry,
            "cells": msgspec.to_builtins(report.cells),
            "changes": msgspec.to_builtins(report.changes),
        },
    )
