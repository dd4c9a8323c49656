"""Serves this machine's weights, engine builds and archives of compile caches to other nodes of the fleet, so that they
need not come from the control plane or a bucket again. It sends only files that the agent itself fetched or packed, and
only to nodes with a valid certificate. The receiver verifies each file."""

import asyncio
import logging
import os
import socket
import ssl
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote

from engine_agent.engines.artifacts import Entry
from engine_agent.engines.builds.store import parts_entry, parts_folder
from engine_agent.node.builds import BUILDS
from engine_agent.node.compile_caches import ARCHIVES
from engine_agent.node.identity import Identity
from engine_agent.node.weights import WEIGHTS
from engine_agent.protocol.identity import BadName, IdentityKind, peer_name
from engine_agent.protocol.manifest import MANIFEST_NAME, is_sha256, wrong_path

UPLOADS_AT_ONCE = 4
CONNECTIONS_AT_ONCE = 16
"""Further ones are closed."""
STEP_LIMIT_S = 5.0
"""For the handshake, the head of the request, and each chunk."""
UPLOAD_LIMIT_S = 600.0
LEAST_BYTES_PER_S = 5_000_000
"""A node that reads more slowly loses its upload, so that it keeps no others from theirs. Nodes leave a sender that
sends less than 25 MB/s."""
MOST_HEAD_BYTES = 8 * 1024
CHUNK_BYTES = 256 * 1024
NO_CERTIFICATE_S, TRY_AGAIN_S = 1.0, 30.0

log = logging.getLogger(__name__)


def offered_file(url: str, cache: Path) -> BinaryIO | None:
    """The open file of a request for `/SHA256/NAME`; None if this machine has no such artifact, or it has no such file.
    `cache`: the machine's, of which only folders that engines cannot change are read."""
    hex_digest, _, quoted = url.removeprefix("/").partition("/")
    name = unquote(quoted)
    if not is_sha256(hex_digest) or (name != MANIFEST_NAME and (not name or wrong_path(name))):
        return None
    build = Entry(cache / BUILDS, hex_digest)
    whole = (Entry(cache / kind, hex_digest) for kind in (WEIGHTS, ARCHIVES))
    arrived = (folder for entry in whole for folder in (entry.folder, entry.partial / "files"))
    for folder in (*arrived, parts_folder(build), parts_entry(build).folder):
        with suppress(OSError):
            if (folder / name).resolve(strict=True) != folder.resolve() / name:
                continue
            descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            file = os.fdopen(descriptor, "rb")
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return file
            file.close()
    return None


async def serve_peers(host: str, port: int, identity: Identity, cache: Path) -> None:
    """Until cancelled, as soon as there is a certificate."""
    while True:
        try:
            server = PeerServer(host, port, identity, cache)
        except FileNotFoundError:
            await asyncio.sleep(NO_CERTIFICATE_S)
        except (OSError, ValueError) as error:
            log.warning("other nodes cannot fetch artifacts from %s:%d: %s", host, port, error)
            await asyncio.sleep(TRY_AGAIN_S)
        else:
            try:
                await asyncio.Event().wait()
            finally:
                server.close()


class PeerServer:
    """Each connection has a thread and one answer. Raises FileNotFoundError without a certificate or authorities, and
    OSError if the port is taken."""

    def __init__(self, host: str, port: int, identity: Identity, cache: Path) -> None:
        self._cache = cache
        self._fleet, self._context = identity.fleet(), identity.server_context()
        self._connections = threading.BoundedSemaphore(CONNECTIONS_AT_ONCE)
        self._uploads = threading.BoundedSemaphore(UPLOADS_AT_ONCE)
        self._is_closed = False
        self._listener = socket.create_server((host, port))
        threading.Thread(target=self._accept, name="artifacts for nodes", daemon=True).start()

    def close(self) -> None:
        self._is_closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                time.sleep(0.1)  # closed, or no descriptor is free
                continue
            if not self._connections.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), name="artifact for a node", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(STEP_LIMIT_S)
            with self._context.wrap_socket(connection, server_side=True) as link:
                self._answer(link)
        except (OSError, BadName, ValueError) as error:
            log.debug("a node did not get an artifact: %s", error)
        finally:
            connection.close()
            self._connections.release()

    def _answer(self, link: ssl.SSLSocket) -> None:
        name = peer_name(link)
        if name.kind is not IdentityKind.NODE or name.fleet != self._fleet:
            link.sendall(_head("403 Forbidden"))
            return
        method, _, rest = _read_head(link).partition(" ")
        file = offered_file(rest.partition(" ")[0], self._cache) if method == "GET" else None
        if file is None:
            link.sendall(_head("404 Not Found"))
            return
        with file:
            if not self._uploads.acquire(blocking=False):
                link.sendall(_head("503 Service Unavailable"))
                return
            try:
                _send(link, file)
            finally:
                self._uploads.release()


def _read_head(link: ssl.SSLSocket) -> str:
    head, until_s = b"", time.monotonic() + STEP_LIMIT_S
    while b"\r\n\r\n" not in head:
        part = link.recv(MOST_HEAD_BYTES)
        head += part
        if not part or len(head) > MOST_HEAD_BYTES or time.monotonic() > until_s:
            raise ValueError("it sent no request")
    return head.split(b"\r\n", 1)[0].decode("ascii", "replace")


def _send(link: ssl.SSLSocket, file: BinaryIO, now_s: Callable[[], float] = time.monotonic) -> None:
    left, began_s, sent = os.fstat(file.fileno()).st_size, now_s(), 0
    link.sendall(_head("200 OK", left))
    while left and (chunk := file.read(min(left, CHUNK_BYTES))):
        link.sendall(chunk)
        left, sent, took_s = left - len(chunk), sent + len(chunk), now_s() - began_s
        if took_s > UPLOAD_LIMIT_S or sent < LEAST_BYTES_PER_S * (took_s - STEP_LIMIT_S):
            raise ValueError(f"it read {sent} bytes in {took_s:.0f} s")


def _head(status: str, length: int = 0) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n".encode()
