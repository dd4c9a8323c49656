"""The control plane's end of the agents' connections: stores their reports and sends them their desired state. While it
is down no report arrives, and the rows do not change."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from engine_agent.protocol.states import EngineState
from fleet.reconcile.planning.snapshot import ReportView
from simulator.context import AgentReport, SimulationContext
from simulator.machine import Machine
from simulator.store import Store

SEND_AFTER_S = 0.05
"""Delay from a change of desired state to its sending: wake-ups are coalesced."""
BREAKS_AFTER_S = (1.0, 5.0)
"""Delay after which a connection that lost a message is closed, and the agent reconnects."""
REFUSED_AFTER_S = 1.0


@dataclass
class Connection:
    """An open connection. `sent_version`: of the last desired state sent on it."""

    id: int
    since: datetime
    sent_version: int = 0
    is_send_due: bool = False


class RepeatedReport(ReportView):
    """A report repeated every two seconds without events: it counts as received at the newest pass."""

    __slots__ = ("_server",)

    def __init__(self, report: ReportView, hub: "AgentServer") -> None:
        for name in ReportView.__slots__:
            if name != "last_seen_at":
                object.__setattr__(self, name, getattr(report, name))
        object.__setattr__(self, "_server", hub)

    @property
    def last_seen_at(self) -> datetime:
        server: AgentServer = self._server  # type: ignore[attr-defined]
        return server.newest_report_at


class AgentServer:
    """All connections to `machines`; `on_change` wakes the reconciler."""

    def __init__(self, store: Store, on_change: Callable[[], None]) -> None:
        self.connections: dict[str, Connection] = {}
        self.machines: dict[str, Machine] = {}
        self.is_up = True
        self.newest_report_at = datetime.min.replace(tzinfo=UTC)
        self._store = store
        self._on_change = on_change
        self._context: SimulationContext | None = None
        store.on_desired = self.desired_changed

    def attach(self, context: SimulationContext) -> None:
        self._context = context
        self.newest_report_at = context.queue.now
        if self._store.listening_since is None:
            self._store.listening_since = context.queue.now

    @property
    def context(self) -> SimulationContext:
        if self._context is None:
            raise RuntimeError("the agent server is not attached to a simulation")
        return self._context

    def crash(self, listening_lapses_s: float = 5.0) -> None:
        """Its process exits: all connections close, and after its lease no process listens."""
        self.is_up = False
        open_connections, self.connections = self.connections, {}
        for node, connection in open_connections.items():
            self._close(node, connection.id)
        self.context.queue.after(listening_lapses_s, self._lease_lapses)

    def recover(self) -> None:
        """Another process accepts connections. It knows nothing of the time between."""
        self.is_up = True
        self._store.listening_since = self.context.queue.now

    def _lease_lapses(self) -> None:
        if not self.is_up:
            self._store.listening_since = None

    # --- from agents -------------------------------------------------------------------------------------------------

    def connected(self, node: str, connection_id: int) -> None:
        """A connection was opened; it replaces an older one of the same agent."""
        if not self.is_up or node not in self._store.nodes:
            self.context.queue.after(REFUSED_AFTER_S, lambda: self._close(node, connection_id))
            return
        self.connections[node] = Connection(connection_id, self.context.queue.now)
        self.desired_changed([node])

    def report_received(self, node: str, report: AgentReport) -> None:
        connection = self.connections.get(node)
        if connection is None or connection.id != report.connection:
            return
        now, known = self.context.queue.now, self._store.nodes.get(node)
        if known is None:
            return
        healthy = report.health is None or report.health.ok
        row = ReportView(
            connected=True,
            last_seen_at=now,
            connection_changed_at=connection.since,
            state=report.observed.state,
            cell=report.observed.cell or "",
            generation=report.observed.generation,
            reason=report.observed.reason,
            unhealthy_since=None if healthy else (known.report.unhealthy_since or now),
            health_reason=report.health.reason if report.health is not None else "",
            in_flight=report.in_flight,
        )
        is_well = healthy and report.observed.state in (EngineState.IDLE, EngineState.READY)
        if self._store.report(node, RepeatedReport(row, self) if is_well and self.context.skip_repeats else row):
            self._on_change()

    def is_known(self, node: str, report: AgentReport) -> bool:
        """Whether this was reported before, will not change without an event, and no desired state waits to be sent."""
        connection, known = self.connections.get(node), self._store.nodes.get(node)
        if connection is None or known is None or not isinstance(known.report, RepeatedReport):
            return False
        row, seen = known.report, report.observed
        same = (row.state, row.cell, row.generation) == (seen.state, seen.cell or "", seen.generation)
        return same and connection.sent_version == self._store.versions[node]

    def disconnected(self, node: str, connection_id: int) -> None:
        connection = self.connections.get(node)
        if connection is None or connection.id != connection_id:
            return
        del self.connections[node]
        known = self._store.nodes.get(node)
        if known is not None:
            now = self.context.queue.now
            report = known.report
            closed = ReportView(
                connected=False,
                last_seen_at=report.last_seen_at,
                connection_changed_at=now,
                state=report.state,
                cell=report.cell,
                generation=report.generation,
                reason=report.reason,
                unhealthy_since=report.unhealthy_since,
                health_reason=report.health_reason,
                in_flight=report.in_flight,
            )
            if self._store.report(node, closed):
                self._on_change()

    # --- to agents ---------------------------------------------------------------------------------------------------

    def desired_changed(self, nodes: Iterable[str]) -> None:
        for node in nodes:
            connection = self.connections.get(node)
            if connection is not None and not connection.is_send_due:
                connection.is_send_due = True
                self.context.queue.after(SEND_AFTER_S, partial(self._send_desired, node, connection))

    def _send_desired(self, node: str, connection: Connection) -> None:
        connection.is_send_due = False
        if self.connections.get(node) is not connection or connection.sent_version == self._store.versions[node]:
            return
        order = self._store.desired(node)
        connection.sent_version = order.version
        machine = self.machines.get(node)

        def deliver() -> None:
            if machine is not None and machine.has_network:
                machine.receive(order)

        if not self.context.network.carry(deliver):
            low, high = BREAKS_AFTER_S
            pause_s = low + (high - low) * self.context.random.random()
            self.context.queue.after(pause_s, lambda: self._drop(node, connection))

    def _drop(self, node: str, connection: Connection) -> None:
        if self.connections.get(node) is connection:
            self.disconnected(node, connection.id)
            self._close(node, connection.id)

    def _close(self, node: str, connection_id: int) -> None:
        machine = self.machines.get(node)
        if machine is not None and machine.has_network:
            machine.disconnected(connection_id)
