"""`python -m fleet.simulator`: runs a scenario over many seeds; says what held, what did not, and how to repeat it."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from fleet.simulator.invariants import INVARIANTS
from fleet.simulator.scenario import Outcome, Scenario, UnknownScenario, run, scenario_named, scenario_names

LINES = 400
"""Lines of a timeline that are printed; the figure has them all."""
TELL_EVERY_S = 2.0


class Progress:
    """One line on a terminal, rewritten; a line now and then in a log."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._began_s = self._told_s = perf_counter()

    def at(self, seed: int, part: float) -> None:
        """Seed number `seed` has come so far, 0 to 1."""
        now_s = perf_counter()
        if now_s - self._told_s < TELL_EVERY_S:
            return
        self._told_s = now_s
        done = (seed + part) / self._total
        left_s = (now_s - self._began_s) * (1.0 - done) / done if done else 0.0
        print(f"  {done:4.0%}  seed {seed + 1} of {self._total}, {left_s:.0f} s left", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 all held, 1 something did not, 2 asked wrongly."""
    asked = _parser().parse_args(arguments)
    try:
        scenario = scenario_named(asked.scenario)
    except UnknownScenario as unknown:
        print(unknown, file=sys.stderr)
        return 2
    if asked.seeds < 1:
        print(f"--seeds is {asked.seeds}; it must be at least 1", file=sys.stderr)
        return 2
    print(f"{asked.scenario}: {scenario.about}")
    failed, last, spent_s = _run_all(scenario, asked.first_seed, asked.seeds)
    for outcome in failed[:1] or ([last] if asked.verbose else []):
        _print_timeline(outcome)
    _print_summary(asked.seeds, failed, last, spent_s, asked.scenario)
    if asked.figure:
        from fleet.simulator.figure import write_figure

        shown = failed[0] if failed else last
        write_figure(shown.world, f"{asked.scenario}, seed {shown.seed}", asked.figure)
        print(f"figure: {asked.figure}")
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fleet.simulator", description=__doc__)
    names = ", ".join(scenario_names())
    parser.add_argument("scenario", help=f"one of: {names}")
    parser.add_argument("--seeds", type=int, default=1, help="how many runs, each with the next seed")
    parser.add_argument("--first-seed", type=int, default=0, help="the seed of the first run")
    parser.add_argument("--figure", type=Path, default=None, help="write a page with the run's course here")
    parser.add_argument("-v", "--verbose", action="store_true", help="print the timeline of a run that went well too")
    return parser


def _run_all(scenario: Scenario, first: int, count: int) -> tuple[list[Outcome], Outcome, float]:
    progress, failed = Progress(count), []
    began_s = perf_counter()
    outcome = None
    for index in range(count):
        outcome = run(scenario, first + index, lambda part, index=index: progress.at(index, part))  # type: ignore[misc]
        if outcome.failures:
            failed.append(outcome)
            print(f"seed {outcome.seed} FAILED: {outcome.failures[0]}")
    if outcome is None:
        raise ValueError(f"{count} seeds are none")
    return failed, outcome, perf_counter() - began_s


def _print_timeline(outcome: Outcome) -> None:
    entries = sorted((*outcome.world.journal.entries, *outcome.world.journal.violations), key=lambda entry: entry.at_s)
    print(f"\ntimeline of seed {outcome.seed}:")
    for entry in entries[:LINES]:
        print(f"  {entry.at_s:9.2f} s  {entry.kind:18} {entry.subject:24} {entry.text}")
    if len(entries) > LINES:
        print(f"  … and {len(entries) - LINES} lines more")
    for failure in outcome.failures:
        print(f"  failed: {failure}")


def _print_summary(seeds: int, failed: list[Outcome], last: Outcome, spent_s: float, name: str) -> None:
    world = last.world
    print("\ninvariants checked at every write and after every pass:")
    for invariant in INVARIANTS:
        print(f"  {invariant.name:4} {invariant.text}")
    print(f"\nlast seed {last.seed}: {world.queue.now_s:.0f} simulated seconds, {world.queue.done} events,", end=" ")
    print(f"{world.control.passes} passes, {world.store.writes} writes, {world.control.stale} stale decisions refused,")
    print(f"{world.control.kills} kills, {world.network.lost} of {world.network.sent} messages lost,", end=" ")
    print(f"{world.network.repeated} repeated")
    print(f"{seeds} {'seed' if seeds == 1 else 'seeds'} in {spent_s:.1f} s: {len(failed)} failed")
    for outcome in failed:
        print(f"  again: python -m fleet.simulator {name} --first-seed {outcome.seed} -v")


if __name__ == "__main__":
    sys.exit(main())
