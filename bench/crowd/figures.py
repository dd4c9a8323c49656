"""What is measured of a crowd, read where the control plane itself reads: in PostgreSQL."""

import statistics
import threading
from dataclasses import dataclass, field
from typing import Any

import msgspec

from bench.crowd.agents import Standing

LOOK_EVERY_S = 1.0
_AGES = """
SELECT extract(epoch FROM clock_timestamp())::float8 - (telemetry->>'agent_rss_bytes')::float8 / 1e6
FROM fleet_nodereport WHERE connected AND telemetry ? 'agent_rss_bytes'
"""
_REPORTED = """
SELECT count(*) FROM fleet_nodereport WHERE connected AND (telemetry->>'agent_rss_bytes')::float8 > %s
"""
_OUT_OF_ORDER = "SELECT state, count(*) FROM fleet_node WHERE state <> 'ready' GROUP BY state"


@dataclass
class Ages:
    """Seconds, of looks at all nodes: the mean of means, the p99 and the oldest of all looks, and of passes."""

    means: list[float] = field(default_factory=list)
    p99s: list[float] = field(default_factory=list)
    oldest: float = 0.0
    last_pass: dict[str, float] = field(default_factory=dict)
    longest_pass: dict[str, float] = field(default_factory=dict)
    suspects: int = 0
    lost: int = 0

    def __str__(self) -> str:
        if not self.means:
            return "no reports"
        passes = ", ".join(
            f"{loop} {age:.1f} s old at most, took {self.longest_pass[loop]:.2f} s"
            for loop, age in sorted(self.last_pass.items())
        )
        return (
            f"reports: mean age {statistics.mean(self.means):.2f} s, p99 {max(self.p99s):.2f} s, oldest "
            f"{self.oldest:.2f} s; suspect at worst {self.suspects}, lost {self.lost}\n  passes: {passes}"
        )


class Watch(threading.Thread):
    """Looks at the database until it is stopped. `take` gives what was seen since it was last called."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._ages = Ages()
        self._lock = threading.Lock()
        self._ends = threading.Event()

    def run(self) -> None:
        from django.db import connection

        while not self._ends.wait(LOOK_EVERY_S):
            self._look()
        connection.close()

    def take(self) -> Ages:
        with self._lock:
            ages, self._ages = self._ages, Ages()
        return ages

    def stop(self) -> None:
        self._ends.set()
        self.join()

    def _look(self) -> None:
        from kernel.loop_passes import control_standing

        ages = sorted(age for (age,) in rows(_AGES))
        states = dict(rows(_OUT_OF_ORDER))
        with self._lock:
            seen = self._ages
            if ages:
                seen.means.append(statistics.mean(ages))
                seen.p99s.append(ages[int(0.99 * (len(ages) - 1))])
                seen.oldest = max(seen.oldest, ages[-1])
            for loop in control_standing().loops:
                seen.last_pass[loop.loop] = max(seen.last_pass.get(loop.loop, 0.0), loop.age_s)
                seen.longest_pass[loop.loop] = max(seen.longest_pass.get(loop.loop, 0.0), loop.took_s)
            seen.suspects = max(seen.suspects, states.get("suspect", 0))
            seen.lost = max(seen.lost, states.get("lost", 0))


def rows(statement: str, *arguments: Any) -> list[tuple[Any, ...]]:
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(statement, arguments)
        return list(cursor.fetchall())


def reported_since(at: float) -> int:
    """How many nodes' stored reports were made after this second since 1970, on an open connection."""
    ((count,),) = rows(_REPORTED, at * 1e6)
    return int(count)


class CrowdStanding(threading.Thread):
    """The newest standing that a process of agents wrote."""

    def __init__(self, output: Any) -> None:
        super().__init__(daemon=True)
        self.newest = Standing(at=0.0, agents=0, connected=0, tries=0, reasons={})
        self._output = output

    def run(self) -> None:
        for line in self._output:
            self.newest = msgspec.json.decode(line, type=Standing)
