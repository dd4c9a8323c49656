"""Keeps what ingress agents report and tells them their region's routing table."""

from datetime import datetime

import msgspec

from controlplane.kernel import clock
from engine_agent.protocol.messages import DownMessage, IngressReport, UpMessage
from fleet.consumers.hub import AgentConnection
from traffic.selectors.routing import latest_revisions, latest_tables, table_message
from traffic.services.reports import IngressRow, ingress_reports_store


class IngressDesk:
    """The desk for agents of kind `ingress`."""

    def __init__(self) -> None:
        self._rows: dict[str, IngressRow] = {}
        self._known: dict[str, IngressRow] = {}
        self._since: dict[str, datetime] = {}
        self._region: dict[str, str] = {}

    def introduced(self, connection: AgentConnection) -> None:
        self._since[connection.key] = clock.now()
        self._region[connection.identity.id] = connection.identity.region

    def heard(self, connection: AgentConnection, message: UpMessage) -> bool:
        if not isinstance(message, IngressReport):
            return False
        ingress, seen = connection.identity.id, message.observed
        before = self._known.get(ingress)
        row = IngressRow(
            ingress=ingress,
            connection=connection.key,
            connected=True,
            changed_at=self._since[connection.key],
            seen_at=clock.now(),
            revision=seen.revision,
            haproxy_pid=seen.haproxy_pid,
            reason=seen.reason,
            cells=seen.cells,
            telemetry=message.telemetry,
        )
        self._known[ingress] = self._rows[ingress] = row
        return before is None or (before.revision, before.cells) != (row.revision, row.cells)

    def left(self, connection: AgentConnection) -> None:
        self._since.pop(connection.key, None)
        known = self._known.get(connection.identity.id)
        if known is not None and known.connection == connection.key:
            del self._known[known.ingress]
            self._rows[known.ingress] = msgspec.structs.replace(known, connected=False, changed_at=clock.now())

    def flush(self) -> None:
        rows, self._rows = self._rows, {}
        try:
            ingress_reports_store(list(rows.values()))
        except Exception:
            self._rows = rows | self._rows  # newer ones win; the next flush tries again
            raise

    def to_tell(self, told: dict[str, int]) -> dict[str, tuple[int, DownMessage]]:
        newest = latest_revisions()
        regions = {ingress: self._region[ingress] for ingress in told}
        stale = {i: region for i, region in regions.items() if region in newest and newest[region] != told[i]}
        if not stale:
            return {}
        tables = latest_tables()
        return {i: (tables[region].revision, table_message(tables[region])) for i, region in stale.items()}
