"""An agent's end of its connection to the control plane: connects, reports, detects silence, and reconnects. The
machine composes the reports."""

from abc import ABC, abstractmethod

from engine_agent.protocol.messages import Observed
from simulator.context import AgentReport, SimulationContext

REPORT_EVERY_S = 2.0
RECONNECT_S = (0.2, 5.0)
DEAD_AFTER_S = 20.0
"""Silence after which both ends close a connection."""


class AgentLink(ABC):
    """One agent's connection. `connection_id` is 0 without one; `no_contact_since_s` is None with one."""

    def __init__(self, node: str, context: SimulationContext) -> None:
        self.node = node
        self.has_network = True
        self.connection_id = 0
        self.no_contact_since_s: float | None = context.queue.now_s
        self.last_report: AgentReport | None = None
        self._context = context
        self._agent_starts = 0
        self._reporting_on = 0
        """The connection on which the periodic reports run."""

    @property
    @abstractmethod
    def acts(self) -> bool:
        """Whether the agent can decide anything now."""

    @abstractmethod
    def converge(self) -> None:
        """Starts and stops processes until they match the desired state."""

    @abstractmethod
    def compose_report(self, observed: Observed | None) -> AgentReport:
        """Returns the report for now; `observed` if it was computed before."""

    # --- reports -----------------------------------------------------------------------------------------------------

    def report(self, observed: Observed | None = None) -> None:
        self.last_report = report = self.compose_report(observed)
        self._send(report)
        if self.connection_id and self._reporting_on != self.connection_id:
            self._reporting_on = self.connection_id
            self._report_later(self.connection_id)

    def report_again(self) -> None:
        """Reports the whole state, as after a silence."""
        if self.acts:
            self.converge()
            self.report()

    def _report_later(self, connection_id: int) -> None:
        pause_s = REPORT_EVERY_S * (0.9 + 0.2 * self._context.random.random())
        self._context.queue.after(pause_s, lambda: self._report_periodically(connection_id))

    def _report_periodically(self, connection_id: int) -> None:
        if connection_id != self.connection_id or not self.acts:
            return
        self.converge()
        self.report()
        report = self.last_report
        if self._context.skip_repeats and report is not None and self._context.server.is_known(self.node, report):
            self._reporting_on = 0
        else:
            self._report_later(connection_id)

    def _send(self, report: AgentReport) -> None:
        if report.connection and self.has_network:
            self._context.network.carry(lambda: self._context.server.report_received(self.node, report))

    # --- the connection ----------------------------------------------------------------------------------------------

    def cut_network(self) -> None:
        """Drops all messages in both directions; both ends detect it later."""
        if self.has_network:
            self.has_network = False
            connection_id = self.connection_id
            self._context.queue.after(DEAD_AFTER_S, lambda: self._timed_out(connection_id))

    def restore_network(self) -> None:
        if not self.has_network:
            self.has_network = True
            if not self.connection_id:
                self._connect_soon(0.0)

    def disconnected(self, connection_id: int) -> None:
        """The server closed the connection, or exited."""
        if connection_id == self.connection_id:
            self.connection_id = 0
            self.no_contact_since_s = self._context.queue.now_s
            if self.acts:
                self._connect_soon()

    def _connect_soon(self, delay_s: float | None = None) -> None:
        low, high = RECONNECT_S
        pause_s = low + (high - low) * self._context.random.random() ** 2 if delay_s is None else delay_s
        agent_start = self._agent_starts
        self._context.queue.after(pause_s, lambda: self._connect(agent_start))

    def _connect(self, agent_start: int) -> None:
        if agent_start != self._agent_starts or not self.acts or self.connection_id or not self.has_network:
            return
        self.connection_id = connection_id = self._context.next_serial()
        self.no_contact_since_s = None
        self._context.server.connected(self.node, connection_id)
        if self.connection_id == connection_id:
            self.report()

    def _disconnect(self) -> None:
        connection_id, self.connection_id = self.connection_id, 0
        self.no_contact_since_s = self._context.queue.now_s
        if connection_id and self.has_network:
            self._context.server.disconnected(self.node, connection_id)

    def _timed_out(self, connection_id: int) -> None:
        self._context.server.disconnected(self.node, connection_id)
        if connection_id and connection_id == self.connection_id:
            self.connection_id = 0
            self.no_contact_since_s = self._context.queue.now_s
            if self.acts:
                self.converge()
                self._connect_soon()
