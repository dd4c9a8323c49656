"""The home folder: what lies where, its generated secrets, the launcher's lock and its published state.

The lock is the kernel's (flock): it ends with the launcher however that dies, so there is no stale lock to judge."""

import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

from controlplane.embedded.configuration import CannotStart

OPERATOR = "operator"
"""The user whose password is among the secrets of a home."""


class LauncherPhase(StrEnum):
    STARTING = "starting"
    READY = "ready"
    NOT_READY = "not ready"
    STOPPING = "stopping"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class LauncherState:
    """What the launcher tells other commands. A pid counts only together with its start time (seconds since 1970)."""

    pid: int
    started_s: float
    port: int
    ingress_port: int
    ingresses: int
    engine: str
    database_url: str = ""
    owner_url: str = ""
    redis_url: str = ""
    phase: LauncherPhase = LauncherPhase.STARTING
    reason: str = ""
    sessions: dict[str, int] = field(default_factory=dict)
    """Name of a supervised process -> its pid, which is also the id of its session."""


@dataclass(frozen=True, slots=True)
class Secrets:
    secret_key: str
    operator_password: str


class StateDirectory:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.postgres = path / "pg"
        self.valkey = path / "valkey"
        self.logs = path / "logs"
        self.settings = path / "settings.json"
        self.state = path / "up.json"
        self.lock = path / "up.lock"
        self.token = path / "operator-token"

    def prepare(self) -> None:
        """Create what is missing. Raises CannotStart if the folder cannot be written."""
        # Others may pass (the embedded servers run under another account when we are root) but not list.
        mode = 0o711 if os.geteuid() == 0 else 0o700
        try:
            if not self.path.exists():
                self.path.mkdir(mode=mode, parents=True)
                self.path.chmod(mode)  # whatever the umask
            self.logs.mkdir(mode=0o700, exist_ok=True)
            probe = self.path / f".writable-{os.getpid()}"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise CannotStart(
                f"Cannot write in {self.path} ({error.strerror}): set SWITCHYARD_HOME to a folder that you may write."
            ) from error

    def secrets(self) -> Secrets:
        """The secrets of this home, generated on first use. Raises CannotStart if the file is damaged."""
        if not self.settings.exists():
            generated = Secrets(secret_key=secrets.token_urlsafe(48), operator_password=secrets.token_urlsafe(12))
            write_private_json(self.settings, asdict(generated))
            return generated
        try:
            return Secrets(**json.loads(self.settings.read_text()))
        except (ValueError, TypeError) as error:
            raise CannotStart(f"{self.settings} is damaged ({error}): delete it to generate new secrets.") from error

    def read_state(self) -> LauncherState | None:
        """What the last launcher published, or None; it may be dead since."""
        try:
            stored = json.loads(self.state.read_text())
            return LauncherState(**{**stored, "phase": LauncherPhase(stored["phase"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def write_state(self, state: LauncherState) -> None:
        """Publish `state`, whole or not at all."""
        write_private_json(self.state, asdict(state))

    def is_locked(self) -> bool:
        if not self.lock.exists():
            return False
        with self.lock.open("a") as file:
            return not _try_lock(file.fileno())

    @contextmanager
    def locked(self) -> Iterator[bool]:
        """Hold the launcher's lock; yields False, holding nothing, when another launcher has it."""
        with self.lock.open("a") as file:
            yield _try_lock(file.fileno())


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_private_json(path: Path, content: dict[str, object]) -> None:
    """Write JSON that only this user may read, in one atomic step."""
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(8)}.new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(content, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
