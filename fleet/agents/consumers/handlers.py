"""Keeps the latest report of every node and machine agent until it is stored, and sends agents their desired state and
orders. Messages arrive on the event loop, reports are stored in a thread, and both exchange data under one lock."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import datetime
from itertools import islice
from typing import Generic, Protocol, TypeVar

import msgspec

from engine_agent.protocol.codec import FAULT_BYTES_MAX, BadMessage, encode_unbounded
from engine_agent.protocol.machine_messages import MachineReport
from engine_agent.protocol.messages import DownMessage, Fault, Heartbeat, Hello, LogTail, Report, UpMessage
from engine_agent.protocol.request_messages import RequestWindow
from fleet.agents.consumers.hub import AgentSession
from fleet.agents.consumers.limits import TokenBucket
from fleet.machines.selectors import machine_orders
from fleet.machines.services.reports import ReceivedMachineReport, machine_hellos_store, machine_reports_store
from fleet.nodes.selectors import DesiredVersions, desired_for
from fleet.nodes.services.reports import ReceivedReport, fault_record, hellos_store, node_logs_store, reports_store
from fleet.requests.services import request_windows_store
from kernel import clock
from kernel.metrics import FAULTS_DROPPED
from kernel.refusals import Conflict
from kernel.sanitize import UNSTORABLE_ERRORS

BATCH = 1000
"""Reports stored together: a tenth of a second of PostgreSQL. Reports that arrive meanwhile replace waiting ones."""


class AgentReport(Protocol):
    @property
    def connection(self) -> str: ...


R = TypeVar("R", bound=AgentReport)


class ReportBuffer(Generic[R]):
    """Reports by agent ID; a newer one replaces one that is not stored yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[str, R] = {}
        self._latest: dict[str, R] = {}

    def put(self, agent: str, report: R) -> R | None:
        """Adds a report. Returns the previous one of the agent's open connection, if any."""
        with self._lock:
            previous = self._latest.get(agent)
            self._latest[agent] = self._pending[agent] = report
        return previous

    @property
    def is_waiting(self) -> bool:
        return bool(self._pending)

    def latest(self, agent: str) -> R | None:
        """Returns the last report of the agent's open connection."""
        with self._lock:
            return self._latest.get(agent)

    def end(self, agent: str, connection: str, final: Callable[[R], R]) -> None:
        """A connection ended: stores its last report, changed by `final`, unless the agent has reported on a newer
        connection or never reported on this one."""
        with self._lock:
            latest = self._latest.get(agent)
            if latest is not None and latest.connection == connection:
                del self._latest[agent]
                self._pending[agent] = final(latest)

    def take(self, most: int = BATCH) -> dict[str, R]:
        """Returns the pending reports of up to `most` agents, longest waiting first. They count as stored unless
        restored."""
        with self._lock:
            reports = dict(islice(self._pending.items(), most))
            for agent in reports:
                del self._pending[agent]
        return reports

    def restore(self, reports: dict[str, R]) -> None:
        """Keeps reports that could not be stored for the next flush. Newer reports win."""
        with self._lock:
            self._pending = {**reports, **self._pending}

    def flush(self, store: Callable[[list[R]], object]) -> None:
        """Stores the pending reports in batches; those that cannot be stored stay pending."""
        left = len(self._pending)
        while left > 0 and (reports := self.take(min(BATCH, left))):
            left -= len(reports)
            try:
                store(list(reports.values()))
            except Exception:
                self.restore(reports)
                raise


FAULTS_KEPT = 1000
"""While PostgreSQL is unavailable; then the oldest are dropped. At most 32 MiB."""
FAULTS_PER_S = 0.5
FAULTS_BURST = 30.0
"""Of one node. Simultaneous faults of all devices stay below; further ones add no information."""

WINDOWS_KEPT = 1000
"""At 60 KB at most."""
WINDOWS_PER_S, WINDOWS_BURST = 0.1, 8.0
"""Of one agent, which closes a window every 30 s. The burst is what waits during a reconnection."""

LOGS_KEPT = 200
"""Nodes with log lines waiting to be written; further ones are dropped."""

log = logging.getLogger(__name__)


class WindowBuffer:
    """Windows of samples that wait to be stored, at most so many of one agent and in all. Further ones are dropped."""

    def __init__(self) -> None:
        self._windows: deque[tuple[AgentSession, RequestWindow]] = deque()
        self._budgets: dict[str, TokenBucket] = {}

    def put(self, session: AgentSession, window: RequestWindow) -> None:
        now_s = clock.now().timestamp()
        budget = self._budgets.setdefault(
            session.identity.id, TokenBucket(per_s=WINDOWS_PER_S, burst=WINDOWS_BURST, now=now_s)
        )
        if len(self._windows) < WINDOWS_KEPT and budget.take(now_s):
            self._windows.append((session, window))

    @property
    def is_waiting(self) -> bool:
        return bool(self._windows)

    def take(self) -> list[tuple[AgentSession, RequestWindow]]:
        return [self._windows.popleft() for _ in range(len(self._windows))]


class NodeHandler:
    def __init__(self) -> None:
        self._reports: ReportBuffer[ReceivedReport] = ReportBuffer()
        self._faults: deque[tuple[str, Fault, datetime]] = deque(maxlen=FAULTS_KEPT)
        self._logs: dict[str, LogTail] = {}
        self._fault_budgets: dict[str, TokenBucket] = {}
        self._windows = WindowBuffer()
        self._versions = DesiredVersions()

    def on_hellos(self, hellos: Sequence[Hello]) -> dict[str, Conflict]:
        return hellos_store(hellos)

    def on_message(self, session: AgentSession, message: UpMessage) -> bool:
        node = session.identity.id
        if isinstance(message, Fault):
            return self._take_fault(node, message)
        if isinstance(message, LogTail):
            if len(self._logs) < LOGS_KEPT or node in self._logs:
                self._logs[node] = message
            return True
        if isinstance(message, RequestWindow):
            self._windows.put(session, message)
            return False
        if isinstance(message, Heartbeat):
            return self._take_heartbeat(session, message)
        if not isinstance(message, Report):
            return False
        received = _received_report(session, message)
        previous = self._reports.put(node, received)
        session.expect_heartbeat(encode_unbounded(Heartbeat(message.seq)))
        return previous is None or _urgent_part(previous) != _urgent_part(received)

    def _take_heartbeat(self, session: AgentSession, heartbeat: Heartbeat) -> bool:
        """Stores nothing while the agent sends regularly. Raises BadMessage if its last report was another one; it then
        connects again and reports everything."""
        latest = self._reports.latest(session.identity.id)
        seq = latest.report.seq if latest is not None and latest.connection == session.key else 0
        if latest is None or heartbeat.seq != seq:
            raise BadMessage(f"a heartbeat for report {heartbeat.seq}, and the last one was {seq}")
        if latest.quiet:
            heard = msgspec.structs.replace(latest, quiet=False, last_seen_at=clock.now())
            self._reports.put(session.identity.id, heard)
        return latest.quiet

    def on_quiet(self, session: AgentSession, heard_at: datetime) -> None:
        latest = self._reports.latest(session.identity.id)
        if latest is not None and latest.connection == session.key:
            quiet = msgspec.structs.replace(latest, quiet=True, last_seen_at=heard_at)
            self._reports.put(session.identity.id, quiet)

    def _take_fault(self, node: str, fault: Fault) -> bool:
        """Keeps evidence within the limits of the protocol and the node; the rest is dropped and counted."""
        now = clock.now()
        budget = self._fault_budgets.setdefault(
            node, TokenBucket(per_s=FAULTS_PER_S, burst=FAULTS_BURST, now=now.timestamp())
        )
        reason = ""
        if len(encode_unbounded(fault)) > FAULT_BYTES_MAX:
            reason = "size"
        elif not budget.take(now.timestamp()):
            reason = "rate"
        if reason:
            FAULTS_DROPPED.labels(reason).inc()
            log.warning("dropped a fault from %s: over the limit of %s", node, reason)
            return False
        self._faults.append((node, fault, now))
        return True

    def on_disconnect(self, session: AgentSession) -> None:
        self._reports.end(session.identity.id, session.key, _disconnected_report)

    @property
    def is_waiting(self) -> bool:
        return bool(self._reports.is_waiting or self._faults or self._logs or self._windows.is_waiting)

    def flush(self) -> None:
        self._reports.flush(reports_store)
        while self._faults:
            self._write_fault(*self._faults.popleft())
        self._write_logs()
        self._write_windows()

    def _write_windows(self) -> None:
        """Samples that cannot be written are dropped: newer ones follow."""
        if windows := [(session.identity.id, window) for session, window in self._windows.take()]:
            request_windows_store(windows=windows, now=clock.now())

    def _write_logs(self) -> None:
        """Lines that cannot be written are dropped: the agent sends them again."""
        tails: dict[str, LogTail] = {}
        if not self._logs:
            return
        while self._logs:
            node, tail = self._logs.popitem()
            tails[node] = tail
        try:
            node_logs_store(tails=tails, now=clock.now())
        except UNSTORABLE_ERRORS as error:
            log.warning("dropped the logs from %s: %s", ", ".join(tails), error)

    def _write_fault(self, node: str, fault: Fault, at: datetime) -> None:
        try:
            fault_record(node=node, signature=fault.signature, summary=fault.summary, evidence=fault.evidence, now=at)
        except UNSTORABLE_ERRORS as error:
            log.warning("dropped a fault from %s: %s", node, error)
        except Exception:
            self._faults.appendleft((node, fault, at))
            raise

    def desired_messages(self, sessions: Sequence[AgentSession]) -> dict[str, tuple[int, DownMessage]]:
        newer = self._versions.newer((session.identity.id, session.sent_version) for session in sessions)
        return {node: (desired.version, desired) for node, desired in desired_for(newer).items()} if newer else {}


def _urgent_part(received: ReceivedReport) -> tuple[object, ...]:
    """A change of these values is stored immediately."""
    return received.connection, received.report.observed, received.healthy, received.quiet


def _disconnected_report(received: ReceivedReport) -> ReceivedReport:
    return msgspec.structs.replace(received, connected=False, connection_changed_at=clock.now())


def _received_report(session: AgentSession, report: Report) -> ReceivedReport:
    return ReceivedReport(
        node_id=session.identity.id,
        connection=session.key,
        listener=session.listener,
        connected=True,
        connection_changed_at=session.since,
        last_seen_at=clock.now(),
        boot_id=session.hello.boot_id,
        agent_version=session.hello.agent_version,
        report=report,
    )


# Machine agents.


class MachineHandler:
    def __init__(self) -> None:
        self._reports: ReportBuffer[ReceivedMachineReport] = ReportBuffer()

    def on_hellos(self, hellos: Sequence[Hello]) -> dict[str, Conflict]:
        return machine_hellos_store(hellos, now=clock.now())

    def on_message(self, session: AgentSession, message: UpMessage) -> bool:
        if not isinstance(message, MachineReport):
            return False
        received = ReceivedMachineReport(session.identity.id, session.key, True, clock.now(), message)
        previous = self._reports.put(session.identity.id, received)
        return previous is None or _urgent_machine_part(previous) != _urgent_machine_part(received)

    def on_quiet(self, session: AgentSession, heard_at: datetime) -> None:
        """Machine agents report every 30 s; their silence follows from the stored time."""

    def on_disconnect(self, session: AgentSession) -> None:
        self._reports.end(session.identity.id, session.key, _machine_disconnected)

    @property
    def is_waiting(self) -> bool:
        return self._reports.is_waiting

    def flush(self) -> None:
        self._reports.flush(machine_reports_store)

    def desired_messages(self, sessions: Sequence[AgentSession]) -> dict[str, tuple[int, DownMessage]]:
        orders = machine_orders({session.identity.id: session.sent_version for session in sessions})
        return {machine: (order.version, order) for machine, order in orders.items()}


def _urgent_machine_part(received: ReceivedMachineReport) -> tuple[object, ...]:
    report = received.report
    reboots = report.may_reboot, report.rebooted, report.reboot_trouble
    return (
        received.connection,
        report.version,
        report.phase,
        report.runs,
        report.reason,
        report.release_trouble,
        reboots,
        report.notices,
    )


def _machine_disconnected(received: ReceivedMachineReport) -> ReceivedMachineReport:
    return msgspec.structs.replace(received, connected=False, at=received.at)
