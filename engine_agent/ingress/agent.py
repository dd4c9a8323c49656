"""One ingress, tended: takes routing tables in, has its HAProxies be as the newest valid one says, and reports.

A table is judged, then journalled, then in force; a refused one changes nothing. Losing the control plane, this agent
or a HAProxy stops nothing but itself.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from engine_agent.ingress.bad_table import BadTable
from engine_agent.ingress.command_socket import Unreachable
from engine_agent.ingress.config import render, structure_of
from engine_agent.ingress.ejection import Ejections, Key, without
from engine_agent.ingress.haproxy import HaproxyProcess, RefusedConfig
from engine_agent.ingress.key_counts import COMMAND, KeyCounts, read_key_counts
from engine_agent.ingress.layout import MODELS_MAP, UNTOLD, Layout, lay_out
from engine_agent.ingress.log_pipe import LogPipe, open_pipe
from engine_agent.ingress.reader_config import reader_structure_of, render_reader
from engine_agent.ingress.report import cell_traffic, changes, telemetry, view_cells
from engine_agent.ingress.settings import IngressSettings, ReaderTier
from engine_agent.ingress.tending import TendedHaproxy
from engine_agent.protocol.messages import Desired, IngressObserved, IngressReport, RoutingTable
from engine_agent.runtime.connection import report_interval_s
from engine_agent.runtime.journal import CorruptJournal, Journal

log = logging.getLogger(__name__)

POLL_S = 0.25
"""How old the view of a cell may be."""
JOURNAL_FILE = "journal.json"


class Ingress:
    """Everything of one ingress but its line to the control plane.

    `front` is the HAProxy that serves; `readers`, for the shorter bodies first, find the model in long ones for it.
    """

    def __init__(self, settings: IngressSettings, binary: Path, draw: Callable[[], float] = random.random) -> None:
        self.front = TendedHaproxy(
            "HAProxy",
            HaproxyProcess(settings.home, binary, lambda layout: render(layout, settings), open_pipe),
            settings.times,
            lambda layout: structure_of(layout, settings),
        )
        self.readers = tuple(_reader(tier, settings, binary) for tier in settings.readers)
        self.access_log = LogPipe(settings.home)
        self._settings = settings
        self._draw = draw
        self._journal = Journal(settings.home / JOURNAL_FILE, RoutingTable)
        self._told: RoutingTable | None = None
        self._newest_told = 0
        self._wake = asyncio.Event()
        self._key_counts = KeyCounts()
        self._ejections = Ejections()
        self._ejected: frozenset[Key] = frozenset()
        self._layout: Layout | None = None
        self._revision_in_force = 0
        self._refusal = ""
        self._reported: IngressObserved | None = None
        self._report_due_s = 0.0

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
        """Take the journal up, and tend the HAProxies until cancelled; `send` takes each report."""
        self._take_up()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.access_log.carry())
            for reader in self.readers:
                group.create_task(self._tend_reader(reader))
            group.create_task(self._tend_front(send))

    async def stop(self, grace_s: float) -> None:
        """Let streams finish for `grace_s` seconds, and end all HAProxies."""
        await asyncio.gather(*(haproxy.process.stop(grace_s) for haproxy in self._haproxies))

    @property
    def _haproxies(self) -> tuple[TendedHaproxy, ...]:
        return (self.front, *self.readers)

    def _take_up(self) -> None:
        try:
            table = self._journal.load()
            self._layout = lay_out(table) if table else None
        except (CorruptJournal, BadTable, OSError) as error:
            self._refusal = f"journal: {error}"
            log.error("%s", self._refusal)
        for haproxy in self._haproxies:
            haproxy.adopt()

    async def _tend_front(self, send: Callable[[IngressReport], None]) -> None:
        while True:
            if self._told is not None:
                await self._judge(self._told)
            layout = without(self._layout, self._ejected) if self._layout else None
            if await self.front.tend(layout, UNTOLD) and layout is not None:
                self._revision_in_force = layout.revision
            self._eject()
            await self._count_keys()
            if (report := self._report()) is not None:
                send(report)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._wake.wait()
            self._wake.clear()

    async def _tend_reader(self, reader: TendedHaproxy) -> None:
        told, layout = self._layout, None
        while True:
            if layout is None or told is not self._layout:
                told = self._layout
                layout = _for_reader(told) if told else None
            await reader.tend(layout, _for_reader(UNTOLD))
            await asyncio.sleep(POLL_S)

    def _eject(self) -> None:
        servers = self.front.running.servers if self.front.running else ()
        ejected = self._ejections.note(servers, asyncio.get_running_loop().time())
        for key in ejected ^ self._ejected:
            log.warning("%s is %s", "/".join(key), "ejected" if key in ejected else "tried again")
        if ejected - self._ejected:
            self._wake.set()
        self._ejected = ejected

    async def _count_keys(self) -> None:
        """Counts are for statistics only: without them everything goes on."""
        running, now_s = self.front.running, asyncio.get_running_loop().time()
        if running is None or not self._key_counts.is_due(running.life, now_s):
            return
        with contextlib.suppress(Unreachable):
            self._key_counts.take(running.life, read_key_counts(await self.front.process.admin.ask(COMMAND)), now_s)

    async def _judge(self, table: RoutingTable) -> None:
        """Make a valid table the one to carry out, after it is journalled; say of another why it is not."""
        self._told = None
        try:
            if table.region != self._settings.region:
                raise BadTable(f"it is for region {table.region!r}, this is {self._settings.region!r}")
            layout = lay_out(table)
            for tier, reader in zip(self._settings.readers, self.readers, strict=True):
                if self._layout is None or self._changes(tier, self._layout, layout):
                    await reader.process.check(layout)
            await self.front.process.check(layout)
            self._journal.save(table)
        except (BadTable, RefusedConfig, OSError) as error:
            self._refusal = f"revision {table.revision} refused: {error}"
            log.error("%s", self._refusal)
            return
        self._layout, self._refusal = layout, ""

    def _changes(self, tier: ReaderTier, before: Layout, after: Layout) -> bool:
        there_is, should_be = (reader_structure_of(layout, self._settings, tier) for layout in (before, after))
        return there_is != should_be

    def _report(self) -> IngressReport | None:
        """The next report if it is due, or at once if something changed."""
        now_s = asyncio.get_running_loop().time()
        layout = self._layout or UNTOLD
        troubles = (self._refusal, *(haproxy.trouble for haproxy in self._haproxies), self.access_log.trouble)
        observed = IngressObserved(
            revision=self._revision_in_force,
            haproxy_pid=self.front.process.pid,
            reason="; ".join(filter(None, troubles)),
            cells=view_cells(self.front.running, layout, self._ejected),
        )
        if observed == self._reported and now_s < self._report_due_s:
            return None
        self._reported = observed
        self._report_due_s = now_s + report_interval_s(self._draw())
        for haproxy in self._haproxies:
            haproxy.process.bound_log()
        counters = telemetry(self.front.running, layout)
        if keys := self._key_counts.told(now_s):
            counters["keys"] = keys
        return IngressReport(
            seq=0,
            observed=observed,
            cells=cell_traffic(self.front.running, layout, self._ejected),
            changes=changes(self.front),
            telemetry=counters,
        )


def _reader(tier: ReaderTier, settings: IngressSettings, binary: Path) -> TendedHaproxy:
    return TendedHaproxy(
        f"HAProxy {tier.name}",
        HaproxyProcess(settings.home / tier.name, binary, lambda layout: render_reader(layout, settings, tier)),
        settings.times,
        lambda layout: reader_structure_of(layout, settings, tier),
    )


def _for_reader(layout: Layout) -> Layout:
    """What of a layout a reader is about: its limits and the names of models."""
    return replace(layout, pools=(), servers=(), maps={MODELS_MAP: layout.maps[MODELS_MAP]})
