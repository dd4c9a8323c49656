"""Makes a host a further one of a control plane (`join`), or the standby again after another was promoted (`rejoin`):
a copy of the other host's database, over the link, and what else a home needs.
"""

import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from controlplane.embedded.bundle import Bundle, read_bundle
from controlplane.embedded.configuration import CannotStart, Configuration
from controlplane.embedded.console import Console
from controlplane.embedded.follower import is_alive
from controlplane.embedded.host_keeper import CONFIRMED_FILE, CONTACT_FILE, STOOD_DOWN_FILE, other_client
from controlplane.embedded.host_records import DatabaseClient
from controlplane.embedded.membership import (
    MEMBERSHIP_FILE,
    ControlHost,
    Membership,
    links_folder,
    read_membership,
    write_membership,
)
from controlplane.embedded.postgres import REPLICATION, Postgres, binaries, running_server
from controlplane.embedded.preflight import bind_problem, require_disk_space
from controlplane.embedded.privileges import is_closed_to, remove_socket_folder, socket_folder
from controlplane.embedded.process_environment import server_environment
from controlplane.embedded.processes import Program, require_oneshot
from controlplane.embedded.replication import Role
from controlplane.embedded.servers import Servers, choose_servers
from controlplane.embedded.state_directory import StateDirectory, write_private_json
from controlplane.embedded.supervisor import Supervisor

T = TypeVar("T")
ANSWERS_WITHIN_S = 15.0
REACHED_WITHIN_S = 30.0
CLOCK_DIFFERS_S = 5.0
"""PostgreSQL's clock is everybody's: at a promotion the fleet's time would jump by so much."""
_COPY_LIMIT_S = 6 * 3600.0
_POLL_S = 0.25
BEFORE = "pg.before-rejoin"


async def join(configuration: Configuration, home: StateDirectory, file: Path, console: Console) -> None:
    """Make this home one of the control plane that the bundle names. After a failure it is as empty as before.

    Raises:
        CannotStart: why it cannot be, in one sentence.
    """
    if home.settings.exists() or home.postgres.exists():
        raise CannotStart(f"{home.path} is a home already: set SWITCHYARD_HOME to a folder that does not exist yet.")
    if configuration.database_url:
        raise CannotStart("DATABASE_URL is set: a host that joins has a database of its own, so unset it.")
    bundle = read_bundle(file)
    own = bundle.membership.own
    _require_place(configuration, own)
    require_disk_space(configuration)
    made = [home.settings, home.token, home.path / MEMBERSHIP_FILE]
    try:
        _write_home(home, bundle)
        async with linked(configuration, home, console) as (servers, supervisor):
            postgres = _postgres(servers)
            primary = await _require_primary(bundle.membership, postgres)
            try:
                await asyncio.to_thread(_require_same_clock, primary)
                await copy_database(bundle.membership, postgres, console)
                await supervisor.start(postgres.service(os.environ))
                await postgres.wait_until_ready()
                await asyncio.to_thread(_require_reached, bundle.membership, primary)
            except BaseException:
                await asyncio.to_thread(_withdraw, bundle.membership, primary)
                raise
            finally:
                await asyncio.to_thread(primary.close)
    except BaseException:
        for path in made:
            path.unlink(missing_ok=True)
        for folder in (home.postgres, home.path / "pg.new", home.path / "database-link"):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    console.own(f"this host is {own.name} of the control plane; `make up` here, and delete {file}")


async def rejoin(configuration: Configuration, home: StateDirectory, console: Console) -> None:
    """Make this host's database the standby of the other one, by a new copy; the old one stays beside it.

    Raises:
        CannotStart: the other one is no primary, or this one runs.
    """
    membership = read_membership(home)
    if membership is None:
        raise CannotStart(f"{home.path} belongs to a control plane of one host: there is nothing to rejoin.")
    if running_server(home.postgres) is not None:
        raise CannotStart("The database of this host runs: `make down` first, if it is to begin anew.")
    async with linked(configuration, home, console) as (servers, _):
        postgres = _postgres(servers)
        primary = await _require_primary(membership, postgres)
        await asyncio.to_thread(primary.close)
        await copy_database(membership, postgres, console)
    for name in (CONTACT_FILE, STOOD_DOWN_FILE, CONFIRMED_FILE):
        (home.path / name).unlink(missing_ok=True)
    state = home.read_state()
    what = "it starts now" if state and is_alive(state) else "`make up` starts it"
    console.own(f"the database of this host is the standby of {membership.other.name}; {what}; the old one is {BEFORE}")


@asynccontextmanager
async def linked(
    configuration: Configuration, home: StateDirectory, console: Console
) -> AsyncIterator[tuple[Servers, Supervisor]]:
    """The link of this home: the launcher's, or one of ours while the block runs."""
    servers = choose_servers(configuration, home)
    state = home.read_state()
    has_launcher = state is not None and is_alive(state)
    supervisor = Supervisor(home, console, on_change=lambda _: None)
    try:
        if not has_launcher and servers.link is not None:
            await supervisor.start(servers.link.service(os.environ))
        yield servers, supervisor
    finally:
        await supervisor.stop_all()
        if not has_launcher:
            remove_socket_folder(socket_folder(home.path))


async def copy_database(membership: Membership, postgres: Postgres, console: Console) -> None:
    """Put a copy of the other host's database in place of what is here, ready to start as its standby.

    Raises:
        CannotStart: PostgreSQL refused it; what was here is there still.
    """
    home, account = postgres.home, postgres.account
    fresh = home.path / "pg.new"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(mode=0o700)
    if account.drop:
        os.chown(fresh, account.uid, account.gid)
    where = f"host={links_folder(postgres.sockets, membership.other)} user={REPLICATION}"
    program = binaries() / "pg_basebackup"
    copying = Program(
        arguments=(
            str(program),
            f"--pgdata={fresh}",
            "--write-recovery-conf",
            "--checkpoint=fast",
            "--wal-method=stream",
            f"--dbname={where}",
        ),
        environment={
            **server_environment(os.environ, home.path),
            "PGPASSWORD": membership.passwords.replication,
        },
        folder=home.path,
        account=account.drop,
        traverse=bool(account.drop) and any(is_closed_to(account, at) for at in (program, home.path)),
    )
    with console.step(f"copy of the database of {membership.other.name}"):
        await require_oneshot("copy", copying, home, console, deadline_s=_COPY_LIMIT_S)
    if home.postgres.exists():
        before = home.path / BEFORE
        shutil.rmtree(before, ignore_errors=True)
        home.postgres.rename(before)
    fresh.rename(home.postgres)


def _write_home(home: StateDirectory, bundle: Bundle) -> None:
    write_private_json(home.settings, asdict(bundle.secrets))
    if bundle.token:
        home.token.touch(mode=0o600)
        home.token.write_text(f"{bundle.token}\n")
    write_membership(home, bundle.membership.with_joined(bundle.membership.own_name))


def _postgres(servers: Servers) -> Postgres:
    if servers.postgres is None:
        raise CannotStart("This host runs no database of its own: unset DATABASE_URL.")
    return servers.postgres


def _require_place(configuration: Configuration, own: ControlHost) -> None:
    """Raises:
    CannotStart: the bundle is for another host, or something else listens where this one should.
    """
    for port, moves in ((own.database_port, "invite it with another --database-port"), (configuration.agent_port, "")):
        if problem := bind_problem(own.address, port):
            raise CannotStart(
                f"{own.address}:{port} cannot be listened on here ({problem.strerror}): this bundle is for the host"
                f" with that address; free the port{f', or {moves}' if moves else ''}."
            ) from problem
    if not own.agent_url.endswith(f":{configuration.agent_port}"):
        raise CannotStart(
            f"Agents will be sent to {own.agent_url}, and SWITCHYARD_AGENT_PORT is {configuration.agent_port} here:"
            " give both hosts the same."
        )


async def _require_primary(membership: Membership, postgres: Postgres) -> DatabaseClient:
    """The other host's database, which takes writes."""
    client, other = other_client(membership, postgres), membership.other
    found = await asyncio.to_thread(_within, ANSWERS_WITHIN_S, client.look)
    where = f"{other.name} at {other.address}:{other.database_port}"
    if found is None:
        raise CannotStart(
            f"{where} does not answer: see that it runs, that this host reaches that port, and that the bundle is its"
            " newest (an older one is refused)."
        )
    if found.role is not Role.PRIMARY:
        raise CannotStart(f"The database of {where} takes no writes: promote it first, or run this on that host.")
    return client


def _require_same_clock(primary: DatabaseClient) -> None:
    began_s = time.time()
    ((theirs_s,),) = primary.rows("SELECT extract(epoch FROM clock_timestamp())::float8")
    apart_s = (began_s + time.time()) / 2 - theirs_s
    if abs(apart_s) > CLOCK_DIFFERS_S:
        raise CannotStart(
            f"This host's clock is {abs(apart_s):.0f} s {'ahead of' if apart_s > 0 else 'behind'} that of the other"
            " host: set both by NTP."
        )


def _require_reached(membership: Membership, primary: DatabaseClient) -> None:
    """Wait until the other host has reached this one's database, which it must after a promotion."""
    own = membership.own
    reached = "SELECT 1 FROM kernel_controlhost WHERE name = %s AND reached_at > clock_timestamp() - interval '5 s'"
    primary.note_alive(own, "")
    if not _within(REACHED_WITHIN_S, lambda: primary.rows(reached, [own.name])):
        raise CannotStart(
            f"{membership.other.name} does not reach this host at {own.address}:{own.database_port}: open that port to"
            f" {membership.other.address}."
        )


def _withdraw(membership: Membership, primary: DatabaseClient) -> None:
    """Let the other host know nothing of this one, which did not join."""
    import psycopg

    with suppress(psycopg.Error):
        primary.rows("DELETE FROM kernel_controlhost WHERE name = %s", [membership.own_name])


def _within(limit_s: float, look: Callable[[], T]) -> T:
    deadline = time.monotonic() + limit_s
    while not (found := look()) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return found
