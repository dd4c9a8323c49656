"""CPU time, wake-ups and memory of an idle fleet by kind of process.

    SWITCHYARD_HOME=.switchyard .venv/bin/python -m bench idle [--seconds 60] [--rounds 5]

It reads only /proc, so it causes no load on the fleet. The fleet is that of `make up` with the same home, without
requests. CPU time is exact (`schedstat`, of every thread); memory is
proportional (PSS: a page that several processes share counts once in all) and resident (RSS: in each)."""

import argparse
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.fleet.live_fleet import HOME
from controlplane.embedded.process_ownership import processes_of

KINDS = (
    ("controlplane.embedded", "launcher"),
    ("controlplane.web", "web"),
    ("controller@", "controller"),
    ("celery", "worker"),
    ("manage.py jobs", "jobs"),
    ("valkey-server", "Valkey"),
    ("postgres", "PostgreSQL"),
    ("body-parser/haproxy.cfg", "HAProxy, body parsers"),
    ("haproxy.cfg", "HAProxy"),
    ("engine_agent ingress", "ingress agents"),
    ("engine_agent node", "node agents"),
    ("engine_agent machine", "machine agents"),
    ("engine_agent.cell_proxy", "cell proxies"),
    ("--role leader", "engines, leaders"),
    ("--role follower", "engines, followers"),
)
"""Words of a command line, and the kind of its process. The first match counts."""
OTHERS = "others"
_LOOK_EVERY_S = 0.5
_NS = 1e9
_MIB = 1024.0


@dataclass(frozen=True)
class Used:
    """CPU seconds of one process since its start, and its voluntary context switches."""

    cpu_s: float
    sleeps: float


_NOTHING = Used(0.0, 0)


def kind_of(command: str) -> str:
    return next((kind for part, kind in KINDS if part in command), OTHERS)


def kinds_of(home: Path) -> dict[int, str]:
    found: dict[int, str] = {}
    for process in processes_of(home):
        try:
            with_children = [process, *process.children(recursive=True)]
            found |= {each.pid: kind_of(" ".join(each.cmdline())) for each in with_children}
        except psutil.Error:
            continue
    return found


def used_by(pid: int) -> Used | None:
    cpu_ns = sleeps = 0
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            cpu_ns += int((task / "schedstat").read_text().split()[0])
            sleeps += _field(task / "status", "voluntary_ctxt_switches:")
    except (OSError, IndexError):
        return None
    return Used(cpu_ns / _NS, sleeps)


def memory_mib(pid: int) -> tuple[float, float]:
    """Proportional and resident; 0 of what has ended or may not be read."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup")
        return _field(rollup, "Pss:") / _MIB, _field(rollup, "Rss:") / _MIB
    except OSError:
        return 0.0, 0.0


def _field(path: Path, name: str) -> int:
    line = next(line for line in path.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1])


def rates(kinds: dict[int, str], seconds: float) -> dict[str, list[Used]]:
    """What the processes of each kind use in a second, from now on for `seconds`. Children that are born and end
    meanwhile count as far as they were seen, twice a second."""
    kinds, began = dict(kinds), time.monotonic()
    first = {pid: used_by(pid) or _NOTHING for pid in kinds}
    last = dict(first)
    while time.monotonic() - began < seconds:
        time.sleep(_LOOK_EVERY_S)
        for pid, kind in list(kinds.items()):
            for child in _children(pid):
                kinds.setdefault(child, kind)
        last |= {pid: used for pid in kinds if (used := used_by(pid)) is not None}
    took_s = time.monotonic() - began
    found: dict[str, list[Used]] = defaultdict(list)
    for pid, now in last.items():
        then = first.get(pid, _NOTHING)
        found[kinds[pid]].append(Used((now.cpu_s - then.cpu_s) / took_s, (now.sleeps - then.sleeps) / took_s))
    return found


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def table(rounds: list[dict[str, list[Used]]], kinds: dict[int, str]) -> list[str]:
    """Rows of Markdown: medians over the rounds of sums by kind, dearest first, and the sum of all; memory is that of
    `kinds` now."""

    def row(name: str, pids: list[int], used: list[list[Used]]) -> tuple[float, str]:
        cpu_ms = statistics.median(sum(each.cpu_s for each in one) for one in used) * 1000
        sleeps = statistics.median(sum(each.sleeps for each in one) for one in used)
        pss, rss = (sum(column) for column in zip(*map(memory_mib, pids), strict=True))
        return cpu_ms, f"| {name} | {len(pids)} | {cpu_ms:.1f} | {sleeps:.0f} | {pss:.0f} | {rss:.0f} |"

    by_kind: dict[str, list[int]] = defaultdict(list)
    for pid, kind in kinds.items():
        by_kind[kind].append(pid)
    rows = sorted(
        (row(name, pids, [one.get(name, []) for one in rounds]) for name, pids in by_kind.items()), reverse=True
    )
    all_used = [[each for used in one.values() for each in used] for one in rounds]
    return [
        "| part | processes | ms of a core a second | wake-ups a second | proportional MiB | resident MiB |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        *(line for _, line in rows),
        row("**all**", list(kinds), all_used)[1],
    ]


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=60.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if not kinds_of(HOME):
        parser.error(f"nothing of {HOME} runs: start a fleet with `make up DETACH=1`")
    measured = [rates(kinds_of(HOME), options.seconds) for _ in range(options.rounds)]
    print("\n".join(table(measured, kinds_of(HOME))))
    load = Path("/proc/loadavg").read_text().split()[0]
    print(f"\nload average {load}; {options.rounds} rounds of {options.seconds:g} s")
