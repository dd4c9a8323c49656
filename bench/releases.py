"""`python -m bench.releases`: agents of a running fleet go to another release and back, under streams to each region.

It wants a fleet of `make up` in `SWITCHYARD_HOME`, and prints how long each way took, which requests failed, and whose
engine, proxy or HAProxy is another process than before. The other release is this checkout's with another version.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from tests.load import background_load

CHECKOUT = Path(__file__).resolve().parents[1]
STATED = "engine_agent/telemetry/fingerprint.py"
POLL_S = 0.5
LIMIT_S = 600.0
PASSED_S = 5.0
"""Of load before and after each way."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.releases", description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=10.0, help="streams a second to each region")
    parser.add_argument("--soak", type=float, default=3.0, help="seconds that each ring is watched")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--model", default="sim-70b")
    options = parser.parse_args()
    fleet = Fleet(Path(os.environ.get("SWITCHYARD_HOME", CHECKOUT / ".switchyard")))
    other = fleet.other_release()
    home = next(row["id"] for row in fleet.get("agents/releases") if row["is_current"])
    failed = 0
    for _ in range(options.rounds):
        for release in (other, home):
            failed += fleet.go(release, options)
    return 1 if failed else 0


class Fleet:
    """A fleet of this computer, by its API."""

    def __init__(self, home: Path) -> None:
        self.home = home
        state = json.loads((home / "up.json").read_text())
        self._database = state["database_url"]
        token = (home / "operator-token").read_text().strip()
        self._client = httpx.Client(
            base_url=f"http://127.0.0.1:{state['port']}/api/v1/",
            headers={"Authorization": f"Bearer {token}"},
            timeout=30,
        )

    def get(self, path: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self._client.get(f"{path}/").raise_for_status().json()["results"]
        return rows

    def other_release(self) -> str:
        """Make this checkout's agent known with another version; returns the release's id."""
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(CHECKOUT / "engine_agent", Path(folder) / "engine_agent")
            stated = Path(folder) / STATED
            stated.write_text(stated.read_text().replace('AGENT_VERSION = "0.1.0"', 'AGENT_VERSION = "0.2.0"'))
            environment = {
                **os.environ,
                "SWITCHYARD_HOME": str(self.home),
                "DATABASE_URL": self._database,
                "SECRET_KEY": "of-a-bench-that-signs-nothing-0123456789-abcdefghij",
            }
            command = [sys.executable, "manage.py", "agent_release", folder]
            done = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def pids(self) -> dict[str, int]:
        """Of engines and HAProxies, by node or ingress."""
        nodes = {node["id"]: node["engine"]["pid"] for node in self.get("nodes") if node["cell"]}
        return {**nodes, **{row["id"]: row["haproxy_pid"] for row in self.get("ingresses")}}

    def go(self, release: str, options: argparse.Namespace) -> int:
        """Have all go to a release under load; prints a line, returns how many requests failed."""
        urls = [f"http://{row['address']}:{row['port']}" for row in self.get("ingresses")]
        before = self.pids()
        with background_load(urls, options.model, options.rate) as answers:
            time.sleep(PASSED_S)
            began = time.monotonic()
            rollout = self._client.post("agents/rollouts/", json={"release": release, "soak_s": options.soak})
            ended = self._await(rollout.raise_for_status().json()["id"])
            took_s = time.monotonic() - began
            time.sleep(PASSED_S)
        failed = [answer.error for answer in answers if answer.error]
        after = self.pids()
        changed = sorted(name for name, pid in before.items() if after.get(name) != pid)
        print(
            f"to {release}: {ended['state']} in {took_s:.1f} s, {len(ended['moves'])} agents in {ended['rings']} rings;"
            f" {len(answers)} requests, {len(failed)} failed; {len(before)} engines and HAProxies, {len(changed)} other"
            f" processes {changed or ''} {failed[:3] or ''} {'' if ended['state'] == 'succeeded' else ended['reason']}"
        )
        return len(failed) + len(changed)

    def _await(self, rollout: int) -> dict[str, Any]:
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            found: dict[str, Any] = self._client.get(f"agents/rollouts/{rollout}/").raise_for_status().json()
            if found["ended_at"] is not None:
                return found
            time.sleep(POLL_S)
        raise SystemExit(f"the upgrade has not ended within {LIMIT_S:.0f} s: {found['reason']}")


if __name__ == "__main__":
    sys.exit(main())
