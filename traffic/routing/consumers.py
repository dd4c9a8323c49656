"""WebSocket handler for ingress agents: stores their reports and sends them their region's routing table and
certificates. It decides nothing."""

import logging
from collections.abc import Mapping, Sequence
from datetime import datetime

import msgspec

from engine_agent.protocol.ingress_messages import IngressReport
from engine_agent.protocol.messages import DownMessage, Hello, UpMessage
from engine_agent.protocol.request_messages import RequestWindow
from fleet.agents.consumers.handlers import ReportBuffer, WindowBuffer
from fleet.agents.consumers.hub import AgentSession
from fleet.regions.selectors import application_tls, tls_versions
from kernel import clock
from kernel.refusals import Conflict
from kernel.row_cache import FullLooks, WrittenTables
from traffic.keys.services import refused_requests_store
from traffic.region_shares.planning.load import has_requests, pools_waiting
from traffic.routing.models import Ingress
from traffic.routing.selectors import (
    PROTOCOL,
    UnreadableTable,
    latest_revisions,
    latest_tables,
    table_for_ingresses,
)
from traffic.routing.services.ingresses import IngressRow, ingress_reports_store

log = logging.getLogger(__name__)

_TLS, _TABLES = ("fleet_applicationcertificate", "fleet_region"), ("traffic_routingtable",)
_READ = (*_TLS, *_TABLES)


class IngressHandler:
    def __init__(self) -> None:
        self._reports: ReportBuffer[IngressRow] = ReportBuffer()
        self._busy: set[str] = set()
        """Ingresses that had requests in their last report."""
        self._looks, self._written = FullLooks(), WrittenTables(_READ)
        self._newest: dict[str, int] = {}
        self._windows = WindowBuffer()

    def on_hellos(self, hellos: Sequence[Hello]) -> dict[str, Conflict]:
        """Returns a conflict for each agent whose ingress has no row."""
        known = set(Ingress.objects.filter(id__in=[hello.id for hello in hellos]).values_list("id", flat=True))
        return {hello.id: Conflict(f"{hello.id} is not an ingress") for hello in hellos if hello.id not in known}

    def on_message(self, session: AgentSession, message: UpMessage) -> bool:
        if isinstance(message, RequestWindow):
            self._windows.put(session, message)
        if not isinstance(message, IngressReport):
            return False
        row = _report_row(session, message)
        previous = self._reports.latest(session.identity.id)
        row = msgspec.structs.replace(row, begins=self._note_requests(previous, row))
        self._reports.put(session.identity.id, row)
        return row.begins or previous is None or _urgent_part(previous) != _urgent_part(row)

    def _note_requests(self, previous: IngressRow | None, row: IngressRow) -> bool:
        """Returns whether these are the first requests after a report without any."""
        if not has_requests(previous.telemetry if previous else {}, row.telemetry):
            self._busy.discard(row.ingress)
            return False
        is_first = row.ingress not in self._busy
        self._busy.add(row.ingress)
        return is_first

    def on_quiet(self, session: AgentSession, heard_at: datetime) -> None:
        """Ingresses send complete reports, so their silence follows from the stored time."""

    def on_disconnect(self, session: AgentSession) -> None:
        self._reports.end(session.identity.id, session.key, _disconnected_row)

    @property
    def is_waiting(self) -> bool:
        return self._reports.is_waiting or self._windows.is_waiting

    def flush(self) -> None:
        self._reports.flush(ingress_reports_store)
        if windows := self._windows.take():
            refused_requests_store(
                windows=[(session.identity.id, session.identity.region, window) for session, window in windows],
                now=clock.now(),
            )

    def desired_messages(self, sessions: Sequence[AgentSession]) -> dict[str, tuple[int, DownMessage]]:
        if self._looks.begin():
            self._written = WrittenTables(_READ)
        self._written.look()
        versions = self._written.get("tls", _TLS, tls_versions)
        self._newest = self._written.get("tables", _TABLES, latest_revisions)
        self._looks.end()
        first = _tls_messages(sessions, versions)
        return {**first, **self._table_messages([session for session in sessions if session.identity.id not in first])}

    def _table_messages(self, sessions: Sequence[AgentSession]) -> dict[str, tuple[int, DownMessage]]:
        regions = {
            session.identity.id: session.identity.region
            for session in sessions
            if self._newest.get(session.identity.region, session.sent_version) != session.sent_version
        }
        if not regions:
            return {}
        tables = latest_tables()
        messages: dict[str, tuple[int, DownMessage]] = {}
        for ingress, region in regions.items():
            try:
                messages[ingress] = (tables[region].revision, table_for_ingresses(tables[region]))
            except UnreadableTable as error:  # it keeps its last table; the other ingresses still get theirs
                log.error("ingress %s gets no table: %s", ingress, error)
        return messages


def _tls_messages(sessions: Sequence[AgentSession], versions: Mapping[str, str]) -> dict[str, tuple[int, DownMessage]]:
    """Returns TLS settings for the ingresses that lack the current version. They precede the table, because an ingress
    must know whether to serve plain HTTP before it serves anything."""
    messages = dict[str, tuple[int, DownMessage]]()
    for session in sessions:
        identity, version = session.identity, versions.get(session.identity.region, "")
        if session.tls_version == version or not version:
            continue
        tls = application_tls(identity.region, version)
        if sealed := [each.name for each in tls.certificates if not each.pem]:
            what = (
                "%s keeps its copies of %s, because the stored keys were encrypted with another SWITCHYARD_SECRET_KEY"
            )
            log.error(
                f"{what}: restore that secret key, or upload the certificates again", identity.id, ", ".join(sealed)
            )
        messages[identity.id] = (session.sent_version, tls)
        session.tls_version = version
    return messages


def _urgent_part(row: IngressRow) -> tuple[object, ...]:
    """Reports are buffered, but a change of these fields is written immediately."""
    return row.connection, row.revision, row.cells, pools_waiting(row.telemetry)


def _disconnected_row(row: IngressRow) -> IngressRow:
    return msgspec.structs.replace(row, connected=False, changed_at=clock.now())


def _report_row(session: AgentSession, report: IngressReport) -> IngressRow:
    observed = report.observed
    return IngressRow(
        ingress=session.identity.id,
        connection=session.key,
        connected=True,
        changed_at=session.since,
        seen_at=clock.now(),
        agent_version=session.hello.agent_version,
        revision=observed.revision,
        haproxy_pid=observed.haproxy_pid,
        reason=observed.reason,
        cells=observed.cells,
        telemetry={
            **msgspec.to_builtins(report.telemetry),
            "cells": msgspec.to_builtins(report.cells),
            "changes": msgspec.to_builtins(report.changes),
            PROTOCOL: session.hello.protocol,
        },
    )
