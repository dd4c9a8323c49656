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
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import httpx

from bench.lab import client
from bench.lab.fleet import DEPLOYMENT, FIRST_CONTROL, SECOND_CONTROL, Fleet, read_ports
from bench.lab.places import read_places
from bench.lab.topology import NoLaboratory
from bench.live_fleet import wait_for
from tests.load import background_load

PROMOTED_AFTER_S = 2.0
"""What somebody takes to be sure, at the least."""
LIMIT_S, ROLLOUT_LIMIT_S = 240.0, 600.0
POLL_S = 0.1
AFTER_S = 5.0
"""Streams and writes that go on once decisions do."""
NAMES = {"control-1": FIRST_CONTROL, "control-2": SECOND_CONTROL}
BAKED = {"strategy": "surge", "min_healthy_s": 5, "canary_bake_s": 15, "bake_s": 0}
OVER = {"succeeded", "rolled_back", "failed"}


@dataclass
class Writer:
    """Makes groups at one control host; `acknowledged` are those that it said it made."""

    url: str
    token: str
    prefix: str
    acknowledged: list[str] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        number = 0
        while not self.stopping.wait(POLL_S):
            number += 1
            name = f"{self.prefix}-{number}"
            try:
                answer = httpx.post(
                    f"{self.url}/api/v1/groups/",
                    json={"name": name, "role": "viewer"},
                    headers={"Authorization": f"Bearer {self.token}"},
                    timeout=30.0,
                )
            except httpx.HTTPError:
                continue
            if answer.is_success:
                self.acknowledged.append(name)


class Bench:
    """Rounds on one laboratory."""

    def __init__(self) -> None:
        self.places, ports = read_places(), read_ports(os.environ)
        topology = client.topology_of(self.places)
        self.fleet = Fleet(self.places, topology, ports, print)
        self.topology = topology
        self.urls = {FIRST_CONTROL: self.fleet.url, SECOND_CONTROL: f"http://127.0.0.1:{ports.web + 1}"}
        self.ingresses = [f"http://127.0.0.1:{each.here}" for each in ports.forwards(topology)[1:]]

    def health(self, host: str) -> dict[str, Any]:
        told: dict[str, Any] = httpx.get(f"{self.urls[host]}/healthz", timeout=10.0).json()
        return told

    def primary(self) -> str:
        """The host whose database takes writes, once commits wait for the other's."""

        def found() -> str:
            for host in self.urls:
                for each in self.health(host).get("hosts", ()):
                    if each["commits"] == "synchronous":
                        return NAMES[each["name"]]
            return ""

        host: str = wait_for(found, LIMIT_S, "a database whose commits wait for the standby")
        return host

    def ask(self, host: str, method: str, path: str, body: Any = None) -> Any:
        headers = {"Authorization": f"Bearer {self.fleet.token.read_text().strip()}"}
        answer = httpx.request(method, f"{self.urls[host]}/api/v1/{path}", json=body, headers=headers, timeout=30.0)
        if answer.is_server_error:
            raise httpx.NetworkError(f"{method} {path}: {answer.status_code}")
        if answer.is_error:
            raise SystemExit(f"{method} {path}: {answer.status_code} {answer.text[:300]}")
        return answer.json()

    def command(self, host: str, text: str) -> str:
        """One of the launcher's, on a control host; what it refused, or ""."""
        try:
            self.fleet.second_control().run(self.topology.host(host), text)
        except NoLaboratory as error:
            return str(error)
        return ""

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

    def round(self, number: int, *, has_rollout: bool) -> dict[str, Any]:
        lost = self.primary()
        kept = next(host for host in self.urls if host != lost)
        token = self.fleet.token.read_text().strip()
        writer = Writer(self.urls[kept], token, f"round-{int(time.time())}-{number}")
        with background_load(self.ingresses, DEPLOYMENT, 5.0, max_tokens=24) as answers:
            rollout = self._begin_rollout(kept) if has_rollout else ""
            writing = threading.Thread(target=writer.run, daemon=True)
            writing.start()
            time.sleep(2.0)
            client.ask(self.places, "power-off", name=lost)
            gone_at = time.monotonic()
            time.sleep(PROMOTED_AFTER_S)
            began = time.monotonic()
            refused = self.command(kept, "promote")
            if refused:
                self.command(kept, "promote --force 'the bench took its power'")
            promoted_at = time.monotonic()
            wait_for(
                lambda: self.health(kept).get("last_pass_s", LIMIT_S) < time.monotonic() - promoted_at,
                LIMIT_S,
                "a pass",
            )
            passed_at = time.monotonic() - self.health(kept)["last_pass_s"]
            if rollout:
                wait_for(lambda: self.ask(kept, "GET", rollout)["state"] in OVER, ROLLOUT_LIMIT_S, "the rollout's end")
            time.sleep(AFTER_S)
            writer.stopping.set()
            writing.join()
        known = self._groups(kept, writer.prefix)
        client.ask(self.places, "boot", name=lost)
        return {
            "lost": lost,
            "promote_s": round(promoted_at - began, 1),
            "pass_s": round(max(0.0, passed_at - promoted_at), 1),
            "pause_s": round(passed_at - gone_at, 1),
            "without_doubt": not refused,
            "rollout": self.ask(kept, "GET", rollout)["state"] if rollout else "none",
            "acknowledged": len(writer.acknowledged),
            "missing": len(set(writer.acknowledged) - known),
            "requests": len(answers),
            "failed": sum(bool(answer.error) for answer in answers),
            "rejoin_s": self._rejoin(lost),
        }

    def _groups(self, host: str, prefix: str) -> set[str]:
        """All groups whose name begins so: the list has pages."""
        names, page = set(), "groups/?page_size=500"
        while page:
            answer = self.ask(host, "GET", page)
            names |= {row["name"] for row in answer["results"] if row["name"].startswith(prefix)}
            page = (answer.get("next") or "").partition("/api/v1/")[2]
        return names

    def _rejoin(self, host: str) -> float:
        began = time.monotonic()
        wait_for(lambda: not self.command(host, "rejoin"), LIMIT_S, f"{host} rejoins")
        self.primary()
        return round(time.monotonic() - began, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rollout", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    bench, rounds = Bench(), []
    for number in range(options.rounds):
        rounds.append(bench.round(number, has_rollout=options.rollout))
        print(rounds[-1], flush=True)
    for name in ("promote_s", "pass_s", "pause_s", "rejoin_s"):
        found = [each[name] for each in rounds]
        print(f"{name}: median {median(found):.1f}, longest {max(found):.1f}")


if __name__ == "__main__":
    main()
