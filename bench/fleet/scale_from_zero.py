"""Time to the first token of a deployment without cells.

The ingress holds a request, the control plane starts a cell, and the request is answered. Prints the time of each step
and the outcomes of all held requests.

    .venv/bin/python -m bench scale_from_zero --deployment sim-70b --rounds 3

Needs a fleet from `make up` with the same SWITCHYARD_HOME without other users; `--deployment smollm2` on a fleet with
vLLM uses real weights. With `--forget` every second round drops the weights: artifacts from S3 from the artifact cache,
other files from the page cache."""

import argparse
import asyncio
import os
import shutil
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.fleet.live_fleet import Fleet, Row, at, wait_for
from engine_agent.engines.artifacts import Entry, exclusively
from lab.steady_load import Answer, one_request

CACHE = Path(os.environ.get("SWITCHYARD_CACHE", ".cache")).resolve()
FETCHED = "fetched"
EMPTY_LIMIT_S, HOLD_LIMIT_S = 120.0, 60.0
FORGOTTEN_S = 20.0
"""Longer than the autoscaler's mean of the load: the round before starts no cell of this one."""
LIVE = ("pending", "starting", "ready", "draining")
STEPS = ("deployment.scaled", "cell.pending", "cell.starting", "cell.ready")


@dataclass
class Round:
    """One start: seconds after the first request was sent, by what happened; and every request of it."""

    is_warm: bool
    began_at: float
    steps: dict[str, float] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)

    @property
    def first_token_s(self) -> float:
        began = min(one.began for one in self.answers)
        return min((one.first_token for one in self.answers if one.first_token), default=float("nan")) - began

    @property
    def failed(self) -> list[str]:
        return [one.error for one in self.answers if one.error]


def empty(fleet: Fleet, deployment: str, region: str, hold_s: float) -> None:
    """No cells anywhere, a range from none in this region, and the autoscaler acts on it."""
    places = [{"region": place, "cells": 0} for place in fleet.wanted(deployment)]
    fleet.ask("PATCH", f"deployments/{deployment}", {"regions": places})
    wait_for(lambda: not any(c["state"] in LIVE for c in fleet.cells(deployment).values()), EMPTY_LIMIT_S, "no cells")
    time.sleep(FORGOTTEN_S)
    policy = {"mode": "act", "idle_s": 600, "hold_s": hold_s}
    ranged = [{"region": region, "cells": {"min": 0, "max": 4}}]
    fleet.ask("PATCH", f"deployments/{deployment}", {"regions": ranged, "scaling": policy})
    wait_for(lambda: holds(fleet, deployment, region), HOLD_LIMIT_S, "the ingress holds its requests")


def holds(fleet: Fleet, deployment: str, region: str) -> bool:
    """Whether the region's table says so, and its ingresses have it in force."""
    newest = fleet.get("routing-tables", region=region, page_size=1)["results"][0]
    pools = {pool["name"]: pool for pool in fleet.get(f"routing-tables/{newest['id']}")["body"]["pools"]}
    there = fleet.rows("ingresses", region=region)
    return bool(pools[deployment].get("hold")) and all(one["revision"] == newest["revision"] for one in there)


def forget(artifacts: list[str]) -> None:
    """Let this machine know nothing of the weights; no engine may use them meanwhile."""
    for entry in (CACHE / FETCHED).glob("*.lock"):
        known = Entry(CACHE / FETCHED, entry.stem)
        with exclusively(known.lock, on_wait=lambda: None):
            shutil.rmtree(known.folder, ignore_errors=True)
    for folder in filter(Path.is_dir, map(Path, artifacts)):
        for path in filter(Path.is_file, folder.rglob("*")):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


async def ask(url: str, model: str, requests: int, over_s: float) -> list[Answer]:
    answers: list[Answer] = []
    async with httpx.AsyncClient(timeout=700) as client, asyncio.TaskGroup() as group:
        for _ in range(requests):
            group.create_task(one_request(client, url, model, 16, answers))
            await asyncio.sleep(over_s / requests)
    return answers


def start(fleet: Fleet, options: argparse.Namespace, url: str, is_warm: bool) -> Round:
    last = fleet.last_event()
    made = Round(is_warm, time.time())
    made.answers = asyncio.run(ask(url, options.deployment, options.requests, options.over))
    for event in fleet.events(last, deployment=options.deployment):
        if event["kind"] in STEPS:
            made.steps.setdefault(event["kind"], at(event) - made.began_at)
    return made


def artifacts_of(fleet: Fleet, deployment: str) -> list[str]:
    row: Row = fleet.get(f"deployments/{deployment}")
    versions = [one for one in fleet.rows("model-versions") if row["model_version"] in (one["id"], one.get("label"))]
    return [str(one.get("artifact_uri") or "").removeprefix("file://") for one in versions]


def table(rounds: list[Round]) -> list[str]:
    lines = ["| weights | first token, s | " + " | ".join(STEPS) + " | held and answered | failed |"]
    lines.append("| --- |" + " ---: |" * (len(STEPS) + 3))
    for one in rounds:
        steps = " | ".join(f"{one.steps[name]:.2f}" if name in one.steps else "-" for name in STEPS)
        known = "known" if one.is_warm else "forgotten"
        good = len(one.answers) - len(one.failed)
        lines.append(f"| {known} | {one.first_token_s:.2f} | {steps} | {good} | {len(one.failed)} |")
    return lines


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--deployment", default="sim-70b")
    parser.add_argument("--region", default="us-east-1")
    parser.add_argument("--rounds", type=int, default=3, help="of each kind")
    parser.add_argument("--requests", type=int, default=12, help="in each round, the first of which starts the cell")
    parser.add_argument("--over", type=float, default=2.0, help="seconds within which they come")
    parser.add_argument("--hold-s", type=float, default=300.0)
    parser.add_argument("--forget", action="store_true", help="also without what the machine knows of the weights")
    options = parser.parse_args()
    fleet = Fleet()
    before: Any = fleet.get(f"deployments/{options.deployment}")
    url = next(row["ingress_url"] for row in fleet.rows("regions") if row["name"] == options.region)
    rounds: list[Round] = []
    try:
        for number in range(options.rounds * (2 if options.forget else 1)):
            is_warm = not options.forget or number % 2 == 0
            empty(fleet, options.deployment, options.region, options.hold_s)
            if not is_warm:
                forget(artifacts_of(fleet, options.deployment))
            rounds.append(start(fleet, options, url, is_warm))
            print(table(rounds)[-1], flush=True)
    finally:
        places = [{"region": one["region"], "cells": one["cells"]} for one in before["regions"]]
        fleet.ask("PATCH", f"deployments/{options.deployment}", {"regions": places, "scaling": {"mode": "shadow"}})
    print(f"\nload {os.getloadavg()[0]:.1f}")
    print("\n".join(table(rounds)))
    for is_warm, known in ((True, "known"), (False, "forgotten")):
        if took := [one.first_token_s for one in rounds if one.is_warm is is_warm]:
            print(f"first token with weights {known}: median {statistics.median(took):.2f} s of {len(took)}")
    if failed := [error for one in rounds for error in one.failed]:
        raise SystemExit(f"{len(failed)} requests failed, the first with {failed[0]}")
