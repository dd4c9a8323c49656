"""Two hosts of a control plane, on two addresses of this computer: invited, joined, one killed as a whole, the other
promoted, the first one back. Their launchers are as far as their databases go."""

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from django.core.management import call_command

from controlplane.embedded import host_invitation, host_join
from controlplane.embedded.configuration import CannotStart, Configuration, read_configuration
from controlplane.embedded.console import Console
from controlplane.embedded.host_invitation import Invitation, forget, invite
from controlplane.embedded.host_join import join, rejoin
from controlplane.embedded.host_keeper import Hands, HostKeeper
from controlplane.embedded.host_promotion import promote
from controlplane.embedded.host_records import forget_standby
from controlplane.embedded.membership import links_folder, read_membership
from controlplane.embedded.processes import end_session
from controlplane.embedded.servers import Servers, choose_servers
from controlplane.embedded.state_directory import LauncherState, StateDirectory
from controlplane.embedded.supervisor import Supervisor
from tests.controlplane.embedded.processes import eventually, eventually_async, prepared_home, silent_console
from tests.ports import free_port

pytestmark = pytest.mark.processes

ADDRESSES = ("127.0.0.1", "127.0.0.2")
NEVER_ALONE_S = 600.0
"""Longer than any test: a standby that stalls on a busy machine does not make commits go on without it."""
SOON_ALONE_S = 8.0


class ControlHostUnderTest:
    """One host: its home, and what of its launcher keeps a database."""

    def __init__(self, folder: Path, agent_port: int) -> None:
        self.home = prepared_home(folder)
        self.environ = {"SWITCHYARD_HOME": str(folder), "SWITCHYARD_AGENT_PORT": str(agent_port), "ENGINE": "sim"}
        self.said = StringIO()
        self.console = Console(self.said)
        self._sessions: dict[str, int] = {}
        self._supervisor = Supervisor(self.home, self.console, on_change=self._sessions.update)
        self._keeping: asyncio.Task[None] | None = None
        self.alone_after_s = NEVER_ALONE_S
        self.keeper: HostKeeper | None = None

    @property
    def configuration(self) -> Configuration:
        return read_configuration(self.environ)

    @property
    def servers(self) -> Servers:
        return choose_servers(self.configuration, self.home)

    async def start(self) -> None:
        """As the launcher does, without the control plane's processes."""
        servers = self.servers
        postgres, membership = servers.postgres, servers.membership
        assert postgres is not None
        await postgres.initialise(os.environ, self.console)
        if membership is None:
            await self._supervisor.start(postgres.service(os.environ))
            await postgres.wait_until_ready()
            await asyncio.to_thread(forget_standby, postgres.owner_url)
        else:
            assert servers.link is not None
            await self._supervisor.start(servers.link.service(os.environ))
            hands = Hands(
                start=lambda: self._supervisor.start(postgres.service(os.environ)),
                stop=lambda: self._supervisor.stop("postgres"),
            )
            self.keeper = HostKeeper(
                membership, postgres, self.home, self.console, hands, alone_after_s=self.alone_after_s
            )
            self._keeping = asyncio.create_task(self.keeper.run())
        self.publish()

    def publish(self) -> None:
        """Let commands see a launcher that is up: this process."""
        servers = self.servers
        state = LauncherState(
            pid=os.getpid(),
            started_s=psutil.Process().create_time(),
            port=1,
            ingress_port=1,
            engine="sim",
            database_url=servers.database_url,
            owner_url=servers.owner_url,
            sessions={host_invitation.LAST_STARTED: os.getpid()},
        )
        self.home.write_state(state)

    async def stop(self) -> None:
        await self._stop_keeping()
        await self._supervisor.stop_all()
        self.home.state.unlink(missing_ok=True)

    async def lose_power(self) -> None:
        """Every process at once, with no chance to say anything."""
        for session in self._sessions.values():
            end_session(session, signal.SIGKILL)
        await self.stop()

    async def _stop_keeping(self) -> None:
        if self._keeping:
            self._keeping.cancel()
            with suppress(asyncio.CancelledError):
                await self._keeping
        self._keeping = self.keeper = None

    def sql(self, statement: str, *parameters: Any) -> list[Any]:
        """As the owner, on this host's database."""
        with psycopg.connect(self.servers.owner_url, autocommit=True, connect_timeout=5) as connection:
            cursor = connection.execute(statement, parameters)
            return cursor.fetchall() if cursor.description else []

    def standing(self) -> dict[str, tuple[str, str]]:
        """Name of a host -> its database and its commits, as this host's database has it; {} if it does not answer."""
        with suppress(psycopg.Error):
            rows = self.sql("SELECT name, database, commits FROM kernel_controlhost")
            return {name: (database, commits) for name, database, commits in rows}
        return {}


class Writer(threading.Thread):
    """Writes numbers, one commit each, wherever the database is; `acknowledged` are those that PostgreSQL took."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.acknowledged: list[int] = []
        self.stopping = threading.Event()
        self._url = f"{url}?target_session_attrs=read-write"

    def run(self) -> None:
        number = 0
        while not self.stopping.is_set():
            with suppress(psycopg.Error), psycopg.connect(self._url, autocommit=True, connect_timeout=2) as connection:
                while not self.stopping.is_set():
                    number += 1
                    connection.execute("INSERT INTO kept VALUES (%s)", [number])
                    self.acknowledged.append(number)


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ControlHostUnderTest, ControlHostUnderTest]:
    for name in ("DATABASE_URL", "REDIS_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(host_join, "require_disk_space", lambda _: 1.0)
    return ControlHostUnderTest(tmp_path / "1", free_port()), ControlHostUnderTest(tmp_path / "2", free_port())


@pytest.fixture(scope="module")
def tables(django_db_blocker: Any) -> str:
    """What launchers read and write, as migrations make it."""
    text = StringIO()
    with django_db_blocker.unblock():  # it asks which migrations there are, and changes nothing
        for number in ("0001", "0006"):
            call_command("sqlmigrate", "kernel", number, stdout=text)
    return text.getvalue()


def create_tables(host: ControlHostUnderTest, tables: str) -> None:
    host.sql(tables)
    host.sql("CREATE TABLE fleet_region (name text, provider text)")
    host.sql("CREATE TABLE kept (number int)")
    host.sql("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO switchyard_application")


async def invited(
    first: ControlHostUnderTest, second: ControlHostUnderTest, monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    """Invite the second host by the first one, which starts its servers once more as its launcher would."""
    monkeypatch.setattr(host_invitation, "_apply", lambda *_: None)
    agent_port = second.configuration.agent_port
    wanted = Invitation(ADDRESSES[1], ADDRESSES[0], free_port(), agent_port, 600.0, file)
    await asyncio.to_thread(invite, first.configuration, first.home, wanted, first.console)
    await first.stop()
    await first.start()


@asynccontextmanager
async def both_running(
    first: ControlHostUnderTest, second: ControlHostUnderTest, monkeypatch: pytest.MonkeyPatch, tables: str, file: Path
) -> AsyncIterator[None]:
    try:
        await first.start()
        await asyncio.to_thread(create_tables, first, tables)
        await invited(first, second, monkeypatch, file)
        await join(second.configuration, second.home, file, second.console)
        await second.start()
        yield
    finally:
        await second.stop()
        await first.stop()


def connect_as_owner_of_the_other(host: ControlHostUnderTest) -> None:
    servers = host.servers
    assert servers.postgres is not None
    assert servers.membership is not None
    folder = links_folder(servers.postgres.sockets, servers.membership.other)
    password = servers.membership.passwords.owner
    psycopg.connect(host=str(folder), user="switchyard", dbname="switchyard", password=password, connect_timeout=20)


async def becomes(host: ControlHostUnderTest, expected: dict[str, tuple[str, str]]) -> None:
    seen: dict[str, tuple[str, str]] = {}

    def is_so() -> bool:
        seen.clear()
        seen.update(host.standing())
        return seen == expected

    assert await asyncio.to_thread(eventually, is_so), (seen, host.said.getvalue())


@pytest.mark.asyncio
async def test_a_host_joins_takes_over_when_the_other_burns_and_has_it_back_as_its_standby(
    pair: tuple[ControlHostUnderTest, ControlHostUnderTest],
    tables: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    first, second = pair
    async with both_running(first, second, monkeypatch, tables, tmp_path / "bundle"):
        await becomes(second, {"control-1": ("primary", "synchronous"), "control-2": ("standby", "")})
        with pytest.raises(CannotStart, match="control-1 answers and takes writes"):
            await asyncio.to_thread(promote, second.configuration, second.home, "", second.console)

        with pytest.raises(psycopg.OperationalError, match="closed the connection"):  # whatever he knows
            await asyncio.to_thread(connect_as_owner_of_the_other, second)

        writer = Writer(second.servers.database_url)
        writer.start()
        assert await eventually_async(lambda: len(writer.acknowledged) > 20)
        await first.lose_power()
        with pytest.raises(CannotStart, match="may only be cut off: power it off first"):
            await asyncio.to_thread(promote, second.configuration, second.home, "", second.console)
        await asyncio.to_thread(promote, second.configuration, second.home, "it burned", second.console)
        before = len(writer.acknowledged)
        assert await eventually_async(lambda: len(writer.acknowledged) > before + 20)
        writer.stopping.set()
        await asyncio.to_thread(writer.join)
        kept = {number for (number,) in await asyncio.to_thread(second.sql, "SELECT number FROM kept")}
        assert set(writer.acknowledged) <= kept

        await first.start()
        assert await eventually_async(lambda: "does not start, for control-2 takes the writes" in first.said.getvalue())
        assert first.keeper is not None
        assert not first.keeper.is_primary
        await rejoin(first.configuration, first.home, first.console)
        await becomes(first, {"control-1": ("standby", ""), "control-2": ("primary", "synchronous")})
        assert (first.home.path / host_join.BEFORE).is_dir()

        # An orderly change: what takes writes stands down first, so nothing can be missing.
        await asyncio.to_thread(promote, first.configuration, first.home, "its disk is bigger", first.console)
        assert await eventually_async(
            lambda: "its database stopped, for control-1 takes over" in second.said.getvalue()
        )
        events = await asyncio.to_thread(first.sql, "SELECT message FROM kernel_event ORDER BY id")
        assert events[-1] == ("control-1 was promoted and takes writes instead of control-2: its disk is bigger",)


@pytest.mark.asyncio
async def test_a_primary_goes_on_alone_says_so_and_waits_for_a_word_when_it_starts_alone(
    pair: tuple[ControlHostUnderTest, ControlHostUnderTest],
    tables: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    first, second = pair
    first.alone_after_s = SOON_ALONE_S
    async with both_running(first, second, monkeypatch, tables, tmp_path / "bundle"):
        await becomes(first, {"control-1": ("primary", "synchronous"), "control-2": ("standby", "")})
        with pytest.raises(CannotStart, match=r"control-2 at 127\.0\.0\.2 belongs to this control plane"):
            await invited(first, second, monkeypatch, tmp_path / "another")
        await second.lose_power()
        await becomes(first, {"control-1": ("primary", "asynchronous"), "control-2": ("standby", "")})
        await asyncio.to_thread(first.sql, "INSERT INTO kept VALUES (1)")
        assert "control-2 is away: commits no longer wait for it" in first.said.getvalue()

        await first.stop()
        await first.start()
        assert await eventually_async(lambda: "waits until control-2 says that it takes none" in first.said.getvalue())
        with pytest.raises(CannotStart, match="Say that it is lost by --force"):
            await asyncio.to_thread(promote, first.configuration, first.home, "", first.console)
        await asyncio.to_thread(promote, first.configuration, first.home, "it burned", first.console)
        await becomes(first, {"control-1": ("primary", "asynchronous"), "control-2": ("standby", "")})
        # As if it had not been away: the launcher ends up with no standby, whatever was set.
        await asyncio.to_thread(first.sql, "ALTER SYSTEM SET synchronous_standby_names = '\"control-2\"'")
        await asyncio.to_thread(forget, first.configuration, first.home, first.console)
        assert read_membership(first.home) is None
        await first.stop()
        await first.start()
        assert await asyncio.to_thread(first.sql, "SELECT * FROM kernel_controlhost") == []
        await asyncio.to_thread(first.sql, "INSERT INTO kept VALUES (2)")  # waits for nobody

        # The other one was off meanwhile: what it has is not all, and it says so.
        await first.stop()
        await second.start()
        assert await eventually_async(lambda: bool(second.standing()))
        with pytest.raises(CannotStart, match=r"control-1 (does not answer|did not wait)"):
            await asyncio.to_thread(promote, second.configuration, second.home, "", second.console)


@pytest.mark.asyncio
async def test_what_cannot_join_is_told_why_and_leaves_nothing(
    pair: tuple[ControlHostUnderTest, ControlHostUnderTest],
    tables: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    first, second = pair
    file = tmp_path / "bundle"

    async def refused(why: str) -> None:
        with pytest.raises(CannotStart, match=why):
            await join(second.configuration, second.home, file, silent_console())
        left = {path.name for path in second.home.path.iterdir()} - {"logs"}
        assert left == set()

    try:
        await first.start()
        await asyncio.to_thread(create_tables, first, tables)
        await asyncio.to_thread(first.sql, "INSERT INTO fleet_region VALUES ('us-east-1', 'local')")
        with pytest.raises(CannotStart, match=r"nodes of us-east-1 are processes of this host"):
            await invited(first, second, monkeypatch, file)
        await asyncio.to_thread(first.sql, "DELETE FROM fleet_region")
        await invited(first, second, monkeypatch, file)

        monkeypatch.setattr(host_join, "CLOCK_DIFFERS_S", -1.0)
        await refused("clock is")
        monkeypatch.undo()
        monkeypatch.setattr(host_join, "require_disk_space", lambda _: 1.0)
        monkeypatch.setattr(host_join, "ANSWERS_WITHIN_S", 1.0)
        await first.stop()
        await refused(r"control-1 at .* does not answer")
        second.environ["SWITCHYARD_AGENT_PORT"] = str(free_port())
        await refused("give both hosts the same")
    finally:
        await first.stop()


def test_a_home_that_is_one_joins_no_other(tmp_path: Path) -> None:
    home = StateDirectory(tmp_path / "home")
    home.prepare()
    home.secrets()
    configuration = read_configuration({"SWITCHYARD_HOME": str(home.path)})
    with pytest.raises(CannotStart, match="is a home already"):
        asyncio.run(join(configuration, home, tmp_path / "bundle", silent_console()))
    fresh, elsewhere = StateDirectory(tmp_path / "fresh"), replace(configuration, database_url="postgres://x/y")
    with pytest.raises(CannotStart, match="DATABASE_URL is set"):
        asyncio.run(join(elsewhere, fresh, tmp_path / "bundle", silent_console()))
