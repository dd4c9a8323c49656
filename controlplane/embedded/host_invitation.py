"""Invites a second host into a control plane, and takes it out again: `invite` and `forget`, on the host whose
database takes writes. Its launcher then starts the control plane's processes once more, with the way to that host.
"""

import ipaddress
import os
import secrets
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from controlplane.embedded.bundle import Bundle, this_release, write_bundle
from controlplane.embedded.configuration import CannotStart, Configuration
from controlplane.embedded.console import Console
from controlplane.embedded.follower import is_alive
from controlplane.embedded.host_authority import make_authority, make_certificate
from controlplane.embedded.host_records import DatabaseClient
from controlplane.embedded.membership import (
    NAMES,
    ControlHost,
    Membership,
    Passwords,
    forget_membership,
    in_url,
    read_membership,
    write_membership,
)
from controlplane.embedded.postgres import APPLICATION, OWNER, REPLICATION
from controlplane.embedded.preflight import bind_problem
from controlplane.embedded.process_environment import SHARED
from controlplane.embedded.replication import Role
from controlplane.embedded.state_directory import LauncherState, StateDirectory

APPLY = signal.SIGUSR1
"""Asks the launcher to read the membership anew."""
_APPLIED_WITHIN_S = 120.0
_POLL_S = 0.2
LAST_STARTED = "sender"
"""Of the launcher's processes: from then on it is up, whether cells are ready or not."""
_CONNECT_S = 5


@dataclass(frozen=True, slots=True)
class Invitation:
    """What the command line states. `own_address`: "" for the one by which this host reaches the other. `agent_port`:
    web's for agents on the other host, 0 for the same as here."""

    address: str
    own_address: str
    database_port: int
    agent_port: int
    expires_s: float
    file: Path


def invite(configuration: Configuration, home: StateDirectory, wanted: Invitation, console: Console) -> None:
    """Write the bundle for another host, and have this one expect it.

    Raises:
        CannotStart: that cannot be, in one sentence.
    """
    launcher = _launcher(configuration, home)
    known = read_membership(home)
    if known and known.other.joined:
        raise CannotStart(
            f"{known.other.name} at {known.other.address} belongs to this control plane, and there are two hosts at"
            " most: take it out with `python -m controlplane.embedded forget`, if it is lost."
        )
    own_address, address = _addresses(wanted)
    file = _free_file(wanted.file)
    environment = _environment_of(launcher)
    own_url = _own_agent_url(environment, own_address, address, configuration)
    if not known:
        _require_free(own_address, wanted.database_port)
    _require_joined_nodes_only(launcher)
    agent_port = wanted.agent_port or configuration.agent_port
    authority, authority_key = make_authority()
    hosts = (
        ControlHost(NAMES[0], own_address, wanted.database_port, own_url, joined=True),
        ControlHost(NAMES[1], address, wanted.database_port, _agent_url(address, agent_port)),
    )
    certificates = [make_certificate(authority, authority_key, host.name, host.address) for host in hosts]
    membership = Membership(
        own_name=NAMES[0],
        hosts=hosts,
        # PostgreSQL has the ones of an earlier invitation, and a host that cannot log in helps nobody.
        passwords=known.passwords if known else Passwords(*(secrets.token_urlsafe(32) for _ in range(3))),
        authority=authority,
        certificate=certificates[0][0],
        key=certificates[0][1],
        shared={name: environment[name] for name in SHARED if environment.get(name)},
    )
    with console.step("passwords of the database's roles"):
        _set_passwords(launcher.owner_url, membership.passwords)
    write_membership(home, membership)
    with console.step(f"{own_address}:{wanted.database_port} for {address}; web and the others start once more"):
        _apply(launcher, home)
    theirs = replace(membership, own_name=NAMES[1], certificate=certificates[1][0], key=certificates[1][1])
    now_s = time.time()
    bundle = Bundle(this_release(), now_s, now_s + wanted.expires_s, home.secrets(), _token(home), theirs)
    write_bundle(file, bundle)
    console.own(
        f"{file} is for {address} alone, within {wanted.expires_s / 60:.0f} minutes; whoever has it has the fleet:"
        f" copy it there, run `python -m controlplane.embedded join {file.name}` and `make up`, and delete it"
    )


def forget(configuration: Configuration, home: StateDirectory, console: Console) -> None:
    """Take the other host out: this control plane has one host from now on.

    Raises:
        CannotStart: the database of this host takes no writes, or there is no other host.
    """
    launcher = _launcher(configuration, home)
    known = read_membership(home)
    if known is None:
        raise CannotStart("This control plane has one host: there is none to take out.")
    own = DatabaseClient(launcher.owner_url)
    found = own.look()
    own.close()
    if found is None or found.role is not Role.PRIMARY:
        raise CannotStart("The database of this host takes no writes: promote it first.")
    forget_membership(home)
    with console.step("web and the others start once more"):
        _apply(launcher, home)
    console.own(
        f"{known.other.name} at {known.other.address} is out; what is left there must not be started again. If"
        " others may have it, give this host another SWITCHYARD_SECRET_KEY, operator's token and fleet authority"
    )


def _launcher(configuration: Configuration, home: StateDirectory) -> LauncherState:
    if configuration.database_url:
        raise CannotStart(
            "DATABASE_URL names a database that is not ours: give it a standby with what runs it, and run the processes"
            " on another host with the same environment (docs/operations.md, More than one control host)."
        )
    state = home.read_state()
    if state is None or not is_alive(state) or LAST_STARTED not in state.sessions:
        raise CannotStart(f"Nothing runs in {home.path} yet: `make up` first, and wait until it is done.")
    return state


def _addresses(wanted: Invitation) -> tuple[str, str]:
    try:
        address = str(ipaddress.ip_address(wanted.address))
        own = str(ipaddress.ip_address(wanted.own_address or _address_towards(address)))
    except ValueError as error:
        raise CannotStart(f"{error}: give addresses such as 10.0.0.2, not names.") from error
    if address == own:
        raise CannotStart(f"{address} is this host's own address: give that of the other one.")
    return own, address


def _address_towards(address: str) -> str:
    """This host's address, as another one sees it. Sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError as error:
            raise CannotStart(f"There is no way from here to {address} ({error.strerror}).") from error
        return str(probe.getsockname()[0])


def _free_file(file: Path) -> Path:
    path = file.resolve()
    if path.exists() or not path.parent.is_dir():
        raise CannotStart(f"{path} exists or its folder does not: name a file to make.")
    return path


def _environment_of(launcher: LauncherState) -> Mapping[str, str]:
    """What the launcher was started with, which is what counts."""
    try:
        return psutil.Process(launcher.pid).environ()
    except psutil.Error as error:
        raise CannotStart(f"The launcher {launcher.pid} cannot be asked: run this as its account.") from error


def _own_agent_url(environment: Mapping[str, str], own: str, other: str, configuration: Configuration) -> str:
    stated = environment.get("SWITCHYARD_AGENT_URL") or _agent_url("127.0.0.1", configuration.agent_port)
    names = [urlsplit(url).hostname or "" for url in stated.split(",")]
    if any(_is_loopback(name) for name in names) and not _is_loopback(other):
        raise CannotStart(
            f"Agents are told that web is at {stated}, which only this host reaches: start it with"
            f" SWITCHYARD_AGENT_LISTEN={own} SWITCHYARD_AGENT_URL={_agent_url(own, configuration.agent_port)} first."
        )
    return stated


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def _agent_url(address: str, port: int) -> str:
    return f"https://{in_url(address)}:{port}"


def _require_free(address: str, port: int) -> None:
    if problem := bind_problem(address, port):
        raise CannotStart(
            f"{address}:{port} cannot be listened on ({problem.strerror}): give --own-address an address of this"
            " host, or --database-port a free port."
        ) from problem


def _require_joined_nodes_only(launcher: LauncherState) -> None:
    import psycopg

    try:
        with psycopg.connect(launcher.owner_url, connect_timeout=_CONNECT_S) as connection:
            rows = connection.execute("SELECT name FROM fleet_region WHERE provider = 'local' ORDER BY name").fetchall()
    except psycopg.Error as error:
        raise CannotStart(f"The database of this host does not answer ({' '.join(str(error).split())}).") from error
    if rows:
        raise CannotStart(
            f"The nodes of {', '.join(name for (name,) in rows)} are processes of this host (provider local), which no"
            " other host could start: serve these regions by machines that join, or delete them."
        )


def _set_passwords(owner_url: str, passwords: Passwords) -> None:
    import psycopg
    from psycopg import sql

    with psycopg.connect(owner_url, autocommit=True, connect_timeout=_CONNECT_S) as connection:
        known = connection.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", [REPLICATION]).fetchone()
        if not known:
            connection.execute(f"CREATE ROLE {REPLICATION} LOGIN REPLICATION")
        stated = {OWNER: passwords.owner, APPLICATION: passwords.application, REPLICATION: passwords.replication}
        for role, password in stated.items():
            # By its hash, so that no log of statements has the password.
            hashed = connection.pgconn.encrypt_password(password.encode(), role.encode(), b"scram-sha-256").decode()
            connection.execute(sql.SQL("ALTER ROLE {} PASSWORD {}").format(sql.Identifier(role), sql.Literal(hashed)))


def _apply(launcher: LauncherState, home: StateDirectory) -> None:
    os.kill(launcher.pid, APPLY)
    deadline = time.monotonic() + _APPLIED_WITHIN_S
    while time.monotonic() < deadline:
        state = home.read_state()
        if state is not None and state.membership_applied > launcher.membership_applied:
            if state.membership_problem:
                raise CannotStart(f"The launcher went back to what was before: {state.membership_problem}")
            return
        time.sleep(_POLL_S)
    raise CannotStart(
        f"The launcher did not take it over within {_APPLIED_WITHIN_S:.0f} s: why is in {home.logs / 'up.log'}."
    )


def _token(home: StateDirectory) -> str:
    return home.token.read_text().strip() if home.token.exists() else ""
