"""A process's place in its cell, which the launcher passes to vLLM's processes in the environment, and how that process
exits with its cell. Imports only the standard library and the agent's own modules, because it is read before vLLM is
imported."""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock, Thread
from typing import NoReturn

from engine_agent.engines.base import CELL_CERTIFICATE_VARIABLE, CELL_SECRET_VARIABLE
from engine_agent.engines.handshake import BadCertificate, Identity, LeaderCertificate, leader_certificate
from engine_agent.protocol.fingerprint import Fingerprint

MEMBER_VARIABLE = "SWITCHYARD_CELL_MEMBER"
ENDED_FILE = "cell-ended"
"""In the runtime folder: why the cell has ended, in one line."""


class CellEnded(Exception):
    """The cell cannot form or cannot continue; the text states why, for `/health`, the agent and its operator."""


@dataclass(frozen=True)
class Member:
    """One rank. `address` is where this process listens, `leader_*` where followers connect; `runtime` is its folder.
    `hang_s`: how long a member may be silent, or one step may take, before the cell counts as hung. `join_timeout_s`:
    how long followers may take to join."""

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
        """Where the reason is written once the cell has ended."""
        return Path(self.runtime) / ENDED_FILE

    def identity(self, secret: bytes, fingerprint: Fingerprint) -> Identity:
        return Identity(self.cell, self.generation, self.rank, self.node_id, fingerprint, secret)

    def to_variable(self) -> str:
        return json.dumps(asdict(self))


def member_from(environment: Mapping[str, str]) -> Member:
    """Returns the member that this process is. Raises CellEnded if it was not started as one."""
    text = environment.get(MEMBER_VARIABLE)
    if not text:
        raise CellEnded(f"{MEMBER_VARIABLE} is not set: start a cell with python -m engine_agent.engines.vllm.serve")
    return Member(**json.loads(text))


def secret_from(environment: Mapping[str, str]) -> bytes:
    """Returns the secret of this generation. Raises CellEnded if there is none, so members could not authenticate each
    other."""
    secret = environment.get(CELL_SECRET_VARIABLE)
    if not secret:
        raise CellEnded(f"{CELL_SECRET_VARIABLE} is not set; members of a cell authenticate with it")
    return secret.encode()


def certificate_from(environment: Mapping[str, str]) -> LeaderCertificate:
    """Returns the certificate that this leader serves its followers with. Raises CellEnded if there is none."""
    pem = environment.get(CELL_CERTIFICATE_VARIABLE)
    if not pem:
        raise CellEnded(f"{CELL_CERTIFICATE_VARIABLE} is not set; a leader needs it for its followers")
    try:
        return leader_certificate(pem)
    except BadCertificate as error:
        raise CellEnded(f"{CELL_CERTIFICATE_VARIABLE} {error}") from error


def write_end_reason(member: Member, reason: str) -> None:
    """Writes why the cell has ended, once: the first reason is the cause, later ones are consequences."""
    unfinished = member.ended_file.with_suffix(f".{os.getpid()}")
    try:
        unfinished.write_text(reason)
        os.link(unfinished, member.ended_file)
    except OSError:
        return
    finally:
        unfinished.unlink(missing_ok=True)


def read_end_reason(ended_file: Path) -> str:
    """Returns why the cell has ended; empty if it has not."""
    try:
        return ended_file.read_text()
    except OSError:
        return ""


EXIT_CELL_ENDED = 70
"""EX_SOFTWARE of <sysexits.h>."""
STDERR = 2
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Shutdown:
    """Ends this process once, without waiting for its threads: one may wait forever in a collective for a dead member.
    `hooks` run first, in their order, and must not block."""

    def __init__(self) -> None:
        self.hooks: list[Callable[[str], None]] = []
        self.before_stop: Callable[[], None] = lambda: None
        self._once = Lock()

    def on_signals(self) -> None:
        """Ends the process on SIGTERM and SIGINT, after `before_stop`. Call it before any other thread starts. A thread
        waits for the signals, because the main thread is inside collectives and would never handle them."""
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        Thread(target=self._await_signal, name="stop-signals", daemon=True).start()

    def _await_signal(self) -> None:
        signal.sigwait(STOP_SIGNALS)
        self.before_stop()
        self.end("stopped by a signal", False)

    def end(self, reason: str, failed: bool = True) -> NoReturn:
        """Exits now. A second caller blocks until the first has ended the process. The reason is the last line of the
        log, which the agent reports. Output of other threads whose collectives fail is discarded."""
        with self._once:
            sys.stderr.flush()
            log = STDERR
            try:
                with contextlib.suppress(OSError):  # without a free descriptor another line may be the last
                    log = os.dup(STDERR)
                    os.dup2(os.open(os.devnull, os.O_WRONLY), STDERR)
                for act in self.hooks:
                    act(reason)
            finally:
                os.write(log, f"the cell has ended: {reason}\n".encode(errors="replace"))
                os._exit(EXIT_CELL_ENDED if failed else 0)
