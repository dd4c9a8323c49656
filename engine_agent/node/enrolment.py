"""How an agent gets and keeps its identity: the addresses of the control plane, the credential that a join token is
exchanged for, and the certificate, which is renewed over the agent's connection.

The credential is readable by its owner only and never logged. Nothing here ends a connection or retries an enrolment;
`connection` does.
"""

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
from engine_agent.protocol.identity import control_name
from engine_agent.protocol.messages import Certificate, CertificateRequest, Trust
from engine_agent.protocol.states import AgentKind
from engine_agent.protocol.strict_json import strict_loads

SERVERS_FILE = "servers.json"
MAX_SERVERS, MAX_URL_CHARS = 16, 200
SILENT_HOST_S = 3
"""A host of the control plane that is off is noticed after this long, where there is another one."""

log = logging.getLogger(__name__)


class Servers:
    """Of the agent with this id. Agents begin at different ones, so that each gets its share.

    Raises:
        ValueError: `stated`, separated by commas, has no usable address or one that is none.
    """

    def __init__(self, stated: str, home: Path, agent_id: str) -> None:
        self._file = home / SERVERS_FILE
        self._share = zlib.crc32(agent_id.encode())
        named = checked(stated.split(","))
        # Also those of the command line: the control plane may have moved while this agent was not there to hear it.
        self._urls = self._in_own_order(self._kept() or named)
        self._urls += [url for url in named if url not in self._urls]
        self._tried = 0

    @property
    def current(self) -> str:
        """The address to use now, without a slash at its end."""
        return self._urls[0]

    @property
    def all(self) -> tuple[str, ...]:
        """Each of them, in the order of this agent."""
        return tuple(self._urls)

    @property
    def are_several(self) -> bool:
        return len(self._urls) > 1

    @property
    def has_untried(self) -> bool:
        """Whether one was not tried since the last one answered."""
        return self._tried < len(self._urls)

    def answered(self) -> None:
        """The current one serves this agent."""
        self._tried = 0

    def failed(self) -> None:
        """The current one does not: the next one is."""
        self._tried += 1
        self._urls = [*self._urls[1:], self._urls[0]]

    def begin_again(self) -> None:
        """All were tried, and there was a pause."""
        self._tried = 0

    def learn(self, urls: Sequence[str]) -> None:
        """Take over what the control plane names, and keep it. Nothing, or nothing usable, changes nothing."""
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
            log.error("not kept: %s", error)

    def _kept(self) -> list[str]:
        try:
            return checked(strict_loads(self._file.read_bytes()))
        except (OSError, ValueError):
            return []

    def _in_own_order(self, urls: list[str]) -> list[str]:
        first = self._share % len(urls)
        return [*urls[first:], *urls[:first]]


def checked(urls: object) -> list[str]:
    """Addresses without a slash at their end, each once.

    Raises:
        ValueError: one is none, or there are none or too many.
    """
    if not isinstance(urls, list | tuple) or not 0 < len(urls) <= MAX_SERVERS:
        raise ValueError(f"the control plane has 1 to {MAX_SERVERS} addresses")
    return list(dict.fromkeys(_checked(url) for url in urls))


def _checked(url: object) -> str:
    text = url.strip().rstrip("/") if isinstance(url, str) else ""
    parts = urlsplit(text)
    is_plain = text.isascii() and text.isprintable() and " " not in text and len(text) <= MAX_URL_CHARS
    if not is_plain or parts.scheme not in {"http", "https"} or not parts.hostname or parts.path or parts.query:
        raise ValueError(f"server must be http://HOST:PORT or https://HOST:PORT, not {url!r:.220}")
    parts.port  # noqa: B018 - raises where it is no number
    return text


def notice_silence(line: socket.socket) -> None:
    """Have the kernel end a connection whose other host has said nothing for `SILENT_HOST_S`, by its own probes: they
    cost no process anything."""
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
    """The control plane refused; an operator must act (another join token, or the id is taken)."""


class EnrolmentUnreachable(Exception):
    """The control plane did not answer as one; trying again later may help."""


class _Answer(msgspec.Struct):
    credential: str


@dataclass(frozen=True, slots=True)
class Enrolment:
    """Who an agent is, where it keeps its credential, and what it can get one with. `server` names the control plane:
    one address, or several separated by commas.

    Raises:
        ValueError: `server` is not an http:// or https:// address.
    """

    server: str
    kind: AgentKind
    agent_id: str
    home: Path
    join_token: str | None = None
    servers: Servers = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "servers", Servers(self.server, self.home, self.agent_id))

    def stored_credential(self) -> str | None:
        """Return the stored credential, or None if this agent never enrolled."""
        try:
            return (self.home / CREDENTIAL_FILE).read_text(encoding="utf-8").strip() or None
        except FileNotFoundError:
            return None

    async def enrol(self, shown_by: Identity | None = None) -> str:
        """Exchange the join token for a credential at `SERVER/agents/enrol`, store it mode 0600, and return it.
        `shown_by`: whose certificate to show, where the token is another agent's credential.

        Raises:
            EnrolmentRefused: there is no join token, or the answer was 4xx (not 429); the text carries the reason.
            EnrolmentUnreachable: no answer within `ENROL_TIMEOUT_S`, a 5xx or 429, or an answer without a credential.
            OSError: the home refused the nonce or the credential.
        """
        if self.join_token is None:
            raise EnrolmentRefused(f"{self.agent_id} has no usable credential and was given no join token")
        credential = await asyncio.to_thread(_exchange, self, self.join_token, self._nonce(), shown_by)
        Identity(self.home).drop_certificate()  # the enrolment revoked it
        self.store_credential(credential)
        return credential

    def store_credential(self, credential: str) -> None:
        """Keep it for the connections to come.

        Raises:
            ValueError: it is none.
            OSError: the home refused it; the one before is untouched.
        """
        if not credential.isascii() or not credential.isprintable() or not 0 < len(credential) <= MAX_CREDENTIAL_CHARS:
            raise ValueError(f"a credential has 1 to {MAX_CREDENTIAL_CHARS} printable characters")
        write_durably(self.home / CREDENTIAL_FILE, credential.encode() + b"\n", mode=0o600)

    def _nonce(self) -> str:
        """What only this agent knows: the first use binds the join token to it. Kept before it is sent."""
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
    """HTTP over TLS to whoever has the control plane's name, whatever address was dialled. No proxy of the environment
    takes part: the control plane is inside the network."""

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
    enrols anew may have one that was revoked.

    Raises:
        OSError, ValueError: the home has no authorities of a fleet.
    """
    parts = urlsplit(server)
    host = parts.hostname or ""
    if parts.scheme == "http":
        return HTTPConnection(host, parts.port, timeout=limit_s)
    name = control_name(identity.fleet()).dns
    context = identity.client_context(shows_certificate=shows_certificate)
    return _Verified(host, parts.port, context, name, limit_s)


def _credential(answer: HTTPResponse, url: str) -> str:
    body = answer.read(MAX_RESPONSE_BYTES)
    if answer.status == HTTPStatus.OK:
        return msgspec.json.decode(body, type=_Answer).credential
    reason = f"{url} answered {answer.status}: {_reason(body, answer.reason)}"
    may_pass = answer.status >= 500 or answer.status == HTTPStatus.TOO_MANY_REQUESTS
    raise EnrolmentUnreachable(reason) if may_pass else EnrolmentRefused(reason)


def _reason(body: bytes, otherwise: str) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return otherwise


REQUEST_AGAIN_S = 30.0
"""Without an answer. The control plane signs one each `fleet.agents.consumers.certificates.REQUESTS_PER_S`."""
REQUEST_AGAIN_MOST_S = 600.0
"""After several requests that brought nothing that counts: none was signed, or this host's clock is wrong."""
LOOK_AT_LEAST_EVERY_S = 60.0
"""The clock of a host may be set."""
SPREAD_S = 5.0
"""Of requests after everybody heard of other authorities."""

log = logging.getLogger(__name__)


def request_again_s(in_vain: int) -> float:
    """How long after a request another follows; `in_vain` brought nothing that counts. At most twice this long, by
    chance."""
    return float(min(REQUEST_AGAIN_S * 2 ** min(max(in_vain - 1, 0), 10), REQUEST_AGAIN_MOST_S))


class CertificateRenewal:
    """Of one agent. `draw` is uniform in [0, 1)."""

    def __init__(self, identity: Identity, draw: Callable[[], float], on_change: Callable[[], None]) -> None:
        self._identity = identity
        self._draw = draw
        self._on_change = on_change
        self._look = asyncio.Event()
        self._share = draw()
        self._bundle_changed = False
        self._in_vain = 0
        self._clock_said = False

    async def run(self, send: Callable[[CertificateRequest], Awaitable[None]]) -> None:
        """Request what is due over one connection, until cancelled."""
        clock, asked_at_s, draw = asyncio.get_running_loop().time, -REQUEST_AGAIN_MOST_S * 2, 0.0
        while True:
            again_at_s = asked_at_s + request_again_s(self._in_vain) * (1 + draw)
            wait_s = max(self._due_in_s(datetime.now(UTC)), again_at_s - clock())
            if wait_s > 0:
                await self._pause(min(wait_s, LOOK_AT_LEAST_EVERY_S))
                continue
            if self._bundle_changed:
                await asyncio.sleep(SPREAD_S * self._draw())
            try:
                request = await asyncio.to_thread(self._identity.signing_request)
            except OSError as error:
                log.error("no certificate is requested: %s", error)
            else:
                self._in_vain += 1
                await send(CertificateRequest(request, self._identity.bundle_digest()))
            asked_at_s, draw = clock(), self._draw()

    async def take(self, message: Certificate | Trust) -> None:
        """Keep what the control plane said."""
        before = self._identity.stamp()
        try:
            await asyncio.to_thread(self._store, message)
        except (OSError, ValueError) as error:
            log.error("not taken over: %s", error)
        if self._identity.stamp() != before:
            self._on_change()
        self._look.set()

    def _store(self, message: Certificate | Trust) -> None:
        trust = message if isinstance(message, Trust) else message.trust
        believed = self._identity.bundle_digest()
        if isinstance(message, Certificate):
            validity = self._identity.store(chain=message.chain, bundle=trust.bundle, revoked=trust.revoked)
            self._bundle_changed, self._share = False, self._draw()
            log.info("%s has a certificate until %s", validity.name, validity.not_after.isoformat())
            self._judge(validity, datetime.now(UTC))
            return
        self._identity.store_trust(bundle=trust.bundle, revoked=trust.revoked)
        if self._identity.bundle_digest() != believed:
            self._bundle_changed, self._in_vain = True, 0

    def _judge(self, validity: Validity, now: datetime) -> None:
        """Whether a new certificate counts by this host's clock; that it does not is said once."""
        if validity.not_before <= now < validity.not_after:
            self._in_vain, self._clock_said = 0, False
        elif not self._clock_said:
            self._clock_said = True
            moments = (now, validity.not_before, validity.not_after)
            log.error(
                "this host's clock says %s, and the new certificate counts from %s to %s: set the clock",
                *(moment.strftime("%Y-%m-%d %H:%M:%S UTC") for moment in moments),
            )

    def _due_in_s(self, now: datetime) -> float:
        validity = self._identity.validity()
        if validity is None or self._bundle_changed or not validity.not_before <= now < validity.not_after:
            return 0.0
        return (validity.renew_after(self._share) - now).total_seconds()

    async def _pause(self, seconds: float) -> None:
        """Until then, or until something was taken over."""
        self._look.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._look.wait()
        except TimeoutError:
            return
