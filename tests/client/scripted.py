"""Regions on real sockets that answer as a case says. The Python and the Java client run the same cases against them.

A region's answers are used in order, the last one again and again. An answer is a dictionary:

- `json` or `text`, with `status` and `headers`: a whole answer; `after`: once this region has a request as well
- `stream`: pieces of a chunked body; `then`: `end` (default), `cut`, or `hang` until the client closes the connection
- `huge`: so many bytes of a line without an end
- `short`: a text whose declared length is longer; the connection is closed after it
- `cut`: close the connection without a byte; `never`: send nothing until the client closes the connection
"""

import contextlib
import json
import socket
import ssl
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.server_certificates import PublicAuthority

Answer = Mapping[str, Any]


@dataclass
class Seen:
    """Requests of one case, and the regions whose connections its client closed while an answer was unfinished."""

    requests: list[dict[str, Any]] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)

    @property
    def hosts(self) -> list[str]:
        return [request["region"] for request in self.requests]


class ScriptedRegions:
    """`east`, `west`, `secure` (TLS by the authority in `ca_file`) and `away`, which refuses connections. The first
    part of a path is `CLIENT-CASE`."""

    def __init__(self, scripts: Mapping[str, Mapping[str, list[Answer]]], folder: Path) -> None:
        self.seen: defaultdict[str, Seen] = defaultdict(Seen)
        self.ca_file = folder / "ca.pem"
        self._scripts, self._lock = scripts, threading.Condition()
        self._left: dict[tuple[str, str], list[Answer]] = {}
        self._sockets = {name: socket.create_server(("127.0.0.1", 0)) for name in ("east", "west", "secure")}
        self._away = socket.socket()  # bound without listening: connections are refused, and the port stays taken
        self._away.bind(("127.0.0.1", 0))
        self._tls = self._context(folder)
        for name, listening in self._sockets.items():
            threading.Thread(target=self._accept, args=(name, listening), daemon=True).start()

    def url(self, region: str) -> str:
        listening = self._away if region == "away" else self._sockets[region]
        scheme = "https" if region == "secure" else "http"
        return f"{scheme}://127.0.0.1:{listening.getsockname()[1]}"

    def close(self) -> None:
        for listening in (*self._sockets.values(), self._away):
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)
            listening.close()

    def _context(self, folder: Path) -> ssl.SSLContext:
        authority = PublicAuthority()
        server = authority.server("127.0.0.1")
        self.ca_file.write_text(authority.root.pem)
        (folder / "server.pem").write_text(server.key_pem + authority.chain(server))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "server.pem")
        return context

    def _accept(self, region: str, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(region, connection), daemon=True).start()

    def _serve(self, region: str, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as closing:
            closing.enter_context(connection)
            if region == "secure":
                connection = closing.enter_context(self._tls.wrap_socket(connection, server_side=True))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream = closing.enter_context(connection.makefile("rb"))
            while (request := _request(stream)) is not None:
                case, path = request.pop("target").removeprefix("/").split("/", 1)
                with self._lock:
                    self.seen[case].requests.append({"region": region, "path": f"/{path}", **request})
                    answer = self._next(case, region)
                    self._lock.notify_all()
                    if first := answer.get("after"):
                        self._lock.wait_for(partial(self._was_asked, case, first), timeout=30)
                if not self._answer(connection, stream, answer):
                    if answer.get("never") or answer.get("then") == "hang" or "huge" in answer:
                        self.seen[case].closed.append(region)
                    return

    def _was_asked(self, case: str, region: str) -> bool:
        return region in self.seen[case].hosts

    def _next(self, case: str, region: str) -> Answer:
        script = self._scripts[case.split("-", 2)[2]][region]
        left = self._left.setdefault((case, region), list(script))
        return left.pop(0) if len(left) > 1 else left[0]

    def _answer(self, connection: socket.socket, stream: Any, answer: Answer) -> bool:
        """Returns whether the connection can be used again."""
        if answer.get("cut"):
            return False
        if answer.get("never"):
            with contextlib.suppress(OSError):
                stream.read(1)
            return False
        if "stream" in answer or "huge" in answer:
            return _stream(connection, stream, answer)
        body = (json.dumps(answer["json"]) if "json" in answer else answer.get("text", answer.get("short"))).encode()
        headers = {"content-length": str(len(body) + (9 if "short" in answer else 0)), **answer.get("headers", {})}
        connection.sendall(_head(answer.get("status", 200), headers) + body)
        return "short" not in answer


def _stream(connection: socket.socket, stream: Any, answer: Answer) -> bool:
    connection.sendall(_head(200, {"content-type": "text/event-stream", "transfer-encoding": "chunked"}))
    for piece in answer.get("stream", ()):
        connection.sendall(f"{len(piece.encode()):x}\r\n{piece}\r\n".encode())
    if size := answer.get("huge", 0):
        piece = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        with contextlib.suppress(OSError):
            for _ in range(size // 0x10000):
                connection.sendall(piece)
            stream.read(1)
        return False
    if answer.get("then") == "cut":
        return False
    if answer.get("then") == "hang":
        with contextlib.suppress(OSError):
            stream.read(1)
        return False
    connection.sendall(b"0\r\n\r\n")
    return True


def _head(status: int, headers: Mapping[str, str]) -> bytes:
    return "".join(
        (f"HTTP/1.1 {status} So\r\n", *(f"{name}: {value}\r\n" for name, value in headers.items()), "\r\n")
    ).encode()


def _request(stream: Any) -> dict[str, Any] | None:
    line = stream.readline()
    if not line:
        return None
    method, target, _ = line.decode().split()
    headers = {}
    while (line := stream.readline().decode().strip()) != "":
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    body = stream.read(int(headers.get("content-length", 0)))
    return {"method": method, "target": target, "headers": headers, "body": json.loads(body) if body else None}


@contextlib.contextmanager
def scripted_regions(scripts: Mapping[str, Mapping[str, list[Answer]]], folder: Path) -> Iterator[ScriptedRegions]:
    regions = ScriptedRegions(scripts, folder)
    try:
        yield regions
    finally:
        regions.close()
