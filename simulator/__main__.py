"""`python -m simulator`: runs a scenario over many seeds; prints which invariants held, which failed, and how to repeat
a failure."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from simulator.invariants import INVARIANTS
from simulator.scenario import (
    Kill,
    Outcome,
    Scenario,
    run,
    sweep,
)
from simulator.scenarios import UnknownScenario, scenario_named, scenario_names

MAX_LINES = 400
"""Lines of a timeline that are printed; the figure has all of them."""
PRINT_EVERY_S = 2.0


class Progress:
    """One line on a terminal, rewritten; one line now and then in a log."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._began_s = self._printed_s = perf_counter()

    def at(self, seed: int, part: float) -> None:
        """Shows the progress of seed number `seed`, 0 to 1."""
        now_s = perf_counter()
        if now_s - self._printed_s < PRINT_EVERY_S:
            return
        self._printed_s = now_s
        done = (seed + part) / self._total
        left_s = (now_s - self._began_s) * (1.0 - done) / done if done else 0.0
        print(f"  {done:4.0%}  seed {seed + 1} of {self._total}, {left_s:.0f} s left", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 if all held, 1 if something failed, 2 for wrong arguments."""
    args = _parser().parse_args(arguments)
    try:
        scenario = scenario_named(args.scenario)
    except UnknownScenario as unknown:
        print(unknown, file=sys.stderr)
        return 2
    if args.seeds < 1:
        print(f"--seeds is {args.seeds}; it must be at least 1", file=sys.stderr)
        return 2
    print(f"{args.scenario}: {scenario.about}")
    runs = _run_all(scenario, args)
    failed, last = runs.failed, runs.last
    for outcome in failed[:1] or ([last] if args.verbose else []):
        _print_timeline(outcome)
    _print_summary(args.scenario, args.seeds, runs)
    if args.figure:
        from simulator.plot import write_figure

        shown = failed[0] if failed else last
        write_figure(shown.world, f"{args.scenario}, seed {shown.seed}", args.figure)
        print(f"figure: {args.figure}")
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m simulator", description=__doc__)
    names = ", ".join(scenario_names())
    parser.add_argument("scenario", help=f"one of: {names}")
    parser.add_argument("--seeds", type=int, default=1, help="number of runs, each with the next seed")
    parser.add_argument("--first-seed", type=int, default=0, help="the seed of the first run")
    parser.add_argument("--figure", type=Path, default=None, help="write a page with a figure of the run here")
    parser.add_argument("--kill", type=int, default=None, metavar="N", help="kill before write N only")
    parser.add_argument("--whole", action="store_true", help="with --kill: kill all processes of the control plane")
    parser.add_argument(
        "--sweep", action="store_true", help="run every seed once per write, with a kill before that write"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="also print the timeline of successful runs")
    return parser


@dataclass
class Runs:
    last: Outcome
    failed: list[Outcome] = field(default_factory=list)
    count: int = 0
    spent_s: float = 0.0


def _run_all(scenario: Scenario, args: argparse.Namespace) -> Runs:
    progress, runs = Progress(args.seeds), None
    began_s = perf_counter()
    for outcome in _outcomes(scenario, args, progress):
        runs = runs or Runs(outcome)
        runs.last, runs.count = outcome, runs.count + 1
        if outcome.failures:
            runs.failed.append(outcome)
            print(f"{_outcome_name(outcome)} FAILED: {outcome.failures[0]}")
    if runs is None:
        raise ValueError(f"{args.seeds} seeds are none")
    runs.spent_s = perf_counter() - began_s
    return runs


def _outcomes(scenario: Scenario, args: argparse.Namespace, progress: Progress) -> Iterator[Outcome]:
    kill = None if args.kill is None else Kill(args.kill, args.whole)
    for index in range(args.seeds):
        seed = args.first_seed + index
        if not args.sweep:
            yield run(scenario, seed, lambda part, index=index: progress.at(index, part), kill=kill)  # type: ignore[misc]
            continue
        for half, whole in enumerate((False, True)):
            for done, outcome in enumerate(sweep(scenario, seed, whole=whole)):
                progress.at(index, (half + min(1.0, done / (outcome.world.store.writes or 1))) / 2.0)
                yield outcome


def _outcome_name(outcome: Outcome) -> str:
    if outcome.kill is None:
        return f"seed {outcome.seed}"
    who = "everything" if outcome.kill.whole else "who writes"
    return f"seed {outcome.seed}, {who} killed before write {outcome.kill.write},"


def _print_timeline(outcome: Outcome) -> None:
    entries = sorted(
        (*outcome.world.timeline.entries, *outcome.world.timeline.violations), key=lambda entry: entry.at_s
    )
    print(f"\ntimeline of seed {outcome.seed}:")
    for entry in entries[:MAX_LINES]:
        print(f"  {entry.at_s:9.2f} s  {entry.kind:18} {entry.subject:24} {entry.text}")
    if len(entries) > MAX_LINES:
        print(f"  … and {len(entries) - MAX_LINES} more lines")
    for failure in outcome.failures:
        print(f"  failed: {failure}")


def _print_summary(name: str, seeds: int, runs: Runs) -> None:
    last, world = runs.last, runs.last.world
    reconciler, network = world.reconciler, world.network
    print("\ninvariants checked at every write and after every pass:")
    for invariant in INVARIANTS:
        print(f"  {invariant.name:4} {invariant.text}")
    print(f"\nlast seed {last.seed}: {world.queue.now_s:.0f} simulated seconds, {world.queue.done} events,", end=" ")
    print(f"{reconciler.passes} passes, {world.store.writes} writes, {reconciler.stale} stale decisions refused,")
    print(f"{reconciler.kills} kills, {network.lost} of {network.sent} messages lost,", end=" ")
    print(f"{network.repeated} repeated")
    total = f"{seeds} {'seed' if seeds == 1 else 'seeds'}" + (f", {runs.count} runs" if runs.count > seeds else "")
    print(f"{total} in {runs.spent_s:.1f} s: {len(runs.failed)} failed")
    for outcome in runs.failed:
        print(f"  again: python -m simulator {name} --first-seed {outcome.seed}{_killed_again(outcome)} -v")


def _killed_again(outcome: Outcome) -> str:
    if outcome.kill is None:
        return ""
    return f" --kill {outcome.kill.write}" + (" --whole" if outcome.kill.whole else "")


if __name__ == "__main__":
    sys.exit(main())
