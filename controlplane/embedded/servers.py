"""The two servers behind the control plane: ours, embedded, or those that the environment names. `run_servers` runs
them alone, for tests and for work on the code. Their clients are imported where they are asked: `status` and `down` ask
none."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from controlplane.embedded.configuration import CannotStart, Configuration
from controlplane.embedded.console import Console
from controlplane.embedded.postgres import Postgres
from controlplane.embedded.privileges import remove_socket_folder, server_account, socket_folder
from controlplane.embedded.processes import run_together
from controlplane.embedded.state_directory import StateDirectory
from controlplane.embedded.supervisor import Service, Supervisor
from controlplane.embedded.valkey import Valkey

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
        """Wait for ours; ask the others once.

        Raises:
            CannotStart: one does not answer.
        """
        await run_together(
            self.postgres.wait_until_ready() if self.postgres else _require_database(self.database_url),
            self.valkey.wait_until_ready() if self.valkey else _require_redis(self.redis_url),
        )

    async def initialise(self, inherited: Mapping[str, str], console: Console) -> None:
        """Create what our servers need on disk."""
        if self.postgres:
            await self.postgres.initialise(inherited, console)


def choose_servers(configuration: Configuration, home: StateDirectory, *, durable: bool = True) -> Servers:
    """Embedded servers, except where the configuration names others.

    Raises:
        CannotStart: this account cannot run embedded servers.
    """
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
    """Start the servers, print `{"database_url": …, "redis_url": …}`, and stop on SIGINT or SIGTERM.

    Raises:
        CannotStart: they do not start.
    """
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
