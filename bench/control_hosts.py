"""Takes the power of the control host whose database takes writes, in the middle of a rollout, promotes the other one
by the command that operators run, and says how long decisions paused and what became of the rollout, of acknowledged
writes and of requests. Then the host gets its power back and rejoins, and the next round takes the other one's.

    .venv/bin/lab up --detach
    .venv/bin/python -m bench.control_hosts --rounds 5

It needs a laboratory that runs, with the same SWITCHYARD_HOME and ports. Its rollouts need room for a second cell in
each region, which `--nodes 4` has; `--no-rollout` goes without one.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import httpx

from bench.live_fleet import wait_for
from lab.hosts import client
from lab.hosts.databases import PROMOTED_AFTER_S, WRITES_BEFORE_S, Databases
from lab.hosts.fleet import DEPLOYMENT, Fleet, read_ports
from lab.hosts.places import read_places
from tests.load import background_load

ROLLOUT_LIMIT_S = 600.0
AFTER_S = 5.0
"""Streams and writes that go on once decisions do."""
BAKED = {"strategy": "surge", "surge": 1, "min_healthy_s": 5, "canary_bake_s": 15, "bake_s": 0}
OVER = {"succeeded", "rolled_back", "failed"}


class Bench:
    """Rounds on one laboratory."""

    def __init__(self) -> None:
        self.places, ports = read_places(), read_ports(os.environ)
        topology = client.topology_of(self.places)
        self.fleet = Fleet(self.places, topology, ports, print)
        self.databases = Databases(self.places, topology, self.fleet)
        self.ingresses = [f"http://127.0.0.1:{each.here}" for each in ports.forwards(topology)[1:]]

    def ask(self, host: str, method: str, path: str, body: Any = None) -> Any:
        headers = {"Authorization": f"Bearer {self.fleet.token.read_text().strip()}"}
        answer = httpx.request(
            method, f"{self.fleet.control_urls[host]}/api/v1/{path}", json=body, headers=headers, timeout=30.0
        )
        if answer.is_server_error:
            raise httpx.NetworkError(f"{method} {path}: {answer.status_code}")
        if answer.is_error:
            raise SystemExit(f"{method} {path}: {answer.status_code} {answer.text[:300]}")
        return answer.json()

    def _begin_rollout(self, host: str) -> str:
        """Its path, once its canary bakes."""
        runs = self.ask(host, "GET", f"deployments/{DEPLOYMENT}/")["model_version"]
        target = next(each for each in (f"{DEPLOYMENT}@1", f"{DEPLOYMENT}@2") if each != runs)
        wanted = {
            "deployment": DEPLOYMENT,
            "version": target,
            "policy": BAKED,
            "allow_unreleased": True,
            "why": "bench",
        }
        path = f"rollouts/{self.ask(host, 'POST', 'rollouts/', wanted)['id']}/"
        wait_for(lambda: self.ask(host, "GET", path)["state"] == "baking", ROLLOUT_LIMIT_S, "a canary")
        return path

    def round(self, *, has_rollout: bool) -> dict[str, Any]:
        lost = self.databases.primary()
        kept = self.databases.other(lost)
        writer = self.databases.writer(kept)
        with background_load(self.ingresses, DEPLOYMENT, 5.0, max_tokens=24) as answers:
            rollout = self._begin_rollout(kept) if has_rollout else ""
            writer.start()
            time.sleep(WRITES_BEFORE_S)
            client.ask(self.places, "power-off", name=lost)
            gone_at = time.monotonic()
            time.sleep(PROMOTED_AFTER_S)
            done = self.databases.promote(kept)
            before = self.ask(kept, "GET", rollout)["state"] if rollout else "none"
            if rollout:
                wait_for(lambda: self.ask(kept, "GET", rollout)["state"] in OVER, ROLLOUT_LIMIT_S, "the rollout's end")
            time.sleep(AFTER_S)
            writer.stop()
        missing = self.databases.missing(writer)
        client.ask(self.places, "boot", name=lost)
        return {
            "lost": lost,
            "promote_s": round(done.took_s, 1),
            "pass_s": round(done.pass_s, 1),
            "pause_s": round(done.ended_at + done.pass_s - gone_at, 1),
            "by_force": bool(done.doubt),
            "rollout": self.ask(kept, "GET", rollout)["state"] if rollout else "none",
            "after_promotion": before,
            "acknowledged": len(writer.acknowledged),
            "acknowledged_after": sum(at > gone_at for at in writer.acknowledged.values()),
            "missing": len(missing),
            "requests": len(answers),
            "failed": sum(bool(answer.error) for answer in answers),
            "errors": sorted({answer.error[:80] for answer in answers if answer.error})[:3],
            "rejoin_s": round(self.databases.rejoin(lost), 1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rollout", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    bench, rounds = Bench(), []
    for _ in range(options.rounds):
        rounds.append(bench.round(has_rollout=options.rollout))
        print(rounds[-1], flush=True)
    for name in ("promote_s", "pass_s", "pause_s", "rejoin_s"):
        found = [each[name] for each in rounds]
        print(f"{name}: median {median(found):.1f}, longest {max(found):.1f}")


if __name__ == "__main__":
    main()
