"""Keeps the relays of an ingress running while a pool continues its streams: one process per core that the host
gives. HAProxy spreads requests over them, and sends them past the relays while none runs."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from engine_agent.ingress.command_socket import short_path
from engine_agent.ingress.config import RELAY_SOCKETS
from engine_agent.ingress.desired import DesiredHaproxy
from engine_agent.ingress.settings import IngressSettings
from engine_agent.ingress.side_process import SideProcess
from engine_agent.protocol.continuation import COUNTS_PATH
from engine_agent.protocol.metrics import family, sample
from engine_agent.protocol.watchdog import AwakeClock, Watchdog
from engine_agent.relay.meter import RelayCounts

log = logging.getLogger(__name__)

STOP_WITHIN_S: Final = 5.0
"""As HAProxy's streams have when an ingress stops."""
READ_EVERY_S: Final = 5.0
AGAIN_EVERY_S: Final = 0.5
"""After a reading without an answer."""
READ_WITHIN_S: Final = 2.0
_HANGS: Final = (TimeoutError, BlockingIOError)
"""The kernel connects, and nothing answers; or as many connections wait as its socket takes. Any other error says that
the relay was not asked: it may have no socket yet."""
_OF_RELAY: Final = {
    "requests": ("counter", "Requests that passed a relay."),
    "open": ("gauge", "Requests in a relay."),
    "kept_bytes": ("gauge", "Bytes of requests that are kept to be repeated."),
}
_REFUSED: Final = "switchyard_relay_refused_total"


class RelayProcesses:
    """All relays of one ingress. They share a folder, and each has its own socket. `note` gets the counts of each
    reading."""

    def __init__(self, settings: IngressSettings, note: Callable[[RelayCounts], None] = lambda _: None) -> None:
        self._settings = settings
        self._note = note
        self.folder = settings.state_dir / RELAY_SOCKETS
        self.counts: dict[int, RelayCounts] = {}
        """As last read, by number of the relay."""
        self.processes = tuple(self._process(number) for number in range(1, settings.relays + 1))

    def make_folder(self) -> None:
        """Creates the folder of the sockets. Raises OSError."""
        self.processes[0].make_folder()

    @property
    def problem(self) -> str:
        return "; ".join(dict.fromkeys(each.problem for each in self.processes if each.problem))

    @property
    def exits(self) -> int:
        """How often a relay exited. Each time its streams were cut."""
        return sum(each.exits for each in self.processes)

    def follow(self, desired: DesiredHaproxy | None) -> None:
        """One pass for a desired state; without one, the relays are left alone."""
        if desired is None:
            return
        for number, process in enumerate(self.processes, start=1):
            process.reconcile(self._wanted(number, desired))

    async def read(self) -> None:
        """Reads the counts of all relays until cancelled, and kills one that hangs: HAProxy connects to it all the
        same, so it would hold its streams and the next requests for as long as their clients wait."""
        async with asyncio.TaskGroup() as group:
            for number, process in enumerate(self.processes, start=1):
                group.create_task(self._read(number, process))

    async def _read(self, number: int, process: SideProcess) -> None:
        clock = AwakeClock(longest_pause_s=READ_EVERY_S + READ_WITHIN_S)
        watchdog, watched = Watchdog(self._settings.times.silent_after_s), process.pid
        while True:
            await asyncio.sleep(AGAIN_EVERY_S if watchdog.unanswered else READ_EVERY_S)
            if process.pid is None or process.pid != watched:
                watchdog.answered()
                watched = process.pid
            if watched is None:
                continue
            read_at_s = clock.now_s()
            try:
                counts = await read_counts(self.folder / f"{number}.sock")
            except _HANGS:
                watchdog.missed(read_at_s)
                if watchdog.is_silent(now_s := clock.now_s()) and process.pid == watched:
                    process.kill(f"no answer for {watchdog.silent_s(now_s):.0f} s")
                    watchdog.answered()
            except (OSError, ValueError) as error:
                watchdog.answered()
                log.warning("relay %d: its counts cannot be read: %s", number, error)
            else:
                watchdog.answered()
                self.counts[number] = counts
                self._note(counts)

    def exposition(self) -> str:
        """The metrics of all relays; empty if none has run."""
        if not self.counts:
            return ""
        lines = list(_families(self.counts))
        exits = "switchyard_relay_exits_total"
        lines += [*family(exits, "counter", "Relays that exited, with their streams."), sample(exits, {}, self.exits)]
        return "\n".join([*lines, ""])

    async def stop(self) -> None:
        for process in self.processes:
            await process.stop(STOP_WITHIN_S)

    def _process(self, number: int) -> SideProcess:
        return SideProcess(
            self._settings,
            module="engine_agent.relay",
            name=f"relay {number}",
            folder=self.folder,
            place=self.folder / f"{number}.sock",
            log_file=f"relay-{number}.log",
        )

    def _wanted(self, number: int, desired: DesiredHaproxy) -> tuple[str, ...]:
        if not desired.features.continuation:
            return ()
        return (
            *("--socket", str(self.folder / f"{number}.sock"), "--release", self._settings.version),
            *("--max-body-bytes", str(desired.max_body_bytes)),
        )


def _families(counts: Mapping[int, RelayCounts]) -> Iterator[str]:
    for name, (kind, text) in _OF_RELAY.items():
        full = f"switchyard_relay_{name}" + ("_total" if kind == "counter" else "")
        yield from family(full, kind, text)
        for number, each in sorted(counts.items()):
            yield sample(full, {"relay": str(number)}, getattr(each, name))
    yield from family(_REFUSED, "counter", "Attempts to continue a stream that failed, by reason.")
    for number, each in sorted(counts.items()):
        for reason, count in sorted(each.refused.items()):
            yield sample(_REFUSED, {"relay": str(number), "reason": reason}, count)


async def read_counts(socket: Path) -> RelayCounts:
    """Raises OSError, TimeoutError if the relay does not answer. Raises ValueError for an answer that is no counts."""
    async with asyncio.timeout(READ_WITHIN_S):
        with short_path(socket) as path:
            reader, writer = await asyncio.open_unix_connection(path)
        try:
            writer.write(f"GET {COUNTS_PATH} HTTP/1.1\r\nhost: relay\r\nconnection: close\r\n\r\n".encode())
            answer = await reader.read()
        finally:
            writer.close()
    return msgspec.json.decode(answer.partition(b"\r\n\r\n")[2], type=RelayCounts)
