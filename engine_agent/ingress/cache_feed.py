"""Copies the lists of cached prefixes from cell proxies to HAProxy: long-polls each cell for changes, and sends them to
`cache_index.lua` over a socket of the ingress. A cell that does not answer, or has no index, has no list: its requests
go by sticky cells. It delays no request, picks no cell, and keeps hashes only. Memory is bounded by the maximum list of
a cell and the maximum lag of a reader."""

import asyncio
import contextlib
import logging
import os
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from engine_agent.node.http import HttpClient, NoResponse
from engine_agent.protocol.local_servers import closing_connections
from engine_agent.protocol.proxy_messages import (
    CACHE_POLL_S,
    MAX_PREFIXES,
    PREFIX_DIGITS,
    PREFIXES_PATH,
    BadChanges,
    PrefixChanges,
    decode_prefixes,
    digits_of,
    packed,
)

SOCKET = "cache-index.sock"
ANSWER_LIMIT_S = CACHE_POLL_S + 5.0
PAUSE_S = 0.05
"""Between two requests to one cell, which could always answer immediately."""
RETRY_S = 1.0
TICK_S = 1.0
"""How often readers get a sign of life. They ignore the lists after three missing ones."""
TRY_AGAIN_S = 5.0
"""Retry of a socket that could not be created."""
LINE_PREFIXES = 256
MAX_BEHIND_BYTES = 16 * 1024 * 1024
"""Maximum lag of one reader, a thread of HAProxy. A slower one is disconnected and requests everything again."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CellAddress:
    """The address of a cell's proxy. `tls_name`: required name in its certificate; empty: a plain link."""

    host: str
    port: int
    tls_name: str = ""

    def url(self, path: str) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls_name else 'http'}://{host}:{self.port}{path}"


class CellPrefixes:
    """The known list of one cell."""

    def __init__(self) -> None:
        self.known: set[int] | None = None
        self._life, self._upto = "", 0

    @property
    def query(self) -> str:
        return f"?life={self._life}&after={self._upto}"

    def apply(self, server: str, changes: PrefixChanges) -> Iterator[str]:
        """Applies an answer. Yields the lines for readers. Raises BadChanges if it would make the list longer than any
        may be, or changes one that is not known."""
        if not changes.is_known:
            yield from self.lose(server)
            self._life, self._upto = changes.life, changes.upto
            return
        added, removed = _numbers(changes.added), _numbers(changes.removed)
        if self.known is None and not changes.is_whole:
            raise BadChanges("changes of an unknown list")
        known = set(added) if changes.is_whole else ((self.known or set()) - set(removed)) | set(added)
        if len(known) > MAX_PREFIXES:
            raise BadChanges(f"{len(known)} prefixes; a cell lists {MAX_PREFIXES} at most")
        self.known, self._life, self._upto = known, changes.life, changes.upto
        if changes.is_whole:
            yield from whole_lines(server, known)
        else:
            yield from _lines("del", server, changes.removed)
            yield from _lines("add", server, changes.added)

    def lose(self, server: str) -> Iterator[str]:
        self._life, self._upto = "", 0
        if self.known is not None:
            self.known = None
            yield f"gone {server}\n"


def whole_lines(server: str, known: set[int]) -> Iterator[str]:
    yield f"whole {server}\n"
    yield from _lines("add", server, packed(known))


def _lines(word: str, server: str, prefixes: bytes) -> Iterator[str]:
    digits = digits_of(prefixes)
    for at in range(0, len(digits), LINE_PREFIXES):
        yield f"{word} {server} {''.join(digits[at : at + LINE_PREFIXES])}\n"


def _numbers(prefixes: bytes) -> list[int]:
    size = PREFIX_DIGITS // 2
    return [int.from_bytes(prefixes[at : at + size]) for at in range(0, len(prefixes), size)]


class CacheFeed:
    """The lists of all cells of one ingress, and their readers. `context` makes TLS contexts; None: plain links."""

    def __init__(
        self, folder: Path, account: tuple[int, int] | None, context: Callable[[], ssl.SSLContext] | None
    ) -> None:
        self._path = folder / SOCKET
        self._account = account
        self._context = context
        self._lists: dict[str, CellPrefixes] = {}
        self._tasks: dict[str, tuple[CellAddress, asyncio.Task[None]]] = {}
        self._readers: set[asyncio.StreamWriter] = set()

    def counts(self) -> dict[str, int]:
        """Server -> number of its prefixes, without unknown lists."""
        return {name: len(each.known) for name, each in self._lists.items() if each.known is not None}

    def follow(self, cells: Mapping[str, CellAddress]) -> None:
        """Polls exactly these cells from now on, by the names of their servers."""
        for name, (address, task) in tuple(self._tasks.items()):
            if cells.get(name) != address:
                task.cancel()
                del self._tasks[name]
                self._send_to_readers(self._lists.pop(name).lose(name))
        for name, address in cells.items():
            if name not in self._tasks:
                self._lists[name] = CellPrefixes()
                task = asyncio.get_running_loop().create_task(self._poll(name, address))
                self._tasks[name] = address, task

    async def run(self) -> None:
        try:
            await self._serve()
        finally:
            self.follow({})

    async def _serve(self) -> None:
        while True:
            try:
                server = await self._listen()
            except OSError as error:
                log.warning("%s: %s; requests use their sticky cells", self._path, error)
                await asyncio.sleep(TRY_AGAIN_S)
                continue
            async with server:
                while True:
                    await asyncio.sleep(TICK_S)
                    self._send_to_readers(("tick\n",))

    async def _listen(self) -> asyncio.Server:
        # A socket file of a previous agent would make `bind` fail.
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        server = await asyncio.start_unix_server(closing_connections(self._greet), self._path)
        self._path.chmod(0o600)
        if self._account is not None:
            os.chown(self._path, *self._account)
        return server

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A thread of HAProxy connects: sends all lists, then changes."""
        for name, each in self._lists.items():
            if each.known is not None:
                writer.write("".join(whole_lines(name, each.known)).encode())
        writer.write(b"tick\n")
        self._readers.add(writer)
        try:
            await reader.read()  # readers send nothing: this returns when they disconnect
        except OSError:
            pass
        finally:
            self._readers.discard(writer)

    def _send_to_readers(self, lines: Iterable[str]) -> None:
        text = "".join(lines).encode()
        if not text:
            return
        for writer in tuple(self._readers):
            if writer.transport.get_write_buffer_size() > MAX_BEHIND_BYTES:
                self._readers.discard(writer)
                writer.transport.abort()
            else:
                writer.write(text)

    async def _poll(self, name: str, address: CellAddress) -> None:
        prefixes = self._lists[name]
        client = HttpClient(self._context if address.tls_name else None, address.tls_name)
        url = address.url(PREFIXES_PATH)
        try:
            while True:
                try:
                    answer = await client.request("GET", url + prefixes.query, timeout_s=ANSWER_LIMIT_S)
                    if answer.status != 200:
                        raise BadChanges(f"status {answer.status}")
                    self._send_to_readers(tuple(prefixes.apply(name, decode_prefixes(answer.body))))
                    await asyncio.sleep(PAUSE_S)
                except (NoResponse, BadChanges) as error:
                    if prefixes.known is not None:
                        log.warning("%s: its cached prefixes are unknown: %s", name, error)
                    self._send_to_readers(tuple(prefixes.lose(name)))
                    await asyncio.sleep(RETRY_S)
        finally:
            client.close()
