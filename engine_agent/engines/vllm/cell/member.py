"""A process's place in its cell, as the launcher hands it on to whatever process vLLM makes of it: by environment.

Only the standard library, because it is read before vLLM is imported and by tests that have none.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from engine_agent.engines.base import CELL_CERTIFICATE_VARIABLE, CELL_SECRET_VARIABLE
from engine_agent.engines.cell.handshake import Identity
from engine_agent.engines.cell.tls import BadCertificate, LeaderCertificate, leader_certificate
from engine_agent.protocol.fingerprint import Fingerprint

MEMBER_VARIABLE = "SWITCHYARD_CELL_MEMBER"
ENDED_FILE = "cell-ended"
"""In the runtime folder: one line, why the cell is over."""


class CellEnded(Exception):
    """The cell cannot form or cannot go on; the text says why, for `/health`, the agent and its operator."""


@dataclass(frozen=True)
class Member:
    """One rank. `address` is where this process listens, `leader_*` where followers meet; `runtime` is its own folder.

    `hang_s` is how long a member may be silent, or one call may take, before the cell counts as hung; `join_timeout_s`
    how long followers may take to come.
    """

    cell: str
    generation: int
    rank: int
    followers: int
    node_id: str
    address: str
    leader_address: str
    leader_port: int
    runtime: str
    hang_s: float
    join_timeout_s: float

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.node_id})"

    @property
    def size(self) -> int:
        return self.followers + 1

    @property
    def ended_file(self) -> Path:
        """Where the reason is left once the cell is over."""
        return Path(self.runtime) / ENDED_FILE

    def identity(self, secret: bytes, fingerprint: Fingerprint) -> Identity:
        """What it claims and proves in the handshake."""
        return Identity(self.cell, self.generation, self.rank, self.node_id, fingerprint, secret)

    def to_variable(self) -> str:
        """What `MEMBER_VARIABLE` holds."""
        return json.dumps(asdict(self))


def member_from(environment: Mapping[str, str]) -> Member:
    """The member that this process is.

    Raises:
        CellEnded: it was not started as one.
    """
    text = environment.get(MEMBER_VARIABLE)
    if not text:
        raise CellEnded(f"{MEMBER_VARIABLE} is not set: start a cell with python -m engine_agent.engines.vllm.serve")
    return Member(**json.loads(text))


def secret_from(environment: Mapping[str, str]) -> bytes:
    """The secret of this generation.

    Raises:
        CellEnded: there is none, so members could not authenticate each other.
    """
    secret = environment.get(CELL_SECRET_VARIABLE)
    if not secret:
        raise CellEnded(f"{CELL_SECRET_VARIABLE} is not set; members of a cell authenticate with it")
    return secret.encode()


def certificate_from(environment: Mapping[str, str]) -> LeaderCertificate:
    """What this leader meets its followers with.

    Raises:
        CellEnded: there is none.
    """
    pem = environment.get(CELL_CERTIFICATE_VARIABLE)
    if not pem:
        raise CellEnded(f"{CELL_CERTIFICATE_VARIABLE} is not set; a leader meets its followers with it")
    try:
        return leader_certificate(pem)
    except BadCertificate as error:
        raise CellEnded(f"{CELL_CERTIFICATE_VARIABLE} {error}") from error


def leave_reason(member: Member, reason: str) -> None:
    """Write why the cell is over, once: what came first is the cause, what follows from it is not."""
    unfinished = member.ended_file.with_suffix(f".{os.getpid()}")
    try:
        unfinished.write_text(reason)
        os.link(unfinished, member.ended_file)
    except OSError:
        return
    finally:
        unfinished.unlink(missing_ok=True)


def left_reason(ended_file: Path) -> str:
    """Why the cell is over; empty while it is not."""
    try:
        return ended_file.read_text()
    except OSError:
        return ""
