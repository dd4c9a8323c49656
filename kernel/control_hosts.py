"""The hosts of a control plane: each web process reports its own, so that all detect a silent host. Ages are
differences of PostgreSQL's clock."""

import socket
from dataclasses import dataclass
from datetime import UTC, datetime

from django.db import connection

from kernel.models import ControlHost

SEEN_EVERY_S = 5.0
"""How often a web process reports its host."""
SILENT_AFTER_S = 20.0
"""Four reports; web restarts in less."""
_SEEN = """
INSERT INTO kernel_controlhost (name, seen_at) VALUES (%s, clock_timestamp())
ON CONFLICT (name) DO UPDATE SET seen_at = EXCLUDED.seen_at
"""
_FORGET = "DELETE FROM kernel_controlhost WHERE seen_at < clock_timestamp() - interval '1 hour'"
_HOSTS = """
SELECT name, seen_at, EXTRACT(EPOCH FROM clock_timestamp() - seen_at)::float8 FROM kernel_controlhost ORDER BY name
"""


@dataclass(frozen=True, slots=True)
class ControlHostStanding:
    """One host: when it last reported, and how many seconds ago that was."""

    name: str
    seen_at: datetime
    silent_s: float

    @property
    def is_silent(self) -> bool:
        return self.silent_s > SILENT_AFTER_S

    @property
    def last_heard(self) -> str:
        return f"{self.seen_at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"

    def __str__(self) -> str:
        return f"{self.name} silent since {self.last_heard}" if self.is_silent else self.name


@dataclass(frozen=True, slots=True)
class ControlHosts:
    hosts: tuple[ControlHostStanding, ...]

    @property
    def problems(self) -> dict[str, str]:
        """Returns a sentence by silent host, with a time instead of an age, because an incident keeps its text."""
        return {
            host.name: f"{host.name} has not reported since {host.last_heard}" for host in self.hosts if host.is_silent
        }

    def __str__(self) -> str:
        """Returns "" for a control plane of one host."""
        return ", ".join(map(str, self.hosts)) if len(self.hosts) > 1 else ""


def this_host() -> str:
    return socket.gethostname()[:64]


def control_host_seen(name: str) -> None:
    """Report that this host runs, and delete hosts that have been silent for an hour."""
    with connection.cursor() as cursor:
        cursor.execute(_SEEN, [name])
        cursor.execute(_FORGET)


def control_host_left(name: str) -> None:
    """Report a regular stop, so that this host does not count as silent."""
    ControlHost.objects.filter(name=name).delete()


def control_hosts() -> ControlHosts:
    with connection.cursor() as cursor:
        cursor.execute(_HOSTS)
        return ControlHosts(tuple(ControlHostStanding(*row) for row in cursor.fetchall()))
