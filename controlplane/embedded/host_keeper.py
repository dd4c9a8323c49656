"""Keeps the database of a host of a control plane of two: starts it if it may, has commits wait for the standby as
long as there is one, stops it when the other one was promoted, and writes down how both are. `replication` decides.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from controlplane.embedded.console import Console
from controlplane.embedded.host_records import DatabaseClient
from controlplane.embedded.membership import Membership, links_folder, write_membership
from controlplane.embedded.postgres import APPLICATION, DATABASE, Postgres
from controlplane.embedded.replication import (
    HOST_SILENT_S,
    Commits,
    Database,
    Role,
    Standby,
    Start,
    may_start,
    must_stop,
    wanted_commits,
)
from controlplane.embedded.state_directory import StateDirectory, write_private_json

LOOK_EVERY_S = 1.0
CONTACT_FILE = "standby-contact.json"
"""When this standby last heard its primary, in seconds since the boot that is named: clocks may be set."""
CONFIRMED_FILE = "primary-confirmed"
"""A person says that the other host's database takes no writes, and never will again."""
STOOD_DOWN_FILE = "stood-down"
"""This host's database stopped so that the other one may be promoted."""
DATABASE_FILE = "database.json"
"""What the keeper last made of this host's database, for other commands."""


@dataclass(frozen=True, slots=True)
class Hands:
    """What a keeper may do to the server."""

    start: Callable[[], Awaitable[None]]
    stop: Callable[[], Awaitable[None]]


def other_client(membership: Membership, postgres: Postgres) -> DatabaseClient:
    """The other host's database, by the link of this one."""
    folder = links_folder(postgres.sockets, membership.other)
    password = membership.passwords.application
    return DatabaseClient("", host=str(folder), user=APPLICATION, dbname=DATABASE, password=password)


class HostKeeper:
    """Of one host. `alone_after_s`: seconds without a standby after which commits wait no longer; None: for ever."""

    def __init__(
        self,
        membership: Membership,
        postgres: Postgres,
        home: StateDirectory,
        console: Console,
        hands: Hands,
        *,
        alone_after_s: float | None,
    ) -> None:
        self.settled = asyncio.Event()
        """Whether the database of this host runs, or never will without a person (`is_primary`)."""
        self.is_primary = False
        self._membership = membership
        self._postgres = postgres
        self._home = home
        self._console = console
        self._hands = hands
        self._alone_after_s = alone_after_s
        self._own = DatabaseClient(postgres.owner_url)
        self._other = other_client(membership, postgres)
        self._runs = False
        self._said = ""
        self._problem = ""
        self._standby_at_s = time.monotonic()  # a start gives the standby as long as its end would
        self._is_known_synchronous = False

    @property
    def membership(self) -> Membership:
        """As it is by now."""
        return self._membership

    async def run(self) -> None:
        """Look every second, until cancelled. Whatever goes wrong in a look is said, and the next one looks again."""
        try:
            while True:
                try:
                    await self._look()
                    self._problem = ""
                except Exception as error:
                    self._note_problem(str(error) or type(error).__name__)
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            self._own.close()
            self._other.close()

    async def _look(self) -> None:
        other = await asyncio.to_thread(self._other.look)
        if not self._runs:
            await self._start_if_allowed(other)
            if not self._runs:
                await asyncio.to_thread(self._note_alive_elsewhere, other, "stopped")
                return
        own = await asyncio.to_thread(self._own.look)
        if own is None:
            return  # it starts, or its supervisor starts it again
        self.is_primary = own.role is Role.PRIMARY
        self.settled.set()
        if must_stop(own, other):
            await self._fence(f"{self._membership.other.name} was promoted")
        elif self.is_primary:
            if await asyncio.to_thread(self._keep_primary, other):
                (self._home.path / STOOD_DOWN_FILE).touch()
                await self._fence(f"{self._membership.other.name} takes over, as a person asked")
        else:
            await asyncio.to_thread(self._keep_standby, other)

    # --- starting and stopping ----------------------------------------------------------------------------------------

    async def _start_if_allowed(self, other: Database | None) -> None:
        confirmed, stood_down = self._home.path / CONFIRMED_FILE, self._home.path / STOOD_DOWN_FILE
        decision = may_start(
            is_standby=self._postgres.is_standby,
            other_joined=self._membership.other.joined,
            other=other,
            is_confirmed=confirmed.exists(),
            stood_down=stood_down.exists(),
        )
        name = self._membership.other.name
        if decision is Start.START:
            await self._hands.start()
            self._runs = True
            confirmed.unlink(missing_ok=True)
            stood_down.unlink(missing_ok=True)
            self._say("runs", "its database starts")
        elif decision is Start.WAIT:
            self._say(
                "waits",
                f"its database took writes, and waits until {name} says that it takes none: start {name}, or, if that"
                f" host is lost, `python -m controlplane.embedded promote --force 'WHY'` here",
            )
        else:
            self._say(
                "fenced",
                f"its database does not start, for {name} takes the writes: `python -m controlplane.embedded rejoin`"
                " makes it the standby",
            )
            self.settled.set()

    async def _fence(self, why: str) -> None:
        self.is_primary = False
        self._own.close()
        await self._hands.stop()
        self._runs = False
        self._say(
            "fenced", f"its database stopped, for {why}: `python -m controlplane.embedded rejoin` makes it the standby"
        )

    # --- keeping ------------------------------------------------------------------------------------------------------

    def _keep_primary(self, other: Database | None) -> bool:
        """Whether it is to stand down."""
        own, name, other_name = self._own, self._membership.own_name, self._membership.other.name
        standby = own.standby(other_name)
        now_s = time.monotonic()
        if standby is not None:
            self._standby_at_s = now_s
            if standby.silent_s <= HOST_SILENT_S:  # its launcher runs it: it may be promoted from now on
                self._note_joined()
        stands_down = own.note_alive(self._membership.own, Role.PRIMARY)
        now = Commits.SYNCHRONOUS if own.waits_for() else Commits.ASYNCHRONOUS
        missing_s = now_s - self._standby_at_s
        wanted = wanted_commits(now, standby, missing_s=missing_s, alone_after_s=self._alone_after_s)
        if wanted is Commits.ASYNCHRONOUS:
            own.note_commits(name, wanted, self._alone_after_s)  # before it is so
        self._set_commits(now, wanted)
        # A look later: by then every process of the server knows that commits wait.
        if wanted is Commits.SYNCHRONOUS and self._is_known_synchronous:
            own.note_commits(name, wanted, self._alone_after_s)
        self._is_known_synchronous = wanted is now is Commits.SYNCHRONOUS and _is_waited_for(standby, missing_s)
        own.note_standby(other_name, standby, is_reached=other is not None)
        self._say("primary", "its database is the primary")
        return stands_down

    def _set_commits(self, now: Commits, wanted: Commits) -> None:
        if wanted is now:
            return
        name = self._membership.other.name
        if wanted is Commits.SYNCHRONOUS:
            self._own.set_standby(name)
            self._console.own(f"commits wait for {name} from now on")
        else:
            self._own.set_standby(None)
            self._console.own(f"{name} is away: commits no longer wait for it, and would be lost with this host")

    def _keep_standby(self, other: Database | None) -> None:
        streams = self._own.rows(
            "SELECT 1 FROM pg_stat_wal_receiver WHERE status = 'streaming'"
            " AND clock_timestamp() - last_msg_receipt_time < interval '5 s'"
        )
        if streams:
            self._keep(CONTACT_FILE, {"boot": _boot(), "at_s": _since_boot_s()})
        self._say("standby", "its database is the standby")
        self._note_alive_elsewhere(other, Role.STANDBY)

    def _note_alive_elsewhere(self, other: Database | None, database: str) -> None:
        if other is not None and other.role is Role.PRIMARY:
            self._other.note_alive(self._membership.own, database)

    def _note_joined(self) -> None:
        if not self._membership.other.joined:
            self._membership = self._membership.with_joined(self._membership.other.name)
            write_membership(self._home, self._membership)

    # --- looking and saying -------------------------------------------------------------------------------------------

    def _say(self, state: str, text: str) -> None:
        """Once, until something else is so."""
        if state != self._said:
            self._said = state
            self._console.own(text)
            self._keep(DATABASE_FILE, {"state": state, "text": text})

    def _keep(self, name: str, content: dict[str, object]) -> None:
        """For other commands to read. A disk that refuses it must not keep a look from its end."""
        try:
            write_private_json(self._home.path / name, content)
        except OSError as error:
            self._note_problem(str(error))

    def _note_problem(self, text: str) -> None:
        problem = " ".join(text.split())
        if problem != self._problem:
            self._problem = problem
            self._console.own(f"the database of this host: {problem}")


def _is_waited_for(standby: Standby | None, missing_s: float) -> bool:
    """Whether PostgreSQL says so; while none is there, commits do wait, for whoever comes."""
    return standby.is_synchronous if standby else missing_s > 0


def said_of_database(home: StateDirectory) -> str:
    """What the keeper of this home last made of its database; "" if there was none."""
    try:
        return str(json.loads((home.path / DATABASE_FILE).read_text())["text"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def contact_age_s(home: StateDirectory) -> float | None:
    """Seconds since the standby of this home last heard its primary; None: it is not known, or was before a reboot."""
    try:
        kept = json.loads((home.path / CONTACT_FILE).read_text())
        return _since_boot_s() - float(kept["at_s"]) if kept["boot"] == _boot() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _since_boot_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
