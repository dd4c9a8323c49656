"""How an agent gets and keeps its identity: the addresses of the control plane, the credential that a join token is
exchanged for, and the certificate, which is renewed over the agent's connection. The credential is readable by its
owner only and never logged. Nothing here ends a connection or retries an enrolment; `connection` does."""

import asyncio
import json
import logging
import secrets
import socket
import ssl
import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from engine_agent.node.identity import Identity, Validity
from engine_agent.node.journal import write_durably
from engine_agent.protocol.identity import IdentityKind, IdentityName, control_name
from engine_agent.protocol.messages import Certificate, CertificateRequest, Trust
from engine_agent.protocol.states import AgentKind
from engine_agent.protocol.strict_json import strict_loads

SERVERS_FILE = "servers.json"
MAX_SERVERS, MAX_URL_CHARS = 16, 200
SILENT_HOST_S = 3
"""Time to notice that a host of the control plane is off, if there is another one."""

log = logging.getLogger(__name__)


class Servers:
    """The addresses of the control plane as one agent uses them: one address as long as it answers.

    Agents start with different addresses, which spreads them. The command line names the first ones. The control plane
    sends the current ones, which are stored, so that an agent finds another host while the one of its command line is
    off. Raises ValueError if `stated`, separated by commas, has no or an invalid address."""

    def __init__(self, stated: str, home: Path, agent_id: str) -> None:
        self._file = home / SERVERS_FILE
        self._share = zlib.crc32(agent_id.encode())
        named = checked(stated.split(","))
        # Addresses of the command line stay: the control plane may have moved while this agent was off.
        self._urls = self._in_own_order(self._stored_urls() or named)
        self._urls += [url for url in named if url not in self._urls]
        self._tried = 0

    @property
    def current(self) -> str:
        """The address to use now, without a trailing slash."""
        return self._urls[0]

    @property
    def all(self) -> tuple[str, ...]:
        """All addresses, in this agent's order."""
        return tuple(self._urls)

    @property
    def are_several(self) -> bool:
        return len(self._urls) > 1

    @property
    def has_untried(self) -> bool:
        """Whether one was not tried since the last one answered."""
        return self._tried < len(self._urls)

    def answered(self) -> None:
        """Call when the current address serves this agent."""
        self._tried = 0

    def failed(self) -> None:
        """Moves on to the next address."""
        self._tried += 1
        self._urls = [*self._urls[1:], self._urls[0]]

    def start_round(self) -> None:
        """Call after a pause when all were tried."""
        self._tried = 0

    def update(self, urls: Sequence[str]) -> None:
        """Stores the addresses that the control plane sent. Without a usable address nothing changes."""
        if not urls:
            return
        try:
            named = checked(urls)
        except ValueError as error:
            log.error("the control plane named no usable servers: %s", error)
            return
        if set(named) == set(self._urls):
            return
        current, self._urls = self.current, self._in_own_order(named)
        if current in self._urls:
            while self.current != current:
                self._urls = [*self._urls[1:], self._urls[0]]
        log.info("the control plane is at %s", ", ".join(self._urls))
        try:
            write_durably(self._file, json.dumps(sorted(named)).encode(), mode=0o600)
        except OSError as error:
            log.error("the servers cannot be stored: %s", error)

    def _stored_urls(self) -> list[str]:
        try:
            return checked(strict_loads(self._file.read_bytes()))
        except (OSError, ValueError):
            return []

    def _in_own_order(self, urls: list[str]) -> list[str]:
        first = self._share % len(urls)
        return [*urls[first:], *urls[:first]]


def checked(urls: object) -> list[str]:
    """Addresses without trailing slashes and duplicates. Raises ValueError if an address is invalid, or there are none
    or too many."""
    if not isinstance(urls, list | tuple) or not 0 < len(urls) <= MAX_SERVERS:
        raise ValueError(f"the control plane has 1 to {MAX_SERVERS} addresses")
    return list(dict.fromkeys(_valid_url(url) for url in urls))


def _valid_url(url: object) -> str:
    text = url.strip().rstrip("/") if isinstance(url, str) else ""
    parts = urlsplit(text)
    is_plain = text.isascii() and text.isprintable() and " " not in text and len(text) <= MAX_URL_CHARS
    if not is_plain or parts.scheme not in {"http", "https"} or not parts.hostname or parts.path or parts.query:
        raise ValueError(f"server must be http://HOST:PORT or https://HOST:PORT, not {url!r:.220}")
    parts.port  # noqa: B018 - raises where it is no number
    return text


def notice_silence(line: socket.socket) -> None:
    """Lets the kernel close a connection whose other host is silent for `SILENT_HOST_S`, with its own probes, at no
    cost for processes."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 1),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, SILENT_HOST_S - 1),
        (socket.TCP_USER_TIMEOUT, SILENT_HOST_S * 1000),
    ):
        line.setsockopt(socket.IPPROTO_TCP, option, value)


ENROL_TIMEOUT_S = 10.0
MAX_RESPONSE_BYTES = 64 * 1024
CREDENTIAL_FILE = "credential"
NONCE_FILE = "enrolment-nonce"
NONCE_BYTES = 32
MAX_CREDENTIAL_CHARS = 256


class EnrolmentRefused(Exception):
    """The control plane rejected the enrolment; an operator must act (new join token, or the id is taken)."""


class EnrolmentUnreachable(Exception):
    """No usable answer from the control plane; a later attempt may succeed."""


class _EnrolmentAnswer(msgspec.Struct):
    credential: str


@dataclass(frozen=True, slots=True)
class Enrolment:
    """The identity of an agent before it has a certificate. `server`: one address of the control plane, or several
    separated by commas. Raises ValueError if `server` is not an http:// or https:// address."""

    server: str
    kind: AgentKind
    agent_id: str
    home: Path
    join_token: str | None = None
    servers: Servers = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "servers", Servers(self.server, self.home, self.agent_id))

    def stored_credential(self) -> str | None:
        """Returns the stored credential, or None if this agent never enrolled."""
        try:
            return (self.home / CREDENTIAL_FILE).read_text(encoding="utf-8").strip() or None
        except FileNotFoundError:
            return None

    async def enrol(self, shown_by: Identity | None = None) -> str:
        """Exchanges the join token for a credential at `SERVER/agents/enrol`, stores it with mode 0600, and returns it.

        `shown_by`: whose certificate to show, if the token is another agent's credential. Raises EnrolmentRefused if
        there is no join token, or the answer was 4xx (not 429); the text has the reason. Raises EnrolmentUnreachable
        without an answer within `ENROL_TIMEOUT_S`, on a 5xx or 429, or on an answer without a credential. Raises
        OSError if the home could not store the nonce or the credential."""
        if self.join_token is None:
            raise EnrolmentRefused(f"{self.agent_id} has no usable credential and was given no join token")
        credential = await asyncio.to_thread(_exchange, self, self.join_token, self._nonce(), shown_by)
        Identity(self.home).drop_certificate()  # the enrolment revoked it
        self.store_credential(credential)
        return credential

    def store_credential(self, credential: str) -> None:
        if not credential.isascii() or not credential.isprintable() or not 0 < len(credential) <= MAX_CREDENTIAL_CHARS:
            raise ValueError(f"a credential has 1 to {MAX_CREDENTIAL_CHARS} printable characters")
        write_durably(self.home / CREDENTIAL_FILE, credential.encode() + b"\n", mode=0o600)

    def _nonce(self) -> str:
        """The agent's secret, stored before it is sent: the first use of the join token binds the token to it."""
        path = self.home / NONCE_FILE
        try:
            if known := path.read_text(encoding="ascii").strip():
                return known
        except (FileNotFoundError, UnicodeDecodeError):
            pass
        nonce = secrets.token_hex(NONCE_BYTES)
        write_durably(path, nonce.encode() + b"\n", mode=0o600)
        return nonce


class _Verified(HTTPConnection):
    """HTTP over TLS to a server with this name, at any address. It ignores proxies of the environment,
    because the control plane is inside the network."""

    def __init__(self, host: str, port: int | None, context: ssl.SSLContext, name: str, limit_s: float) -> None:
        super().__init__(host, port or 443, timeout=limit_s)
        self._context = context
        self._name = name

    def connect(self) -> None:
        super().connect()
        self.sock = self._context.wrap_socket(self.sock, server_hostname=self._name)


def _exchange(enrolment: Enrolment, join_token: str, nonce: str, shown_by: Identity | None) -> str:
    url = f"{enrolment.servers.current}/agents/enrol"
    identity = shown_by or Identity(enrolment.home)
    try:
        connection = control_connection(
            enrolment.servers.current, identity, ENROL_TIMEOUT_S, shows_certificate=shown_by is not None
        )
        try:
            connection.request(
                "POST",
                urlsplit(url).path,
                body=json.dumps({"kind": enrolment.kind, "id": enrolment.agent_id, "nonce": nonce}),
                headers={"Authorization": f"Bearer {join_token}", "Content-Type": "application/json"},
            )
            return _credential(connection.getresponse(), url)
        finally:
            connection.close()
    except msgspec.DecodeError as error:
        raise EnrolmentUnreachable(f"{url} answered without a credential: {error}") from error
    except (OSError, HTTPException, ValueError) as error:
        raise EnrolmentUnreachable(f"{url}: {error}") from error


def control_connection(
    server: str, identity: Identity, limit_s: float, *, shows_certificate: bool = False
) -> HTTPConnection:
    """HTTP to the control plane at this address, not opened yet. A new agent has no certificate to show, and one that
    enrols again may have a revoked one. Raises OSError, ValueError if the home has no authorities of a fleet."""
    parts = urlsplit(server)
    host = parts.hostname or ""
    if parts.scheme == "http":
        return HTTPConnection(host, parts.port, timeout=limit_s)
    name = control_name(identity.fleet()).dns
    context = identity.client_context(shows_certificate=shows_certificate)
    return _Verified(host, parts.port, context, name, limit_s)


def node_connection(node: str, address: str, port: int, identity: Identity, limit_s: float) -> HTTPConnection:
    """HTTP to another node of the fleet, not opened yet; both show their certificates. Raises OSError, ValueError if
    the home has no authorities of a fleet."""
    name = IdentityName(identity.fleet(), IdentityKind.NODE, node).dns
    return _Verified(address, port, identity.client_context(), name, limit_s)


def _credential(answer: HTTPResponse, url: str) -> str:
    body = answer.read(MAX_RESPONSE_BYTES)
    if answer.status == HTTPStatus.OK:
        return msgspec.json.decode(body, type=_EnrolmentAnswer).credential
    reason = f"{url} answered {answer.status}: {_reason(body, answer.reason)}"
    may_pass = answer.status >= 500 or answer.status == HTTPStatus.TOO_MANY_REQUESTS
    raise EnrolmentUnreachable(reason) if may_pass else EnrolmentRefused(reason)


def _reason(body: bytes, otherwise: str) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return otherwise


REQUEST_AGAIN_S = 30.0
"""Retry interval without an answer. The control plane signs one each
`fleet.agents.consumers.certificates.REQUESTS_PER_S`."""
REQUEST_AGAIN_MOST_S = 600.0
"""Retry interval after several requests without a valid certificate: none was signed, or this host's clock is wrong."""
CHECK_AT_LEAST_EVERY_S = 60.0
"""The clock of a host may be set."""
SPREAD_S = 5.0
"""Spreads the requests of all agents after a change of the authorities."""

log = logging.getLogger(__name__)


def request_again_s(unsuccessful: int) -> float:
    """Seconds until the next request after `unsuccessful` requests without a valid certificate. The caller adds up to
    the same again at random."""
    return float(min(REQUEST_AGAIN_S * 2 ** min(max(unsuccessful - 1, 0), 10), REQUEST_AGAIN_MOST_S))


class CertificateRenewal:
    """Keeps an agent's certificate valid over its connection: requests the first, renews it after half of its life, and
    sooner when the authorities change. It stores the authorities that the control plane sends. An agent whose
    certificate cannot be renewed keeps the one that it has. `draw` is uniform in [0, 1)."""

    def __init__(self, identity: Identity, draw: Callable[[], float], on_change: Callable[[], None]) -> None:
        self._identity = identity
        self._draw = draw
        self._on_change = on_change
        self._stored = asyncio.Event()
        self._share = draw()
        self._bundle_changed = False
        self._unsuccessful = 0
        self._clock_reported = False

    async def run(self, send: Callable[[CertificateRequest], Awaitable[None]]) -> None:
        """Requests due certificates over one connection, until cancelled."""
        clock, asked_at_s, draw = asyncio.get_running_loop().time, -REQUEST_AGAIN_MOST_S * 2, 0.0
        while True:
            again_at_s = asked_at_s + request_again_s(self._unsuccessful) * (1 + draw)
            wait_s = max(self._due_in_s(datetime.now(UTC)), again_at_s - clock())
            if wait_s > 0:
                await self._pause(min(wait_s, CHECK_AT_LEAST_EVERY_S))
                continue
            if self._bundle_changed:
                await asyncio.sleep(SPREAD_S * self._draw())
            try:
                request = await asyncio.to_thread(self._identity.signing_request)
            except OSError as error:
                log.error("cannot request a certificate: %s", error)
            else:
                self._unsuccessful += 1
                await send(CertificateRequest(request, self._identity.bundle_digest()))
            asked_at_s, draw = clock(), self._draw()

    async def take(self, message: Certificate | Trust) -> None:
        before = self._identity.stamp()
        try:
            await asyncio.to_thread(self._store, message)
        except (OSError, ValueError) as error:
            log.error("cannot store what the control plane sent: %s", error)
        if self._identity.stamp() != before:
            self._on_change()
        self._stored.set()

    def _store(self, message: Certificate | Trust) -> None:
        trust = message if isinstance(message, Trust) else message.trust
        believed = self._identity.bundle_digest()
        if isinstance(message, Certificate):
            validity = self._identity.store(chain=message.chain, bundle=trust.bundle, revoked=trust.revoked)
            self._bundle_changed, self._share = False, self._draw()
            log.info("%s has a certificate until %s", validity.name, validity.not_after.isoformat())
            self._check_clock(validity, datetime.now(UTC))
            return
        self._identity.store_trust(bundle=trust.bundle, revoked=trust.revoked)
        if self._identity.bundle_digest() != believed:
            self._bundle_changed, self._unsuccessful = True, 0

    def _check_clock(self, validity: Validity, now: datetime) -> None:
        if validity.not_before <= now < validity.not_after:
            self._unsuccessful, self._clock_reported = 0, False
        elif not self._clock_reported:
            self._clock_reported = True
            moments = (now, validity.not_before, validity.not_after)
            log.error(
                "this host's clock says %s, and the new certificate is valid from %s to %s: set the clock",
                *(moment.strftime("%Y-%m-%d %H:%M:%S UTC") for moment in moments),
            )

    def _due_in_s(self, now: datetime) -> float:
        validity = self._identity.validity()
        if validity is None or self._bundle_changed or not validity.not_before <= now < validity.not_after:
            return 0.0
        return (validity.renew_after(self._share) - now).total_seconds()

    async def _pause(self, seconds: float) -> None:
        self._stored.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._stored.wait()
        except TimeoutError:
            return
