"""Keeps what node agents report and tells them their desired state."""

import logging
from collections import deque
from collections.abc import Sequence
from datetime import datetime

import msgspec

from engine_agent.protocol.messages import DownMessage, Fault, LogTail, Report, UpMessage
from fleet.consumers.hub import AgentConnection
from fleet.consumers.latest import LatestRows
from fleet.selectors.desired import desired_for, desired_versions
from fleet.services.node_log import node_logs_store
from fleet.services.reports import NodeRow, fault_record, node_introduced, reports_store
from kernel import clock
from kernel.storable import UNSTORABLE

FAULTS_KEPT = 1000
"""While PostgreSQL is away; then the oldest evidence goes. At most 256 MiB, at the limit of a frame each."""

LOGS_KEPT = 200
"""Nodes whose lines wait to be written; more are not read at once."""

log = logging.getLogger(__name__)


class NodeDesk:
    """The desk for agents of kind `node`."""

    def __init__(self) -> None:
        self._reports: LatestRows[NodeRow] = LatestRows()
        self._faults: deque[tuple[str, Fault, datetime]] = deque(maxlen=FAULTS_KEPT)
        self._logs: dict[str, LogTail] = {}

    def introduced(self, connection: AgentConnection) -> None:
        hello = connection.hello
        node_introduced(
            node=hello.id,
            topology=hello.topology,
            fingerprint=hello.fingerprint,
            accelerators=hello.inventory.accelerators if hello.inventory else (),
        )

    def heard(self, connection: AgentConnection, message: UpMessage) -> bool:
        node = connection.identity.id
        if isinstance(message, Fault):
            self._faults.append((node, message, clock.now()))
            return True
        if isinstance(message, LogTail):
            if len(self._logs) < LOGS_KEPT or node in self._logs:
                self._logs[node] = message
            return True
        if not isinstance(message, Report):
            return False
        row = _row(connection, message)
        before = self._reports.note(node, row)
        return before is None or _gist(before) != _gist(row)

    def left(self, connection: AgentConnection) -> None:
        self._reports.end(connection.identity.id, connection.key, _disconnected)

    def flush(self) -> None:
        self._reports.write(reports_store)
        while self._faults:
            self._write_fault(*self._faults.popleft())
        self._write_logs()

    def _write_logs(self) -> None:
        """Lines that cannot be written are dropped: the agent says them again."""
        said: dict[str, LogTail] = {}
        while self._logs:
            node, tail = self._logs.popitem()
            said[node] = tail
        try:
            node_logs_store(said=said, now=clock.now())
        except UNSTORABLE as refusal:
            log.warning("dropped the logs that %s sent: %s", ", ".join(said), refusal)

    def _write_fault(self, node: str, fault: Fault, at: datetime) -> None:
        try:
            fault_record(node=node, signature=fault.signature, summary=fault.summary, evidence=fault.evidence, now=at)
        except UNSTORABLE as refusal:
            log.warning("dropped a fault that %s sent: %s", node, refusal)
        except Exception:
            self._faults.appendleft((node, fault, at))
            raise

    def to_tell(self, connections: Sequence[AgentConnection]) -> dict[str, tuple[int, DownMessage]]:
        told = {connection.identity.id: connection.told for connection in connections}
        versions = desired_versions(told)
        stale = [node for node, version in versions.items() if version != told[node]]
        return {node: (desired.version, desired) for node, desired in desired_for(stale).items()} if stale else {}


def _gist(row: NodeRow) -> tuple[object, ...]:
    """What somebody may want to act upon at once."""
    return row.connection, row.state, row.cell, row.generation, row.reason, row.healthy


def _disconnected(row: NodeRow) -> NodeRow:
    return msgspec.structs.replace(row, connected=False, changed_at=clock.now())


def _row(connection: AgentConnection, report: Report) -> NodeRow:
    seen = report.observed
    return NodeRow(
        node=connection.identity.id,
        connection=connection.key,
        connected=True,
        changed_at=connection.since,
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
        steps=report.steps,
    )
