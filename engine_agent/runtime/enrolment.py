"""How an agent gets its credential: a join token is exchanged once, and the answer is kept in the agent's home.

The credential is readable by its owner only and is never logged. Nothing here retries; the connection does.
"""

import asyncio
import json
import secrets
import urllib.error
import urllib.request
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path

import msgspec

from engine_agent.protocol.states import AgentKind
from engine_agent.runtime.journal import write_durably

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
    """Who an agent is, where it keeps its credential, and what it can get one with.

    Raises:
        ValueError: `server` is not an http:// or https:// address.
    """

    server: str
    kind: AgentKind
    agent_id: str
    home: Path
    join_token: str | None = None

    def __post_init__(self) -> None:
        if not self.server.startswith(("http://", "https://")):
            raise ValueError(f"server must be http://HOST:PORT or https://HOST:PORT, not {self.server!r}")

    def stored_credential(self) -> str | None:
        """Return the stored credential, or None if this agent never enrolled."""
        try:
            return (self.home / CREDENTIAL_FILE).read_text(encoding="utf-8").strip() or None
        except FileNotFoundError:
            return None

    async def enrol(self) -> str:
        """Exchange the join token for a credential at `<server>/agents/enrol`, store it mode 0600, and return it.

        Raises:
            EnrolmentRefused: there is no join token, or the answer was 4xx (not 429); the text carries the reason.
            EnrolmentUnreachable: no answer within `ENROL_TIMEOUT_S`, a 5xx or 429, or an answer without a credential.
            OSError: the home refused the nonce or the credential.
        """
        if self.join_token is None:
            raise EnrolmentRefused(f"{self.agent_id} has no usable credential and was given no join token")
        credential = await asyncio.to_thread(_exchange, self, self.join_token, self._nonce())
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


def _exchange(enrolment: Enrolment, join_token: str, nonce: str) -> str:
    url = f"{enrolment.server.rstrip('/')}/agents/enrol"
    request = urllib.request.Request(  # noqa: S310 - the scheme was checked when the enrolment was made
        url,
        data=json.dumps({"kind": enrolment.kind, "id": enrolment.agent_id, "nonce": nonce}).encode(),
        headers={"Authorization": f"Bearer {join_token}", "Content-Type": "application/json"},
    )
    # The control plane is inside the network: a proxy from the environment would only lose the way.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=ENROL_TIMEOUT_S) as answer:
            return msgspec.json.decode(answer.read(MAX_RESPONSE_BYTES), type=_Answer).credential
    except urllib.error.HTTPError as error:
        reason = f"{url} answered {error.code}: {_reason(error)}"
        may_pass = error.code >= 500 or error.code == HTTPStatus.TOO_MANY_REQUESTS
        raise (EnrolmentUnreachable(reason) if may_pass else EnrolmentRefused(reason)) from error
    except msgspec.DecodeError as error:
        raise EnrolmentUnreachable(f"{url} answered without a credential: {error}") from error
    except (OSError, HTTPException) as error:
        raise EnrolmentUnreachable(f"{url}: {error}") from error


def _reason(error: urllib.error.HTTPError) -> str:
    body = error.read(MAX_RESPONSE_BYTES)
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return error.reason
