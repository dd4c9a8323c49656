"""The hosts of a control plane that has two, how their database is, and what of that somebody must know. The launchers
write the rows (`kernel.models.ControlHost`); all ages are differences of PostgreSQL's own clock.
"""

from dataclasses import dataclass
from datetime import UTC, datetime

from django.db import connection

SILENT_AFTER_S = 20.0
"""A launcher writes every second; web, which opens incidents, may be started anew in this time."""
LAGS_AFTER_S = 10.0
_HOSTS = """
SELECT name, address, database, commits, lag_bytes, lag_s, seen_at,
       EXTRACT(EPOCH FROM clock_timestamp() - seen_at)::float8,
       EXTRACT(EPOCH FROM clock_timestamp() - commits_since)::float8
FROM kernel_controlhost ORDER BY name
"""


@dataclass(frozen=True, slots=True)
class ControlHostStanding:
    """One host, as `kernel.models.ControlHost` explains; when it was last seen, how many seconds ago, and for how many
    its commits are as they are."""

    name: str
    address: str
    database: str
    commits: str
    lag_bytes: int | None
    lag_s: float | None
    seen_at: datetime
    silent_s: float
    commits_since_s: float | None

    @property
    def is_silent(self) -> bool:
        return self.silent_s > SILENT_AFTER_S

    @property
    def heard_last(self) -> str:
        return f"{self.seen_at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"

    def __str__(self) -> str:
        if self.is_silent:
            return f"{self.name} silent since {self.heard_last}"
        lag = "" if self.lag_bytes is None else f", {self.lag_s or 0.0:.1f} s behind"
        return f"{self.name} {self.database}{lag}" if self.database else self.name


@dataclass(frozen=True, slots=True)
class ControlHosts:
    """All of them; none for a control plane of one host."""

    hosts: tuple[ControlHostStanding, ...]

    @property
    def primary(self) -> ControlHostStanding | None:
        return next((host for host in self.hosts if host.commits), None)

    @property
    def is_synchronous(self) -> bool:
        """Whether what is acknowledged is on two hosts."""
        return self.primary is not None and self.primary.commits == "synchronous"

    @property
    def problems(self) -> dict[str, str]:
        """Subject -> what is wrong with it, in one sentence that stays true: an incident keeps its first one."""
        found = {
            host.name: f"{host.name} at {host.address} has not been heard since {host.heard_last}"
            for host in self.hosts
            if host.is_silent
        }
        primary = self.primary
        if primary is not None and not self.is_synchronous:
            found["standby"] = (
                f"the database on {primary.name} has no standby that has everything: what is acknowledged now would be"
                f" lost with {primary.name}"
            )
        for host in self.hosts:
            if host.lag_s is not None and host.lag_s > LAGS_AFTER_S and not host.is_silent:
                found["lag"] = (
                    f"the standby on {host.name} is more than {LAGS_AFTER_S:.0f} s behind, and commits wait for it"
                )
        return found

    def __str__(self) -> str:
        if not self.hosts:
            return ""
        commits = "commits wait for the standby" if self.is_synchronous else "no standby has everything"
        return f"{', '.join(map(str, self.hosts))}; {commits}"


def control_hosts() -> ControlHosts:
    """As of now, in one query."""
    with connection.cursor() as cursor:
        cursor.execute(_HOSTS)
        return ControlHosts(tuple(ControlHostStanding(*row) for row in cursor.fetchall()))
