"""`python -m engine_agent deep-checks --state DIR`: every deep check of this node, a line of JSON for each.

Run by the agent as a child at low priority, and by hand. What computes is checked in the engine's own Python, which may
have torch, by a child with a limit of its own. The plan of links, which has a secret, is read from standard input.
Exit status: 1 if anything was found wrong.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine_agent.node.checks.host import available_memory_bytes, check_disk, check_memory
from engine_agent.node.checks.links import LinkPlan, check_links, plan_from
from engine_agent.node.checks.result import Result, result_from, timed

ROOT = Path(__file__).resolve().parents[3]
COMPUTE_STARTS_S = 60.0
"""Importing torch on a machine that is busy."""
NICE = 10


@dataclass(frozen=True)
class DeepPlan:
    """How much is checked. `seconds`: of each check of memory and computing, about."""

    state: Path
    pythons: tuple[Path, ...] = ()
    seconds: float = 3.0
    memory_mib: int = 256
    disk_mib: int = 64
    disk_s: float = 20.0
    links: LinkPlan | None = None
    computes: bool = True


def run_deep(plan: DeepPlan) -> Iterator[Result]:
    """Each result as soon as it is there."""
    available = available_memory_bytes()
    yield timed("memory", lambda: check_memory(plan.memory_mib, plan.seconds, available))
    yield timed("disk", lambda: check_disk(plan.state, plan.disk_mib, plan.disk_s))
    if plan.computes:
        yield from _compute(plan)
    if plan.links is not None:
        yield from check_links(plan.links)


def _compute(plan: DeepPlan) -> Iterator[Result]:
    """In the first engine's Python that works; this one where none does."""
    found: list[Result] = []
    for python in (*plan.pythons, Path(sys.executable)):
        found = _compute_in(python, plan.seconds)
        if any(result.ok is not None for result in found):
            break
    yield from found


def _compute_in(python: Path, seconds: float) -> list[Result]:
    argv = [str(python), "-m", "engine_agent.node.checks.compute", "--seconds", f"{seconds:g}"]
    limit_s = COMPUTE_STARTS_S + 20 * seconds
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(argv, capture_output=True, timeout=limit_s, env=environment, cwd=ROOT, check=False)
    except subprocess.TimeoutExpired as error:
        partly = _results(error.stdout or b"")
        wanted = f"products within {limit_s:.0f} s"
        return [*partly, Result("matmul", False, f"no answer of {python} within {limit_s:.0f} s", wanted)]
    except OSError as error:
        return [Result("matmul", None, f"{python} does not start: {error.strerror}")]
    results = _results(done.stdout)
    if done.returncode not in (0, 1):
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no reason given"]
        ended = f"{python} ended with status {done.returncode}: {last[0]}"
        is_crash = done.returncode < 0
        results.append(Result("matmul", False if is_crash else None, ended, "it ends by itself" if is_crash else ""))
    return results


def _results(lines: bytes) -> list[Result]:
    return [result_from(line) for line in lines.splitlines() if line.startswith(b"{")]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine_agent deep-checks", description=__doc__)
    parser.add_argument("--state", required=True, type=Path, help="a folder on the disk to check")
    parser.add_argument("--python", action="append", default=[], type=Path, help="an engine's Python; may be repeated")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each check of memory and computing, about")
    parser.add_argument("--light", action="store_true", help="memory and disk alone: something runs here")
    parser.add_argument("--links", action="store_true", help="read a plan of links from standard input")
    options = parser.parse_args(argv)
    try:
        links = plan_from(sys.stdin.read()) if options.links else None
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    os.nice(NICE)
    failed = False
    plan = DeepPlan(options.state, tuple(options.python), options.seconds, links=links, computes=not options.light)
    for result in run_deep(plan):
        sys.stdout.write(result.as_line() + "\n")
        sys.stdout.flush()
        failed |= result.ok is False
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
