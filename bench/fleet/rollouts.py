"""Duration of good and bad rollouts under load, and what clients saw.

    .venv/bin/python -m bench rollouts                                   # every case but `kills`, on sim-70b
    .venv/bin/python -m bench rollouts good --deployment smollm2 --max-tokens 8
    .venv/bin/python -m bench rollouts kills --kills 10

Needs a fleet from `make up` (same SWITCHYARD_HOME) without other users: `kills` kills the controller and the worker.
Streaming requests at a steady rate go to every region of the deployment."""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import psycopg

from bench.fleet.live_fleet import ACTIVE, Fleet, Row, at, fewest_ready, launched, load, service, spans, wait_for
from lab.steady_load import Answer

# 2.5 requests a second reach each of two cells: 50 samples take 20 s.
BAKED = {"min_healthy_s": 5, "canary_bake_s": 25, "bake_s": 25}
CANARY_BAKED = {**BAKED, "bake_s": 0}
UNBAKED = {**BAKED, "canary_bake_s": 0, "bake_s": 0}
LIMIT_S = 600.0
KILLS_APART_S = (31.0, 38.0)
"""The launcher counts a process that ran for 30 s as recovered, and restarts it immediately when it dies."""


@dataclass(frozen=True)
class Bench:
    fleet: Fleet
    deployment: str
    kills: int
    chance: random.Random

    def other(self) -> str:
        model = self.fleet.get(f"deployments/{self.deployment}")["model_version"]
        versions = self.fleet.rows("model-versions", model=model.partition("@")[0], state="released")
        return next(str(version["id"]) for version in versions if version["id"] != model)

    def bad(self, name: str) -> str:
        return f"{self.deployment}@bad-{name}"

    def start(self, version: str, policy: Row) -> int:
        request = {"version": version, "policy": policy, "allow_unreleased": True, "why": "bench"}
        return int(self.fleet.post("rollouts", deployment=self.deployment, **request)["id"])

    def act(self, rollout: int, action: str) -> None:
        self.fleet.post(f"rollouts/{rollout}/{action}", why="bench")

    def rollout(self, rollout: int) -> Row:
        row: Row = self.fleet.get(f"rollouts/{rollout}")
        return row

    def end(self, rollout: int) -> Row:
        """Wait until the rollout ends. A paused one is rolled back, so that the next case can start."""
        moving = ACTIVE - {"paused"}
        wait_for(lambda: self.rollout(rollout)["state"] not in moving, LIMIT_S, f"rollout {rollout} ends")
        row = self.rollout(rollout)
        if row["state"] == "paused":
            print(f"  rollout {rollout} paused: {row['reason']}", flush=True)
            self.act(rollout, "roll-back")
            wait_for(lambda: self.rollout(rollout)["state"] not in ACTIVE, LIMIT_S, f"rollout {rollout} goes back")
        return self.rollout(rollout)


Case = Callable[[Bench], list[Row]]
"""Does its work and returns the rollouts as they ended."""


def good(bench: Bench) -> list[Row]:
    return [bench.end(bench.start(bench.other(), BAKED))]


def crash(bench: Bench) -> list[Row]:
    """The version never starts."""
    return [bench.end(bench.start(bench.bad("crash"), UNBAKED))]


def slow(bench: Bench) -> list[Row]:
    """The version becomes ready and is slower by half."""
    return [bench.end(bench.start(bench.bad("slow"), CANARY_BAKED))]


def answer(bench: Bench) -> list[Row]:
    """The version starts and answers wrong."""
    return [bench.end(bench.start(bench.bad("answer"), UNBAKED))]


def kills(bench: Bench) -> list[Row]:
    """`kill -9` of the controller, and every second time of the worker, while one rollout follows another."""
    ended: list[Row] = []
    rollout = bench.start(bench.other(), {**UNBAKED, "min_healthy_s": 8})
    resumed = []
    for number in range(bench.kills):
        pause_until = time.monotonic() + bench.chance.uniform(*KILLS_APART_S)
        while time.monotonic() < pause_until:
            if (row := bench.rollout(rollout))["state"] not in ACTIVE:
                ended.append(row)
                rollout = bench.start(bench.other(), {**UNBAKED, "min_healthy_s": 8})
            time.sleep(0.5)
        resumed.append(kill_and_wait(("controller", "worker") if number % 2 else ("controller",)))
        print(f"  kill {number + 1}: the next pass began {resumed[-1]:.1f} s after it", flush=True)
    print(
        f"  resumed after {statistics.median(resumed):.1f} s (median), {max(resumed):.1f} s at most of {len(resumed)}"
    )
    return [*ended, bench.end(rollout)]


def kill_and_wait(names: tuple[str, ...]) -> float:
    """Seconds until another reconciler holds the lease."""
    with psycopg.connect(launched()["database_url"], autocommit=True) as database:
        lease = "SELECT holder, extract(epoch FROM renewed_at) FROM kernel_lease WHERE name = 'reconciler'"
        victims = [process for name in names for process in service(name)]
        killed_at = time.time()
        for process in victims:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        before = database.execute(lease).fetchone()

        def taken() -> bool:
            now = database.execute(lease).fetchone()
            return now is not None and before is not None and now[0] != before[0] and float(now[1]) > killed_at

        wait_for(taken, 60, "another reconciler takes over")
        return time.time() - killed_at


CASES: dict[str, Case] = {case.__name__: case for case in (good, crash, slow, answer, kills)}


def whole(bench: Bench) -> None:
    fleet, name = bench.fleet, bench.deployment
    wait_for(lambda: fleet.is_whole(name), LIMIT_S, f"every cell of {name} is ready and nothing moves")


def run(bench: Bench, name: str, rate: float, max_tokens: int) -> None:
    fleet = bench.fleet
    whole(bench)
    before, mark = fleet.cells(bench.deployment), fleet.last_event()
    print(f"\n{name}: {CASES[name].__doc__ or 'A good version.'}".rstrip(), flush=True)
    with load(fleet.ingresses(bench.deployment), bench.deployment, rate, max_tokens) as answers:
        began = time.monotonic()
        ended = CASES[name](bench)
        took_s = time.monotonic() - began
        whole(bench)
        whole_s = time.monotonic() - began
    events = fleet.events(mark, deployment=bench.deployment)
    for rollout in ended:
        print(f"  rollout {rollout['id']} to {rollout['to_version']} {rollout['state']}: {rollout['reason']}")
        for key, number in ((rollout["verdict"] or {}).get("numbers") or {}).items():
            print(f"    {key} = {number}")
    report(events, before, fleet.cells(bench.deployment), answers)
    print(f"  ended after {took_s:.1f} s, whole after {whole_s:.1f} s", flush=True)


def report(events: list[Row], before: dict[str, Row], after: dict[str, Row], answers: list[Answer]) -> None:
    began = at(events[0])
    for event in events:
        if event["kind"].startswith(("rollout.", "cell.")):
            print(f"    {at(event) - began:7.1f} {event['message']}")
    failed = [answer for answer in answers if answer.error]
    for one in failed:
        print(f"  failed, from {one.cell or 'nobody'}: {one.error}")
    ready = {name for name, cell in before.items() if cell["state"] == "ready"}
    least = fewest_ready(events, ready)
    touched = [name for name, cell in before.items() if after.get(name, {}).get("generation") != cell["generation"]]
    print(f"  requests {len(answers)}, failed {len(failed)}; at least {least} of {len(ready)} cells ready;", end=" ")
    print(f"{len(touched)} of {len(before)} cells touched")
    steps = (("drain", "draining", "starting"), ("end", "draining", "stopped"), ("start", "starting", "ready"))
    for label, begins, ends in steps:
        if found := spans(events, f"cell.{begins}", f"cell.{ends}"):
            print(f"  {label}: median {statistics.median(found):.1f} s, longest {max(found):.1f} s of {len(found)}")
    back = [event for event in events if event["kind"] == "rollout.rolled_back"]
    first = [event for event in events if event["kind"] in {"cell.starting", "cell.ready"}]
    if back and first:
        print(f"  rolled back {at(back[0]) - at(first[0]):.1f} s after the canary started", end="")
        served = [event for event in first if event["kind"] == "cell.ready"]
        turned = next((event for event in events if event["kind"] == "rollout.rolling_back"), None)
        if turned and served and at(served[0]) < at(turned):
            print(
                f", {at(back[0]) - at(served[0]):.1f} s after it was ready, {at(back[0]) - at(turned):.1f} s after"
                " the verdict",
                end="",
            )
        print()


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "cases", nargs="*", metavar="case", help=f"of {', '.join(CASES)}; all but kills if none is named"
    )
    parser.add_argument("--deployment", default="sim-70b")
    parser.add_argument("--rate", type=float, default=5.0, help="requests a second to each region")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=7, help="of the moments of kills")
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    bench = Bench(Fleet(), options.deployment, options.kills, random.Random(options.seed))
    for name in options.cases or [name for name in CASES if name != "kills"]:
        run(bench, name, options.rate, options.max_tokens)
