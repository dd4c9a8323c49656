"""A fleet that a laboratory's cloud launched, as `lab cloud up` leaves it: its commands, its API, its answers."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest
from openai import OpenAI

from lab.hosts import client
from lab.hosts.places import CHECKOUT, read_places
from tests.asking import CLIENT
from tests.scenarios.running_fleet import free_ports

LIMIT_S = 600.0
REGION, TYPE = "us-east-1", "trn1.32xlarge"


class Cloud:
    """An operator's fleet after `make up CLOUD=aws`."""

    def __init__(self, home: Path) -> None:
        self._web = free_ports(4)  # the cloud's port is two above the first
        self._entry = self._web + 3
        ports = {"SWITCHYARD_PORT": str(self._web), "SWITCHYARD_INGRESS_PORT": str(self._entry)}
        self.environment = {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin", "SWITCHYARD_HOME": str(home), **ports}
        self._home = home
        self._told: dict[str, bool] = {}
        """Whether an instance is spot, from the cloud's API."""

    def lab(self, *arguments: str) -> str:
        """Output of the command `lab`, which must succeed."""
        done = subprocess.run(
            [sys.executable, "-m", "lab.hosts.cli", *arguments],
            cwd=CHECKOUT, env=self.environment, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-2000:]}"
        return done.stdout

    def declare_spot_first(self) -> None:
        """Makes further launches spot, because IMDS announces interruptions only there."""
        [pool] = self.rows(f"capacity-pools/?region={REGION}&instance_type={TYPE}")
        body = {"region": REGION, "instance_type": TYPE, "zone": pool["zone"], "position": 0, "max_price": 9.5}
        assert self.api("POST", "capacity-pools/", json=body).is_success

    def rows(self, path: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.api("GET", path).json()["results"]
        return found

    def api(self, method: str, path: str, **rest: Any) -> httpx.Response:
        token = (self._home / "operator-token").read_text().strip()
        url = f"http://127.0.0.1:{self._web}/api/v1/{path}"
        return CLIENT.request(method, url, headers={"Authorization": f"Bearer {token}"}, **rest)

    def spot_spares(self) -> dict[str, str]:
        """Node -> instance, for ready spot spares. Queries the cloud only for unknown instances."""
        spares = {
            row["id"]
            for row in self.rows(f"nodes/?region={REGION}")
            if row["role"] == "spare" and row["state"] == "ready" and row["connected"] and not row["cordoned"]
        }
        instances = {row["node"]: row["provider_id"] for row in self.rows("machines/") if row["node"] in spares}
        if not self._told.keys() >= set(instances.values()):
            lines = self.lab("cloud", "instances").splitlines()
            self._told |= {line.split()[0]: " spot " in line for line in lines if " running " in line}
        return {node: instance for node, instance in instances.items() if self._told.get(instance)}

    def nodes(self) -> dict[str, str]:
        """Node -> instance, for nodes in the ready cell; empty if it is not ready."""
        cells = [cell for cell in self.rows("cells/") if cell["state"] == "ready"]
        members = {node["id"] for node in self.rows("nodes/") if cells and node["cell"] == cells[0]["id"]}
        return {row["node"]: row["provider_id"] for row in self.rows("machines/") if row["node"] in members}

    def cells(self) -> list[dict[str, Any]]:
        """Those that are not stopped."""
        return [cell for cell in self.rows("cells/") if cell["state"] != "stopped"]

    def calls_of(self, service: str) -> Any:
        """A client of the cloud with the control plane's keys, on the real host."""
        keys = json.loads(read_places(self.environment).record.read_text())["cloud"]
        return boto3.client(
            service, region_name=REGION, endpoint_url=f"http://127.0.0.1:{self._web + 2}",
            aws_access_key_id=keys["access_key"], aws_secret_access_key=keys["secret"],
        )  # fmt: skip

    def ask_cloud(self, what: str, **given: Any) -> Any:
        """As `lab.hosts.cloud_control_api` has it."""
        answer = CLIENT.post(f"http://127.0.0.1:{self._web + 2}/cloud/{what}", json=given)
        assert answer.is_success, answer.text
        return answer.json()["done"]

    def end_first_day(self) -> None:
        """Lets garbage of clouds be deleted, which is only logged on an install's first day."""
        text = "from fleet.clouds.models import Install; import datetime as d; "
        text += "Install.objects.update(dry_run_until=d.datetime.now(d.UTC))"
        manage = f"exec env -i \"$@\" '{sys.executable}' manage.py shell -c '{text}'"
        line = f"cd '{CHECKOUT}' && xargs -0 -a /proc/$(pgrep -of '[c]ontrolplane.web')/environ sh -c \"$0\" sh"
        self.lab("exec", "c1", "--", "sh", "-c", line, manage)

    def streamed(self) -> list[str]:
        """Chunks of an answer through the region's load balancer; empty if it failed."""
        asked: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
        with OpenAI(base_url=f"http://127.0.0.1:{self._entry}/v1", api_key="none", timeout=60, max_retries=0) as openai:
            stream = openai.chat.completions.create(model="sim-70b", messages=asked, max_tokens=16, stream=True)
            return [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Cloud]:
    """Its processes end with the test."""
    made = Cloud(tmp_path)
    try:
        yield made
    finally:
        client.stop(read_places(made.environment))


def eventually(find: Callable[[], Any], what: str) -> Any:
    """Polls until the result is true; a refused connection counts as false."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        try:
            if found := find():
                return found
        except Exception as error:
            last = error
        time.sleep(0.5)  # poll interval
    raise AssertionError(f"{what}: {locals().get('last')!r}")
