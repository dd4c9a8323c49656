"""Keeps what node agents report and tells them their desired state."""

from datetime import datetime

import msgspec

from controlplane.kernel import clock
from engine_agent.protocol.messages import DownMessage, Fault, Report, UpMessage
from fleet.consumers.hub import AgentConnection
from fleet.selectors.desired import desired_for, desired_versions
from fleet.services.reports import NodeRow, fault_record, node_introduced, reports_store

News = tuple[str, str | None, int, str, bool]


class NodeDesk:
    """The desk for agents of kind `node`."""

    def __init__(self) -> None:
        self._rows: dict[str, NodeRow] = {}
        self._known: dict[str, NodeRow] = {}
        self._faults: list[tuple[str, Fault, datetime]] = []
        self._last: dict[str, News] = {}
        self._since: dict[str, datetime] = {}

    def introduced(self, connection: AgentConnection) -> None:
        hello = connection.hello
        node_introduced(node=hello.id, topology=hello.topology, fingerprint=hello.fingerprint)
        self._since[connection.key] = clock.now()

    def heard(self, connection: AgentConnection, message: UpMessage) -> bool:
        node = connection.identity.id
        if isinstance(message, Fault):
            self._faults.append((node, message, clock.now()))
            return True
        if not isinstance(message, Report):
            return False
        self._known[node] = self._rows[node] = _row(connection, message, self._since[connection.key])
        seen, healthy = message.observed, message.health is None or message.health.ok
        news = (seen.state, seen.cell, seen.generation, seen.reason, healthy)
        is_news = self._last.get(connection.key) != news
        self._last[connection.key] = news
        return is_news

    def left(self, connection: AgentConnection) -> None:
        self._last.pop(connection.key, None)
        self._since.pop(connection.key, None)
        known = self._known.get(connection.identity.id)
        if known is not None and known.connection == connection.key:  # else a newer connection has spoken, or none
            del self._known[known.node]
            self._rows[known.node] = msgspec.structs.replace(known, connected=False, changed_at=clock.now())

    def flush(self) -> None:
        rows, self._rows = self._rows, {}
        faults, self._faults = self._faults, []
        try:
            reports_store(list(rows.values()))
        except Exception:
            self._rows = rows | self._rows  # newer ones win; the next flush tries again
            self._faults = faults + self._faults
            raise
        for node, fault, at in faults:
            fault_record(node=node, signature=fault.signature, summary=fault.summary, evidence=fault.evidence, now=at)

    def to_tell(self, told: dict[str, int]) -> dict[str, tuple[int, DownMessage]]:
        versions = desired_versions(told)
        stale = [node for node, version in versions.items() if version != told[node]]
        return {node: (desired.version, desired) for node, desired in desired_for(stale).items()} if stale else {}


def _row(connection: AgentConnection, report: Report, since: datetime) -> NodeRow:
    seen = report.observed
    return NodeRow(
        node=connection.identity.id,
        connection=connection.key,
        connected=True,
        changed_at=since,
        seen_at=clock.now(),
        boot_id=connection.hello.boot_id,
        agent_version=connection.hello.agent_version,
        state=seen.state,
        cell=seen.cell or "",
        generation=seen.generation,
        rank=seen.rank,
        reason=seen.reason,
        engine_pid=seen.engine_pid,
        healthy=report.health is None or report.health.ok,
        health=report.health,
        load=report.load,
        telemetry=report.telemetry,
    )
