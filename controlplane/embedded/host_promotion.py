"""Promotes the database of this host (`promote`): it takes writes from then on, and the other one does not.

Nobody calls it but a person, or a program that knows more than this host does: of two hosts neither can tell whether
the other is lost or cut off.
"""

import time
from contextlib import suppress
from pathlib import Path

from controlplane.embedded.configuration import CannotStart, Configuration
from controlplane.embedded.console import Console
from controlplane.embedded.host_keeper import CONFIRMED_FILE, contact_age_s, other_client
from controlplane.embedded.host_records import DatabaseClient
from controlplane.embedded.membership import read_membership
from controlplane.embedded.replication import Commits, Database, Role, why_promotion_may_lose
from controlplane.embedded.servers import choose_servers
from controlplane.embedded.state_directory import StateDirectory

STANDS_DOWN_WITHIN_S = 40.0
PROMOTED_WITHIN_S = 60
_POLL_S = 0.2
SILENT_LOOKS = 5
"""In a row, before it counts as ended: one look may fail for many reasons."""
_RECEIVES = "SELECT 1 FROM pg_stat_wal_receiver WHERE status = 'streaming'"
_RECEIVED = "SELECT pg_last_wal_receive_lsn()::text"
_EVENT = """
INSERT INTO kernel_event (at, kind, tone, message, actor, region, deployment, cell, node, detail)
VALUES (clock_timestamp(), 'control-host.promoted', 'warn', %s, 'command', '', '', '', '', '{}')
"""


def promote(configuration: Configuration, home: StateDirectory, force: str, console: Console) -> None:
    """Have this host's database take writes. `force`: why, although the other one answers or something may be missing.

    Raises:
        CannotStart: it does already, it is not known to have everything, or the other one answers.
    """
    membership = read_membership(home)
    if membership is None:
        raise CannotStart(f"{home.path} belongs to a control plane of one host: its database takes writes.")
    postgres = choose_servers(configuration, home).postgres
    if postgres is None:
        raise CannotStart("DATABASE_URL names a database that is not ours: promote it with what runs it.")
    name, other_name = membership.own_name, membership.other.name
    own, other = DatabaseClient(postgres.owner_url), other_client(membership, postgres)
    try:
        mine, theirs = own.look(), other.look()
        if mine is None:
            if postgres.is_standby:
                raise CannotStart(f"The standby of this host does not run: why is in {home.logs / 'postgres.log'}.")
            _confirm(home.path / CONFIRMED_FILE, theirs, force, other_name)
            console.own("its database starts and takes writes, without the other one")
            return
        if mine.role is Role.PRIMARY:
            raise CannotStart(f"The database of this host, {name}, takes writes already.")
        if theirs is not None and theirs.role is Role.PRIMARY:
            _require_orderly(own, other_name, force)
            with console.step(f"{other_name} stands down"):
                _stand_down(own, other, other_name)
        elif (doubt := _doubt(own, home, other_name)) and not force:
            raise CannotStart(f"{doubt}. Promote all the same by --force 'WHY'.")
        with console.step(f"promotion of {name}"):
            _promote(own, name, other_name, force)
    finally:
        own.close()
        other.close()
    console.own(
        f"{name} takes writes; {other_name} becomes its standby by `python -m controlplane.embedded rejoin` there"
    )


def _confirm(marker: Path, theirs: Database | None, force: str, other: str) -> None:
    """Let a database start that waits for the other one's word."""
    if theirs is not None:
        raise CannotStart(
            f"The database of this host does not run, and {other} answers as {theirs.role}: `python -m"
            " controlplane.embedded rejoin`, or `make up` if it was down."
        )
    if not force:
        raise CannotStart(
            f"The database of this host does not run, and {other} does not answer: if {other} was promoted, two would"
            " take writes. Say that it is lost by --force 'WHY'."
        )
    marker.touch(mode=0o600)


def _require_orderly(own: DatabaseClient, other: str, force: str) -> None:
    """Raises:
    CannotStart: nobody said why the other one should end, or this one would lack what it wrote.
    """
    if not force:
        raise CannotStart(f"{other} answers and takes writes: leave it so, or have it stand down by --force 'WHY'.")
    record = own.primary_record()
    if not own.rows(_RECEIVES) or record is None or record.commits is not Commits.SYNCHRONOUS:
        raise CannotStart(
            f"{other} does not wait for this host with what it writes, so that it would be missing here: wait until it"
            " does (`switchyard status`), by `python -m controlplane.embedded rejoin` here if need be."
        )


def _doubt(own: DatabaseClient, home: StateDirectory, other: str) -> str:
    record = own.primary_record()
    return why_promotion_may_lose(
        other,
        record.commits if record and record.name == other else None,
        contact_s=contact_age_s(home),
        alone_after_s=record.alone_after_s if record else None,
    )


def _stand_down(own: DatabaseClient, other: DatabaseClient, name: str) -> None:
    """Ask it to end, and wait until it has: its last writes come here before it does."""
    asked = "UPDATE kernel_controlhost SET stands_down = %s WHERE name = %s"
    other.rows(asked, [True, name])
    deadline, silent, received = time.monotonic() + STANDS_DOWN_WITHIN_S, 0, ""
    while silent < SILENT_LOOKS:
        if time.monotonic() > deadline:
            import psycopg

            with suppress(psycopg.Error):
                other.rows(asked, [False, name])
            raise CannotStart(f"{name} did not stop within {STANDS_DOWN_WITHIN_S:.0f} s: stop it there (`make down`).")
        before, received = received, own.rows(_RECEIVED)[0][0]
        is_over = other.look() is None and not own.rows(_RECEIVES) and before == received
        silent = silent + 1 if is_over else 0
        time.sleep(_POLL_S)


def _promote(own: DatabaseClient, name: str, other: str, force: str) -> None:
    own.set_standby(None)
    own.rows("SELECT pg_promote(wait => false)")
    deadline = time.monotonic() + PROMOTED_WITHIN_S
    while own.database().role is not Role.PRIMARY:
        if time.monotonic() > deadline:
            raise CannotStart(f"PostgreSQL did not promote within {PROMOTED_WITHIN_S} s; see its log.")
        time.sleep(_POLL_S)
    own.rows("UPDATE kernel_controlhost SET stands_down = false, commits = ''")
    own.rows("UPDATE kernel_controlhost SET database = 'primary' WHERE name = %s", [name])
    text = f"{name} was promoted and takes writes instead of {other}"
    own.rows(_EVENT, [f"{text}: {force}" if force else text])
