"""Kills the primary of a database with a synchronous standby in the middle of a rollout, promotes the standby, and says
how long decisions paused, whether the rollout went on, and what became of acknowledged writes and of requests.

    .venv/bin/python -m bench.promotion --rounds 5

It starts everything itself, in a temporary home: two PostgreSQL, the fleet of `make up ENGINE=sim` on ports from
SWITCHYARD_PORT (8700) upwards, streams to both ingresses, and a client that makes groups one after the other.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PORT = int(os.environ.setdefault("SWITCHYARD_PORT", "8700"))
os.environ.setdefault("SWITCHYARD_INGRESS_PORT", str(PORT + 5))
os.environ.setdefault("SWITCHYARD_NODE_PORTS", "24000")
FOLDER = Path(tempfile.mkdtemp(prefix="sy-promotion-"))
os.environ["SWITCHYARD_HOME"] = str(FOLDER / "home")

import httpx

from bench.live_fleet import Fleet, last_pass_age_s, load, wait_for
from tests.kernel.postgres_pair import PostgresPair

DEPLOYMENT = "sim-70b"
PROMOTED_AFTER_S = 2.0
"""What an orchestrator takes to be sure."""
PASS_LIMIT_S, ROLLOUT_LIMIT_S, START_LIMIT_S = 120.0, 600.0, 300.0
POLL_S = 0.05
BAKED = {"min_healthy_s": 5, "canary_bake_s": 15, "bake_s": 0}


@dataclass
class Writer(threading.Thread):
    """Makes groups until it is told to stop; `acknowledged` are those that the API said it made."""

    fleet: Fleet
    prefix: str

    def __post_init__(self) -> None:
        super().__init__()
        self.acknowledged: list[str] = []
        self.refused = 0
        self.stopping = threading.Event()

    def run(self) -> None:
        number = 0
        while not self.stopping.wait(POLL_S):
            number += 1
            try:
                self.fleet.post("groups", name=f"{self.prefix}-{number}", role="viewer")
            except (httpx.TransportError, SystemExit):
                self.refused += 1
            else:
                self.acknowledged.append(f"{self.prefix}-{number}")

    __hash__ = threading.Thread.__hash__


@dataclass(frozen=True)
class Round:
    """Seconds from the promotion to the next pass of the reconciler, and what was lost."""

    paused_s: float
    rollout: str
    acknowledged: int
    lost: int
    requests: int
    failed: int


def one_round(fleet: Fleet, folder: Path, number: int, pair: PostgresPair) -> Round:
    runs = fleet.get(f"deployments/{DEPLOYMENT}")["model_version"]
    target = next(each for each in (f"{DEPLOYMENT}@1", f"{DEPLOYMENT}@2") if each != runs)
    writer = Writer(fleet, f"round-{number}")
    with load(fleet.ingresses(DEPLOYMENT), DEPLOYMENT, 10.0, 24) as answers:
        wanted = {"version": target, "policy": BAKED, "allow_unreleased": True, "why": "bench"}
        began = fleet.post("rollouts", deployment=DEPLOYMENT, **wanted)
        wait_for(lambda: fleet.get(f"rollouts/{began['id']}")["state"] == "baking", ROLLOUT_LIMIT_S, "a canary")
        writer.start()
        time.sleep(1.0)
        pair.kill("a")
        time.sleep(PROMOTED_AFTER_S)
        pair.promote()
        promoted_at = time.monotonic()
        wait_for(lambda: last_pass_age_s() < time.monotonic() - promoted_at, PASS_LIMIT_S, "a pass")
        paused_s = time.monotonic() - promoted_at - last_pass_age_s()
        over = {"succeeded", "rolled_back", "failed"}
        wait_for(lambda: fleet.get(f"rollouts/{began['id']}")["state"] in over, ROLLOUT_LIMIT_S, "the rollout's end")
        writer.stopping.set()
        writer.join()
    known = {row["name"] for row in fleet.rows("groups")}
    return Round(
        paused_s=max(0.0, paused_s),
        rollout=fleet.get(f"rollouts/{began['id']}")["state"],
        acknowledged=len(writer.acknowledged),
        lost=len(set(writer.acknowledged) - known),
        requests=len(answers),
        failed=sum(bool(answer.error) for answer in answers),
    )


def embedded(command: str, url: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "controlplane.embedded", *command.split()],
        cwd=ROOT,
        env={**os.environ, "DATABASE_URL": url, "ENGINE": "sim"},
        stdout=subprocess.DEVNULL,
        timeout=START_LIMIT_S,
        check=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = []
    try:
        for number in range(parser.parse_args().rounds):
            folder = FOLDER / f"{number}"
            folder.mkdir(mode=0o755)
            pair = PostgresPair(folder)
            try:
                embedded("up --detach", pair.url)
                rounds.append(one_round(Fleet(), folder, number, pair))
                print(rounds[-1], flush=True)
            finally:
                embedded("down", pair.url)
                pair.stop()
                shutil.rmtree(FOLDER / "home", ignore_errors=True)
    finally:
        shutil.rmtree(FOLDER, ignore_errors=True)
    print(
        f"a pass after {median(one.paused_s for one in rounds):.1f} s (median), "
        f"{max(one.paused_s for one in rounds):.1f} s (longest)"
    )


if __name__ == "__main__":
    main()
