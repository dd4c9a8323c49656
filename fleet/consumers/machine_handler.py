"""Keeps what machine agents report and sends them their orders."""

from collections.abc import Sequence

import msgspec

from engine_agent.protocol.machine_messages import MachineReport
from engine_agent.protocol.messages import DownMessage, Hello, UpMessage
from fleet.consumers.hub import AgentSession
from fleet.consumers.report_buffer import ReportBuffer
from fleet.selectors.machine import machine_orders
from fleet.services.machine_reports import ReceivedMachineReport, machine_hellos_store, machine_reports_store
from kernel import clock
from kernel.refusals import Conflict


class MachineHandler:
    """The handler for agents of kind `machine`."""

    def __init__(self) -> None:
        self._reports: ReportBuffer[ReceivedMachineReport] = ReportBuffer()

    def on_hellos(self, hellos: Sequence[Hello]) -> dict[str, Conflict]:
        return machine_hellos_store(hellos, now=clock.now())

    def on_message(self, session: AgentSession, message: UpMessage) -> bool:
        if not isinstance(message, MachineReport):
            return False
        received = ReceivedMachineReport(session.identity.id, session.key, True, clock.now(), message)
        previous = self._reports.put(session.identity.id, received)
        return previous is None or _urgent_part(previous) != _urgent_part(received)

    def on_disconnect(self, session: AgentSession) -> None:
        self._reports.end(session.identity.id, session.key, _disconnected)

    def flush(self) -> None:
        self._reports.flush(machine_reports_store)

    def desired_messages(self, sessions: Sequence[AgentSession]) -> dict[str, tuple[int, DownMessage]]:
        orders = machine_orders({session.identity.id: session.sent_version for session in sessions})
        return {machine: (order.version, order) for machine, order in orders.items()}


def _urgent_part(received: ReceivedMachineReport) -> tuple[object, ...]:
    report = received.report
    return received.connection, report.version, report.phase, report.runs, report.reason, report.release_trouble


def _disconnected(received: ReceivedMachineReport) -> ReceivedMachineReport:
    return msgspec.structs.replace(received, connected=False, at=received.at)
