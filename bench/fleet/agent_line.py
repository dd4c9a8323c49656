"""One connection of a simulated agent: a non-blocking socket, TLS with the agent's certificate, and a WebSocket. It has
no task or timer, so that thousands in one process cost little more than their system calls. Contents and times are
those of the agents' own code: frames are made by the protocol's codec, and `ConnectionSettings` has the times."""

import errno
import os
import select
import socket
import ssl
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol
from urllib.parse import urlsplit

from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.uri import parse_uri

from engine_agent.node.connection import ConnectionSettings
from engine_agent.protocol.codec import decode_down, encode
from engine_agent.protocol.messages import DownMessage, UpMessage

TICK_S = 0.01
"""Interval at which a process handles all arrived data and due calls."""
SLOTS = 2**15
READ_BYTES = 4096
MOST_EVENTS = 2000
IP_BIND_ADDRESS_NO_PORT = 24
"""Linux chooses the port when it connects, so that agents with different addresses can have the same one."""
PING = Frame(Opcode.PING, b"ping").serialize(mask=True)
PONG = Frame(Opcode.PONG, b"ping").serialize(mask=False)
CREDENTIAL = b"(credential)"
HEAD_END = b"\r\n\r\n"


class Wheel:
    """Calls that are due, in one list for each tick. A call that is due later than the wheel has ticks comes early. No
    call can be cancelled."""

    def __init__(self) -> None:
        self._slots: list[list[Callable[[], None]]] = [[] for _ in range(SLOTS)]
        self._began_s = time.monotonic()
        self._tick = 0

    def add(self, after_s: float, call: Callable[[], None]) -> None:
        ticks = min(max(int(after_s / TICK_S), 1), SLOTS - 1)
        self._slots[(self._tick + ticks) % SLOTS].append(call)

    def next_in_s(self) -> float:
        return self._began_s + (self._tick + 1) * TICK_S - time.monotonic()

    def turn(self) -> None:
        """Makes the calls of the next tick if they are due."""
        if self.next_in_s() <= 0:
            self._tick += 1
            place = self._tick % SLOTS
            due, self._slots[place] = self._slots[place], []
            for call in due:
                call()


class LineEnd(Exception):
    """A connection ended; the text says why. `retry_after`: the header of the answer, if any. `person_must_act`: the
    control plane refused the agent for good."""

    def __init__(self, reason: str, retry_after: str | None = None, *, person_must_act: bool = False) -> None:
        super().__init__(reason)
        self.retry_after, self.person_must_act = retry_after, person_must_act


class LineOwner(Protocol):
    """The agent of a line. `beat` sends what is due and returns the seconds until the next call."""

    address: str
    context: ssl.SSLContext

    def request(self) -> bytes: ...

    def opened(self, line: "Line") -> None: ...

    def beat(self, line: "Line") -> float: ...

    def received(self, line: "Line", message: DownMessage) -> None: ...

    def ended(self, line: "Line", end: LineEnd) -> None: ...


class Network:
    """What all lines of a process share. `name`: that the server must show in its certificate."""

    def __init__(self, server: str, name: str) -> None:
        parts = urlsplit(server)
        self.server, self.name = server, name
        self.address = (str(parts.hostname), int(parts.port or 443))
        self.wheel = Wheel()
        self.settings = ConnectionSettings()
        self.lines: dict[int, Line] = {}
        self.epoll = select.epoll()

    def run(self, seconds: float) -> None:
        """Serves all lines for so long. A process that got no CPU time for a while handles what has arrived before each
        tick that it is behind, so that its agents do not miss time limits that agents on other hosts would meet."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            time.sleep(max(self.wheel.next_in_s(), 0.0))
            for number, _ in self.epoll.poll(0, MOST_EVENTS):
                if (line := self.lines.get(number)) is not None:
                    line.ready()
            self.wheel.turn()

    def close(self) -> None:
        for line in list(self.lines.values()):
            line.end(LineEnd("closed"))
        self.epoll.close()


class Line:
    """A connection from the attempt to its end. `is_open`: the WebSocket is open and the hello was sent."""

    __slots__ = ("_inbox", "_number", "_owner", "_pinged_at_s", "_socket", "_step", "is_open", "network", "opened_at_s")

    def __init__(self, network: Network, owner: LineOwner) -> None:
        self.network, self._owner = network, owner
        self.is_open = False
        self.opened_at_s = time.monotonic()
        self._pinged_at_s = 0.0
        self._inbox = b""
        self._socket: Any = None
        self._step: Callable[[], None] = self._connected
        self._connect()

    def send(self, message: UpMessage) -> None:
        self.send_frame(frame_of(message))

    def send_frame(self, frame: bytes) -> None:
        """Sends whole frames. If the kernel has no room for them, web has read nothing for long: the line ends."""
        if self._socket is not None:
            try:
                self._socket.send(frame)
            except OSError as error:
                self.end(LineEnd(str(error)))

    def ready(self) -> None:
        """There is something to read, or the connection attempt has ended."""
        try:
            self._step()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except LineEnd as end:
            self.end(end)
        except (OSError, ValueError) as error:
            self.end(LineEnd(str(error)))

    def end(self, end: LineEnd) -> None:
        """Closes the connection and reports to the owner. A second call does nothing."""
        if self._socket is None:
            return
        self.network.lines.pop(self._number, None)
        self._socket.close()
        self._socket = None
        del self._step  # it refers to this object, and the process collects no cycles
        self._owner.ended(self, end)
        self.is_open = False

    def _connect(self) -> None:
        raw = self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._number = raw.fileno()
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
        raw.bind((self._owner.address, 0))
        problem = raw.connect_ex(self.network.address)
        if problem not in (0, errno.EINPROGRESS):
            self.network.wheel.add(0, lambda: self.end(LineEnd(os.strerror(problem))))
            return
        self.network.lines[self._number] = self
        self.network.epoll.register(self._number, select.EPOLLOUT)
        self.network.wheel.add(self.network.settings.open_timeout_s, self._limit_opening)

    def _connected(self) -> None:
        raw = self._socket
        if problem := raw.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise LineEnd(os.strerror(problem))
        self._socket = self._owner.context.wrap_socket(
            raw, server_hostname=self.network.name, do_handshake_on_connect=False
        )
        self.network.epoll.modify(self._number, select.EPOLLIN)
        self._step = self._shake_hands
        self._shake_hands()

    def _shake_hands(self) -> None:
        self._socket.do_handshake()
        self._step = self._upgrade
        self._socket.send(self._owner.request())

    def _upgrade(self) -> None:
        self._inbox += self._read()
        head, end, rest = self._inbox.partition(HEAD_END)
        if not end:
            return
        self._inbox = rest
        if not head.startswith(b"HTTP/1.1 101 "):
            raise LineEnd(f"answered {head[9:12].decode('latin-1')}", _retry_after(head))
        self._step = self._receive
        self.is_open = True
        self._owner.opened(self)
        self._beat()
        self.network.wheel.add(self.network.settings.ping_interval_s, self._ping)
        self._take_frames()

    def _receive(self) -> None:
        data = self._read()
        if data == PONG and not self._inbox:
            self._pinged_at_s = 0.0
            return
        self._inbox += data
        self._take_frames()

    def _read(self) -> bytes:
        data: bytes = self._socket.recv(READ_BYTES)
        if not data:
            raise LineEnd("the connection closed")
        while self._socket.pending():
            data += self._socket.recv(READ_BYTES)
        return data

    def _take_frames(self) -> None:
        while self._socket is not None and (size := frame_size(self._inbox)):
            (head, payload), self._inbox = split_frame(self._inbox[:size]), self._inbox[size:]
            match head & 0x0F:
                case Opcode.TEXT:
                    self._owner.received(self, decode_down(payload))
                case Opcode.PING:
                    self.send_frame(Frame(Opcode.PONG, payload).serialize(mask=True))
                case Opcode.PONG:
                    self._pinged_at_s = 0.0
                case Opcode.CLOSE:
                    raise LineEnd(f"the connection closed: {payload[2:60].decode(errors='replace')}")

    def _beat(self) -> None:
        if self._socket is not None:
            self.network.wheel.add(self._owner.beat(self), self._beat)

    def _ping(self) -> None:
        if self._socket is None:
            return
        now_s = time.monotonic()
        if not self._pinged_at_s:
            self._pinged_at_s = now_s
            self.send_frame(PING)
        elif now_s - self._pinged_at_s > self.network.settings.ping_timeout_s:
            self.end(LineEnd("no pong"))
        self.network.wheel.add(self.network.settings.ping_interval_s, self._ping)

    def _limit_opening(self) -> None:
        if not self.is_open:
            self.end(LineEnd("timed out during opening handshake"))


def upgrade_request(server: str, credential: str) -> bytes:
    """The head that asks for the agents' WebSocket, as the library of the agents writes it."""
    return _upgrade_head(server).replace(CREDENTIAL, credential.encode())


@lru_cache
def _upgrade_head(server: str) -> bytes:
    """Without the credential, with one key for all connections."""
    request = ClientProtocol(parse_uri(f"ws{server.removeprefix('http')}/agents/ws")).connect()
    request.headers["Authorization"] = f"Bearer {CREDENTIAL.decode()}"
    return request.serialize()


def frame_of(message: UpMessage) -> bytes:
    return Frame(Opcode.TEXT, encode(message)).serialize(mask=True)


def frame_size(data: bytes) -> int:
    """Bytes of the first frame of a server in `data`; 0 if it is incomplete."""
    if len(data) < 2:
        return 0
    length, extended = data[1] & 0x7F, {126: 2, 127: 8}.get(data[1] & 0x7F, 0)
    if extended:
        length = int.from_bytes(data[2 : 2 + extended])
    size = 2 + extended + length
    return size if len(data) >= 2 + extended and len(data) >= size else 0


def split_frame(frame: bytes) -> tuple[int, bytes]:
    """The first byte and the payload of a server's whole frame."""
    return frame[0], frame[2 + {126: 2, 127: 8}.get(frame[1] & 0x7F, 0) :]


def _retry_after(head: bytes) -> str | None:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"retry-after":
            return value.strip().decode("latin-1")
    return None


def loopback_address(number: int) -> str:
    """One for each agent, as in a fleet: web limits and shares out connections by address."""
    return f"127.{64 + (number >> 16)}.{(number >> 8) & 255}.{number & 255}"
