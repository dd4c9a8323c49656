"""The agent's connection to the control plane: enrol, connect, send hello and reports, receive, reconnect. Node,
machine and ingress agents share it. Only the newest report waits to be sent, and every new connection starts with it.
It passes on orders without reading them, and never raises because the control plane is unreachable."""

import asyncio
import logging
import random
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidMessage, InvalidStatus, WebSocketException
from websockets.http11 import Response

from engine_agent.node.enrolment import (
    CertificateRenewal,
    Enrolment,
    EnrolmentRefused,
    EnrolmentUnreachable,
    notice_silence,
)
from engine_agent.node.identity import Identity
from engine_agent.node.planning.heartbeats import still_holds
from engine_agent.node.telemetry.exposition import agent_exposition
from engine_agent.protocol.codec import MAX_FRAME_BYTES, BadMessage, MessageAssembly, bounded_fault, decode_down, encode
from engine_agent.protocol.identity import CERTIFICATE_WANTED, control_name
from engine_agent.protocol.ingress_messages import IngressReport, TablePart
from engine_agent.protocol.machine_messages import MachineReport
from engine_agent.protocol.messages import (
    Certificate,
    Credential,
    DownMessage,
    Fault,
    Heartbeat,
    Hello,
    LogTail,
    Order,
    Refused,
    Report,
    Trust,
    UpMessage,
)
from engine_agent.protocol.request_messages import RequestWindow

log = logging.getLogger(__name__)

REPORT_INTERVAL_S = 2.0
"""Interval of reports and heartbeats without changes (design.md, faults)."""
REPORT_JITTER = 0.1
"""Share by which each interval varies, so that agents started together do not report together."""
MAX_WAITING_FAULTS = 32
MAX_WAITING_WINDOWS = 4
"""Of samples of requests: two minutes, so that a reconnection loses none."""
MAX_RETRY_AFTER_S = 120
"""Upper limit for `Retry-After`, which may be wrong; the next process of the control plane may know better."""
MAX_RETRY_AFTER_DIGITS = 9
REFUSED_IN_TLS = (InvalidMessage, ssl.SSLError)
"""Errors of a rejected certificate: in TLS 1.3 its alert arrives after the handshake. A busy or exiting server causes
the same errors."""
DOUBTED_AFTER = 5
"""After this many such errors in a row, one attempt shows no certificate."""
LOST_AFTER = 2
"""After this many such attempts were rejected for lack of a certificate, the stored certificate counts as lost."""
MAX_REASON_CHARS = 300


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """Times of a connection. Backoff as in the protocol; the others limit how long a dead peer goes unnoticed."""

    backoff_min_s: float = 0.2
    backoff_max_s: float = 5.0
    refused_backoff_s: float = 30.0
    stable_after_s: float = 5.0
    open_timeout_s: float = 10.0
    send_timeout_s: float = 10.0
    close_timeout_s: float = 1.0
    ping_interval_s: float = 10.0
    ping_timeout_s: float = 10.0
    """Pings only detect a stopped process: the kernel notices a dead host earlier (`notice_silence`)."""
    other_server_s: float = 1.0
    """Longest pause before the next server is tried: agents of a dead server must not all connect at the same
    moment."""
    other_open_timeout_s: float = 2.0
    """Timeout while there is another server to try."""


@dataclass(frozen=True, slots=True)
class ConnectionStatus:
    """Whether the connection is open, and otherwise why not."""

    connected: bool
    reason: str


class _Refusal(Exception):
    """The control plane closed the connection. `person_must_act`: quick retries cannot help."""

    def __init__(self, reason: str, person_must_act: bool) -> None:
        super().__init__(reason)
        self.person_must_act = person_must_act


def backoff_s(settings: ConnectionSettings, failures: int, draw: float) -> float:
    """Seconds to wait after `failures` failed attempts in a row; `draw` is uniform in [0, 1)."""
    ceiling = min(settings.backoff_max_s, settings.backoff_min_s * 2.0 ** min(failures, 16))
    return settings.backoff_min_s + draw * (ceiling - settings.backoff_min_s)


def retry_after_s(retry_after: str | None, draw: float) -> float:
    """Seconds to wait after an answer with `Retry-After`, from half to one and a half of it; `draw` is uniform in [0,
    1). 0 without a valid value."""
    stated = retry_after or ""
    if not (stated.isascii() and stated.isdigit()) or len(stated) > MAX_RETRY_AFTER_DIGITS:
        return 0.0
    return min(int(stated), MAX_RETRY_AFTER_S) * (0.5 + draw)


def report_interval_s(draw: float) -> float:
    """Seconds until the next report, `REPORT_INTERVAL_S` ± `REPORT_JITTER`; `draw` is uniform in [0, 1)."""
    return REPORT_INTERVAL_S * (1 + REPORT_JITTER * (2 * draw - 1))


class AgentConnection:
    """Keeps one agent connected. `hello` is called for every connection. `on_message` gets every `Order`; it must
    record the order and return quickly, because no frame is read meanwhile. Its errors are logged. `on_identity` is
    called when files of `identity` have changed."""

    def __init__(
        self,
        *,
        enrolment: Enrolment,
        hello: Callable[[], Hello],
        on_message: Callable[[Order], None],
        settings: ConnectionSettings | None = None,
        on_identity: Callable[[], None] = lambda: None,
    ) -> None:
        self._enrolment = enrolment
        self.identity = Identity(enrolment.home)
        self._renewal = CertificateRenewal(self.identity, random.random, on_identity)
        self._agent_id = enrolment.agent_id
        self._servers = enrolment.servers
        self._hello = hello
        self._on_message = on_message
        self._settings = settings or ConnectionSettings()
        self._report: Report | IngressReport | MachineReport | None = None
        self._faults: deque[Fault] = deque(maxlen=MAX_WAITING_FAULTS)
        self._logs: LogTail | None = None
        self._requests: deque[RequestWindow] = deque(maxlen=MAX_WAITING_WINDOWS)
        self._waiting = asyncio.Event()
        self._must_enrol = False
        self._retry_after_s = 0.0
        self._failures = 0
        self._certificate_refused = False
        self._refused_in_tls = self._certificate_wanted = 0
        self._is_certified = False
        self._again = asyncio.Event()
        self.status = ConnectionStatus(connected=False, reason="not connected yet")

    def send(self, report: Report | IngressReport | MachineReport) -> None:
        """Sends the report as soon as there is a connection; a newer one replaces it until then. A heartbeat is sent
        instead while the last one still holds. `seq` is set here."""
        self._report = report
        self._waiting.set()

    def send_fault(self, fault: Fault) -> None:
        """Sends evidence of a fault; up to `MAX_WAITING_FAULTS` wait for a connection, then the oldest is dropped."""
        self._faults.append(bounded_fault(fault))
        self._waiting.set()

    def send_logs(self, logs: LogTail) -> None:
        self._logs = logs
        self._waiting.set()

    def send_requests(self, window: RequestWindow) -> None:
        """Sends samples of requests; up to `MAX_WAITING_WINDOWS` wait for a connection, then the oldest is dropped."""
        self._requests.append(window)
        self._waiting.set()

    def resend_hello(self) -> None:
        """Sends a changed hello, on a new connection."""
        self._again.set()

    def exposition(self) -> str:
        """Metrics for Prometheus: the newest report, and the state of the connection."""
        return agent_exposition(self._agent_id, self.status.connected, self._report)

    async def run(self) -> None:
        while True:
            opened_at = asyncio.get_running_loop().time()
            refused_for_good, self._retry_after_s = False, 0.0
            try:
                reason = await self._serve_connection()
            except _Refusal as refusal:
                reason, refused_for_good = str(refusal), refusal.person_must_act
            has_answered = self.status.connected
            was_stable = asyncio.get_running_loop().time() - opened_at >= self._settings.stable_after_s
            self._failures = 0 if was_stable and has_answered else self._failures + 1
            wait_s = self._settings.refused_backoff_s if refused_for_good else 0.0
            wait_s = max(wait_s, self._retry_after_s, backoff_s(self._settings, self._failures, random.random()))
            if not self._again.is_set() and not refused_for_good:
                wait_s = self._select_other_server(has_answered, wait_s)
            self._note_lost(reason, wait_s)
            await asyncio.sleep(wait_s)

    def _select_other_server(self, has_answered: bool, wait_s: float) -> float:
        """Selects another server for the next attempt. The pause is short if it was not tried since a server answered.
        Returns seconds."""
        if has_answered:
            self._servers.answered()
        self._servers.failed()
        if self._servers.has_untried:
            return min(wait_s, self._settings.other_server_s * random.random())
        self._servers.start_round()
        return wait_s

    def _note_lost(self, reason: str, wait_s: float) -> None:
        if reason != self.status.reason:
            log.warning("no control plane: %s; next attempt in %.1f s", reason, wait_s)
        self.status = ConnectionStatus(connected=False, reason=reason)

    async def _serve_connection(self) -> str:
        try:
            credential = await self._credential()
            shown, self._certificate_refused = self._shows_certificate, False
            try:
                async with self._open(credential, shows_certificate=shown) as socket:
                    return await self._serve(socket, certified=shown)
            except InvalidStatus as error:
                self._retry_after_s = retry_after_s(error.response.headers.get("Retry-After"), random.random())
                return self._handshake_failed(error.response, certified=shown)
            except REFUSED_IN_TLS:
                if shown and not self.status.connected:
                    self._refused_in_tls += 1
                    self._certificate_refused = self._refused_in_tls % DOUBTED_AFTER == 0
                raise
        except ConnectionClosed as error:
            return f"the connection closed: {error}"
        except (OSError, TimeoutError, WebSocketException, EnrolmentUnreachable, ValueError) as error:
            return f"{self._servers.current}: {str(error) or type(error).__name__}"

    @property
    def _shows_certificate(self) -> bool:
        """A rejected certificate must not lock out an agent that needs none."""
        return self.identity.has_certificate and not self._certificate_refused

    def _handshake_failed(self, response: Response, *, certified: bool) -> str:
        status = response.status_code
        if status not in (401, 403):
            return f"{self._servers.current}/agents/ws answered {status}"
        self._certificate_refused = certified
        why = f"the credential was refused ({status})"
        if CERTIFICATE_WANTED in response.headers:
            why = (response.body or b"").decode(errors="replace")[:MAX_REASON_CHARS]
            self._certificate_wanted += 1
            if self.identity.has_certificate and self._certificate_wanted < LOST_AFTER:
                return why
        if self._enrolment.join_token is None:
            raise _Refusal(f"{why}, and there is no join token", person_must_act=True)
        self._must_enrol = True
        return f"{why}; enrolling again"

    async def _credential(self) -> str:
        stored = self._enrolment.stored_credential()
        if stored is not None and not self._must_enrol:
            return stored
        self._must_enrol = False  # if that fails, the stored credential is tried next: it may be valid again
        try:
            return await self._enrolment.enrol()
        except EnrolmentRefused as error:
            raise _Refusal(str(error), person_must_act=True) from error

    def _open(self, credential: str, *, shows_certificate: bool) -> connect:
        return connect(
            f"ws{self._servers.current.removeprefix('http')}/agents/ws",
            **self._tls(shows_certificate=shows_certificate),
            additional_headers={"Authorization": f"Bearer {credential}"},
            compression=None,
            proxy=None,
            open_timeout=self._open_timeout_s(),
            close_timeout=self._settings.close_timeout_s,
            ping_interval=self._settings.ping_interval_s,
            ping_timeout=self._settings.ping_timeout_s,
            max_size=MAX_FRAME_BYTES,
        )

    def _open_timeout_s(self) -> float:
        """Short while another server may be better; after all have failed, as long as a busy one may take."""
        is_first_round = self._servers.are_several and self._failures < len(self._servers.all)
        return self._settings.other_open_timeout_s if is_first_round else self._settings.open_timeout_s

    def _tls(self, *, shows_certificate: bool) -> dict[str, Any]:
        if not self._servers.current.startswith("https://"):
            return {}
        name = control_name(self.identity.fleet()).dns
        return {"ssl": self.identity.client_context(shows_certificate=shows_certificate), "server_hostname": name}

    async def _serve(self, socket: ClientConnection, *, certified: bool) -> str:
        self._again.clear()
        self._refused_in_tls, self._certificate_wanted, self._is_certified = 0, 0, certified
        if self._servers.are_several:
            notice_silence(socket.transport.get_extra_info("socket"))
        await self._send_message(socket, self._hello())
        self.status = ConnectionStatus(connected=True, reason="")
        log.info("connected to %s as %s", self._servers.current, self._agent_id)
        sender = asyncio.create_task(self._send_reports(socket))
        renewal = asyncio.create_task(self._renewal.run(lambda request: self._send_message(socket, request)))
        listener = asyncio.create_task(self._listen(socket))
        again = asyncio.create_task(self._again.wait())
        try:
            await asyncio.wait({sender, renewal, listener, again}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sender, renewal, listener, again):
                task.cancel()
            ends = await asyncio.gather(sender, renewal, listener, return_exceptions=True)
        for end in reversed(ends):  # the error of the listener explains the end best
            if isinstance(end, Exception):
                raise end
        return "reconnecting with a new hello" if self._again.is_set() else "the connection closed"

    async def _send_reports(self, socket: ClientConnection) -> None:
        clock = asyncio.get_running_loop().time
        seq, sent, sent_at_s = 0, None, 0.0
        if self._report is not None:
            self._waiting.set()  # every connection starts with the complete state
        while True:
            await self._waiting.wait()
            self._waiting.clear()
            while self._faults:
                await self._send_message(socket, self._faults[0])
                self._faults.popleft()
            if self._logs is not None:
                logs, self._logs = self._logs, None
                await self._send_message(socket, logs)
            while self._requests:
                await self._send_message(socket, self._requests.popleft())
            report = self._report
            if isinstance(report, Report) and sent and still_holds(sent, report, clock() - sent_at_s):
                await self._send_message(socket, Heartbeat(seq))
            elif report is not None:
                seq, sent_at_s = seq + 1, clock()
                sent = report if isinstance(report, Report) else None
                await self._send_message(socket, msgspec.structs.replace(report, seq=seq))

    async def _send_message(self, socket: ClientConnection, message: UpMessage) -> None:
        try:
            frame = encode(message)
        except BadMessage as error:
            log.error("not sent: %s: %s", type(message).__name__, error)
            return
        async with asyncio.timeout(self._settings.send_timeout_s):
            await socket.send(frame, text=True)

    async def _listen(self, socket: ClientConnection) -> None:
        assembly = MessageAssembly()
        async for frame in socket:
            try:
                received = decode_down(frame)
                message = assembly.take(received) if isinstance(received, TablePart) else received
            except BadMessage as error:
                log.error("ignored a frame from the control plane: %s", error)
                continue
            if message is None:
                continue
            await self._handle_message(message)

    async def _handle_message(self, message: DownMessage) -> None:
        match message:
            case Refused():
                raise _Refusal(f"refused by the control plane: {message.reason}", person_must_act=not message.retry)
            case Certificate() | Trust():
                self._servers.update((message if isinstance(message, Trust) else message.trust).servers)
                await self._renewal.take(message)
                self._show_first_certificate()
            case Credential():
                await self._take_credential(message)
            case TablePart():
                return  # `_listen` passes on the complete message
            case _:
                self._deliver(message)

    def _show_first_certificate(self) -> None:
        """Reconnects with the first certificate: from then on a stolen credential is useless without it."""
        if self._servers.current.startswith("https://") and not self._is_certified and self.identity.has_certificate:
            self._again.set()

    async def _take_credential(self, message: Credential) -> None:
        """Stores it and reconnects with it immediately; the previous one is valid until then."""
        try:
            await asyncio.to_thread(self._enrolment.store_credential, message.credential)
        except (OSError, ValueError) as error:
            log.error("the new credential cannot be stored; the previous one stays in use: %s", error)
            return
        log.info("a new credential replaces the previous one")
        self._again.set()

    def _deliver(self, message: Order) -> None:
        try:
            self._on_message(message)
        except Exception:
            # An error in one message must not end the connection, over which the next one arrives.
            log.exception("could not process %s", type(message).__name__)
