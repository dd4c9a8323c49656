"""One ingress, tended: takes routing tables in, keeps HAProxy alive and as the newest valid table says, and reports.

A table is judged, then journalled, then in force; a refused one changes nothing. Every pass compares what runs with
what should run, so that whatever failed is tried again. Losing the control plane, this agent or HAProxy stops nothing
but itself. What to change is for `plan` to decide.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable

from engine_agent.ingress.apply import apply_step
from engine_agent.ingress.command_socket import CommandRefused, Unreachable
from engine_agent.ingress.config import structure_of
from engine_agent.ingress.haproxy import HaproxyProcess, RefusedConfig, StartFailed
from engine_agent.ingress.layout import UNTOLD, BadTable, Layout, lay_out
from engine_agent.ingress.observe import observe
from engine_agent.ingress.plan import Reload, RemoveServer, Step, plan_steps
from engine_agent.ingress.report import telemetry, view_cells
from engine_agent.ingress.restarts import Restarts
from engine_agent.ingress.running import Running, UnreadableAnswer
from engine_agent.ingress.settings import IngressSettings
from engine_agent.protocol.messages import Desired, IngressObserved, IngressReport, RoutingTable
from engine_agent.runtime.connection import report_interval_s
from engine_agent.runtime.journal import CorruptJournal, Journal

log = logging.getLogger(__name__)

POLL_S = 0.25
"""How old the view of a cell may be."""
JOURNAL_FILE = "journal.json"
Trouble = (Unreachable, CommandRefused, UnreadableAnswer, RefusedConfig, StartFailed, OSError)


class Ingress:
    """Everything of one ingress but its line to the control plane."""

    def __init__(
        self,
        settings: IngressSettings,
        haproxy: HaproxyProcess,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._settings = settings
        self._haproxy = haproxy
        self._draw = draw
        self._journal = Journal(settings.home / JOURNAL_FILE, RoutingTable)
        self._told: RoutingTable | None = None
        self._newest_told = 0
        self._wake = asyncio.Event()
        self._layout: Layout | None = None
        self._revision_in_force = 0
        self.running: Running | None = None
        self._refusal = ""
        self._trouble = ""
        self._reported: IngressObserved | None = None
        self._report_due_s = 0.0
        self._answered_at_s = 0.0
        self._restarts = Restarts()

    def forget_order(self) -> None:
        """A new connection: its first table counts, whatever its revision; the control plane may have been restored."""
        self._newest_told = 0

    def take(self, message: Desired | RoutingTable) -> None:
        """Note what the control plane said; the next pass acts on it."""
        if not isinstance(message, RoutingTable):
            log.error("ignored: this is an ingress, not a node")
        elif message.revision >= self._newest_told:
            self._newest_told = message.revision
            self._told = message
            self._wake.set()

    async def tend(self, send: Callable[[IngressReport], None]) -> None:
        """Take the journal up, and tend HAProxy until cancelled; `send` takes each report."""
        self._take_up()
        while True:
            await self._pass()
            if (report := self._report()) is not None:
                send(report)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._wake.wait()
            self._wake.clear()

    def _take_up(self) -> None:
        try:
            table = self._journal.load()
            self._layout = lay_out(table) if table else None
        except (CorruptJournal, BadTable, OSError) as error:
            self._refusal = f"journal: {error}"
            log.error("%s", self._refusal)
        if self._haproxy.adopt():
            log.info("adopted HAProxy %s", self._haproxy.pid)
            self._answered_at_s = _now_s()
            self._restarts.note_start(self._answered_at_s)

    async def _pass(self) -> None:
        if self._told is not None:
            await self._judge(self._told)
        try:
            await self._keep_alive()
            if self._haproxy.pid is not None:
                await self._converge()
                self._trouble = ""
        except Trouble as error:
            self._note(str(error) or type(error).__name__)

    async def _judge(self, table: RoutingTable) -> None:
        """Make a valid table the one to carry out, after it is journalled; say of another why it is not."""
        self._told = None
        try:
            if table.region != self._settings.region:
                raise BadTable(f"it is for region {table.region!r}, this is {self._settings.region!r}")
            layout = lay_out(table)
            await self._haproxy.check(layout)
            self._journal.save(table)
        except (BadTable, RefusedConfig, OSError) as error:
            self._refusal = f"revision {table.revision} refused: {error}"
            log.error("%s", self._refusal)
            return
        self._layout, self._refusal = layout, ""

    async def _keep_alive(self) -> None:
        silent_s = _now_s() - self._answered_at_s
        if self._haproxy.is_alive() and silent_s > self._settings.times.silent_after_s:
            self._note(f"HAProxy answered nothing for {silent_s:.0f} s: killed")
            await self._haproxy.kill()
        if self._haproxy.is_alive():
            return
        self.running = None
        if self._restarts.note_absence(_now_s(), self._draw()):
            log.error("HAProxy died; next start in %.1f s", max(0.0, self._restarts.due_at_s - _now_s()))
        if self._restarts.may_start(_now_s()):
            await self._start(self._layout or UNTOLD)

    async def _start(self, layout: Layout) -> None:
        self._restarts.note_start(_now_s())
        await self._haproxy.start(layout)
        self._answered_at_s = _now_s()
        log.info("HAProxy %s serves revision %s", self._haproxy.pid, layout.revision)

    async def _converge(self) -> None:
        self.running = await observe(self._haproxy.admin)
        self._answered_at_s = _now_s()
        if self._layout is None:
            return  # adopted without a journal: what runs is the best that is known
        steps = plan_steps(self.running, self._layout, structure_of(self._layout, self._settings))
        for step in steps:
            await self._apply(step, self._layout)
        self._revision_in_force = self._layout.revision
        if steps:
            self.running = await observe(self._haproxy.admin)

    async def _apply(self, step: Step, layout: Layout) -> None:
        log.info("%s", step)
        try:
            if isinstance(step, Reload):
                await self._haproxy.reload(layout)
            else:
                await apply_step(step, self._haproxy.admin, self._settings.times)
        except CommandRefused:
            if not isinstance(step, RemoveServer):
                raise
            log.debug("%s is still in use", step.name)  # an idle connection: the next pass tries again

    def _note(self, trouble: str) -> None:
        if trouble != self._trouble:
            log.error("%s", trouble)
        self._trouble = trouble

    def _report(self) -> IngressReport | None:
        """The next report if it is due, or at once if something changed."""
        layout = self._layout or UNTOLD
        observed = IngressObserved(
            revision=self._revision_in_force,
            haproxy_pid=self._haproxy.pid,
            reason="; ".join(filter(None, (self._refusal, self._trouble))),
            cells=view_cells(self.running, layout),
        )
        if observed == self._reported and _now_s() < self._report_due_s:
            return None
        self._reported = observed
        self._report_due_s = _now_s() + report_interval_s(self._draw())
        self._haproxy.bound_log()
        return IngressReport(seq=0, observed=observed, telemetry=telemetry(self.running, layout))


def _now_s() -> float:
    return asyncio.get_running_loop().time()
