"""How an agent gets its credential: a join token is exchanged once, and the answer is kept in the agent's home.

The credential is readable by its owner only and is never logged. Nothing here retries; the connection does.
"""

import asyncio
import json
import secrets
import ssl
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from engine_agent.node.identity import Identity
from engine_agent.node.journal import write_durably
from engine_agent.node.servers import Servers
from engine_agent.protocol.identity import control_name
from engine_agent.protocol.states import AgentKind

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
