"""Is a rank of real vLLM that computes slowly found, and nobody else? Ranks that a quota of processor time slows down.

    python -m bench.slow_rank [--cells 6] [--nodes 1] [--quota 0.3] [--window 30] [--before 4] [--after 6] [--write]

It starts cells of vLLM on CPU (needs the engine's environment), sends one request at a time to each in turn, and reads
what every rank says of its steps, as its agent does. Of each window it asks the planner of faults who is slow. After
`--before` windows one rank gets a share of one processor (cgroup, or else SIGSTOP by turns); it must be found within 3
windows, before that and besides nobody. Then the quota ends, and `--after` windows more must blame nobody else. With
`--nodes 4 --cells 2` the cohort are six followers of cells that run in lock-step. Some (before + 3 + after) windows and
two minutes; 1.2 GB of memory for each rank. Prints Markdown; exit status 1 if it was not so.
"""

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from engine_agent.engines.vllm.environment import install
from engine_agent.protocol.messages import StepTimes
from fleet.planning.fault_views import StepWindow
from fleet.planning.faults.fail_slow import find_slow, measure, relative_times
from fleet.planning.faults.planner import plan_faults
from fleet.planning.snapshot import FleetView
from tests.asking import CLIENT
from tests.engine_agent.engines.vllm.running_cell import (
    CACHE,
    PROMPTS,
    RunningCell,
    padded_artifact,
    parts_of,
    plan_of,
    running_cell,
)
from tests.fleet.planning.faults.faulty import with_faults
from tests.fleet.planning.fleets import NOW, SETTINGS, cell, fleet, member, node

FAULTS = SETTINGS.faults
CPU_V1, CPU_V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
PERIOD_S = 0.1
TOKENS = 24
WITHIN_WINDOWS = 3


@dataclass(frozen=True)
class Rank:
    """One rank of one cell; `node` is unique."""

    cell: RunningCell
    number: int
    name: str
    node: str

    def totals(self) -> StepTimes:
        """What it has computed since its start."""
        answer = CLIENT.get(self.cell.steps_url(self.number), timeout=30)
        return msgspec.json.decode(answer.content, type=StepTimes) if answer.status_code == 200 else StepTimes()


class Windows:
    """Of every rank, what it computed in each window."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._ranks = ranks
        self._before = {rank.node: rank.totals() for rank in ranks}
        self.known: dict[str, list[StepWindow]] = {rank.node: [] for rank in ranks}
        self.index = 0

    def cut(self) -> None:
        """End a window."""
        self.index += 1
        for rank in self._ranks:
            now, then = rank.totals(), self._before[rank.node]
            steps = {bucket: count - then.steps.get(bucket, 0) for bucket, count in now.steps.items()}
            spent = {bucket: ms - then.compute_ms.get(bucket, 0.0) for bucket, ms in now.compute_ms.items()}
            window = StepWindow(self.index, rank.name, 3, {b: n for b, n in steps.items() if n > 0}, spent)
            self.known[rank.node].append(window)
            self._before[rank.node] = now

    def view(self) -> FleetView:
        """As the planner of faults sees it."""
        cells: dict[str, list[Rank]] = {}
        for rank in self._ranks:
            cells.setdefault(rank.name, []).append(rank)
        parts = [node(f"s{number}") for number in range(4)]
        parts += [member(rank.node, of=rank.name) for rank in self._ranks]
        there = [cell(name, *(rank.node for rank in members)) for name, members in cells.items()]
        size = len(next(iter(cells.values())))
        known = {node_: tuple(windows[-FAULTS.step_windows :]) for node_, windows in self.known.items()}
        return with_faults(fleet(*parts, *there, wanted=len(cells), nodes_per_cell=size), windows=known)

    def row(self, cohort: Sequence[Rank], quota_of: str) -> str:
        """The last window: steps and milliseconds of each rank of the cohort, and scores."""
        last = {rank.node: self.known[rank.node][-1] for rank in cohort}
        times = relative_times(last, FAULTS)
        scores = measure(self.index, times, FAULTS) if len(times) > FAULTS.slow_peers else {}
        ms = {name: sum(w.compute_ms.values()) / max(1, sum(w.steps.values())) for name, w in last.items()}
        others = [value for name, value in ms.items() if name != quota_of]
        score = f"{scores[quota_of].score:.2f}, z {scores[quota_of].z:.1f}" if quota_of in scores else "-"
        worst = min((each.score for name, each in scores.items() if name != quota_of), default=0.0)
        steps = min(sum(w.steps.values()) for w in last.values())
        return f"{steps} | {ms[quota_of]:.1f} | {min(others):.1f} to {max(others):.1f} | {score} | {worst:.2f}"


@contextlib.contextmanager
def limited(pids: Sequence[int], share: float) -> Iterator[str]:
    """Processes may use so much of one processor, until the block ends; says how."""
    for folder, write in ((CPU_V1, _quota_v1), (CPU_V2, _quota_v2)):
        group = folder / f"switchyard-slow-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            write(group, share)
            for pid in pids:
                (group / "cgroup.procs").write_text(str(pid))
        except OSError:
            group.rmdir()
            continue
        try:
            yield f"a quota of {share:.0%} of a processor by {group}"
        finally:
            for pid in pids:
                with contextlib.suppress(OSError):
                    (folder / "cgroup.procs").write_text(str(pid))
            with contextlib.suppress(OSError):
                group.rmdir()
        return
    stop = threading.Event()
    turns = threading.Thread(target=_take_turns, args=(pids, share, stop))
    turns.start()
    try:
        yield f"SIGSTOP for {1 - share:.0%} of each {PERIOD_S:g} s"
    finally:
        stop.set()
        turns.join()


def _quota_v1(group: Path, share: float) -> None:
    (group / "cpu.cfs_period_us").write_text(str(int(PERIOD_S * 1e6)))
    (group / "cpu.cfs_quota_us").write_text(str(int(share * PERIOD_S * 1e6)))


def _quota_v2(group: Path, share: float) -> None:
    (group / "cpu.max").write_text(f"{int(share * PERIOD_S * 1e6)} {int(PERIOD_S * 1e6)}")


def _take_turns(pids: Sequence[int], share: float, stop: threading.Event) -> None:
    while not stop.is_set():
        for what, for_s in ((signal.SIGSTOP, (1 - share) * PERIOD_S), (signal.SIGCONT, share * PERIOD_S)):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, what)
            stop.wait(for_s)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def load(cells: Sequence[RunningCell]) -> Iterator[None]:
    """One request at a time, to each cell in turn: so that they do not take processors from each other."""
    stop = threading.Event()

    def send() -> None:
        number = 0
        while not stop.is_set():
            cells[number % len(cells)].complete(prompt=PROMPTS[4], max_tokens=TOKENS, ignore_eos=True)
            number += 1

    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield
    finally:
        stop.set()
        sender.join()


def slow_nodes(windows: Windows, lines: list[str], quota_of: str) -> set[str]:
    """Who is found slow now; what would follow is written down once."""
    view = windows.view()
    found = {slow.node: slow.reason for slow in find_slow(view, FAULTS)}
    if quota_of in found and not any("would follow" in line for line in lines):
        decided = [type(decision).__name__ for decision in plan_faults(view, SETTINGS, NOW)]
        lines.append(f"\nFound: {found[quota_of]}. What would follow: {', '.join(decided)}.\n")
    return set(found)


def run(cells: Sequence[RunningCell], nodes: int, options: argparse.Namespace) -> tuple[list[str], bool]:
    """Lines of Markdown, and whether all was as it should be."""
    ranks = [
        Rank(one, number, f"c{place}", one.node(number)) for place, one in enumerate(cells) for number in range(nodes)
    ]
    cohort = [rank for rank in ranks if (rank.number > 0) == (nodes > 1)]
    slow = cohort[len(cohort) // 2]
    pids = [part.pid for part in parts_of(slow.cell.ranks[slow.number])]
    lines, wrongly, found_after, how = [], set[str](), 0, ""
    windows, went = Windows(ranks), contextlib.ExitStack()
    with load(cells), went:
        total = options.before + WITHIN_WINDOWS + options.after
        for number in range(1, total + 1):
            is_limited = options.before < number <= options.before + WITHIN_WINDOWS
            if number == options.before + 1:
                how = went.enter_context(limited(pids, options.quota))
            if number == options.before + WITHIN_WINDOWS + 1:
                went.close()
            time.sleep(options.window)
            windows.cut()
            found = slow_nodes(windows, notes := [], slow.node)
            wrongly |= found - {slow.node}
            if slow.node in found and not found_after:
                found_after = number - options.before
                if not is_limited:
                    wrongly.add(slow.node)
            state = "limited" if is_limited else "free"
            row = f"| {number} | {state} | {windows.row(cohort, slow.node)} | {len(found)} |"
            print(row, *notes, f"load {os.getloadavg()[0]:.1f}", flush=True, file=sys.stderr)
            lines.append(row)
            lines += [] if not notes or any("Found" in line for line in lines) else notes
    is_right = found_after in range(1, WITHIN_WINDOWS + 1) and not wrongly
    table = [line for line in lines if line.startswith("|")]
    after = [line.strip() for line in lines if not line.startswith("|")]
    minutes = total * options.window / 60
    head = [
        "# A slow rank of real vLLM",
        "",
        f"`python -m bench.slow_rank --cells {options.cells} --nodes {nodes} --quota {options.quota:g} --window "
        f"{options.window:g}`: SmolLM2 in float32, {len(cohort)} {'followers' if nodes > 1 else 'leaders'}, "
        f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}.",
        "",
        f"One rank had {how}. It was found after {found_after or 'no'} windows (goal: {WITHIN_WINDOWS}); in "
        f"{minutes:.0f} minutes {len(wrongly)} others were.",
        "",
        "| window | the rank is | least steps | its ms a step | the others' | its score | worst other's | found |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    return [*head, *table, "", *after], is_right


def main() -> int:
    """Measure; 1 if it was not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=6)
    parser.add_argument("--nodes", type=int, default=1, help="of a cell, a rank each: 1, 2 or 4")
    parser.add_argument("--quota", type=float, default=0.3, help="of one processor")
    parser.add_argument("--window", type=float, default=FAULTS.step_window_s, help="seconds")
    parser.add_argument("--before", type=int, default=4, help="windows before the quota")
    parser.add_argument("--after", type=int, default=6, help="windows after it")
    parser.add_argument("--write", action="store_true", help="write it beside the other figures")
    options = parser.parse_args()
    artifact = padded_artifact(install(CACHE, lambda text: print(text, file=sys.stderr)))
    plan = plan_of(artifact, options.nodes)
    # One thread computes in each rank: more of them would share the processors with the other ranks'.
    plan = msgspec.structs.replace(plan, env={**plan.env, "OMP_NUM_THREADS": "1"})
    with tempfile.TemporaryDirectory(prefix="slow-rank-") as home, contextlib.ExitStack() as running:
        with ThreadPoolExecutor(2) as starters:  # two at once: each takes the processors for most of its start

            def start(number: int) -> RunningCell:
                return running.enter_context(running_cell(plan, Path(home) / str(number), options.nodes, 300.0))

            cells = list(starters.map(start, range(options.cells)))
        lines, is_right = run(cells, options.nodes, options)
    text = "\n".join(lines).rstrip() + "\n"
    print(text)
    if options.write:
        (ROOT / "docs/bench" / "slow_rank.md").write_text(text)
    return int(not is_right)


if __name__ == "__main__":
    sys.exit(main())
