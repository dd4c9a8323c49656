"""A fleet in a cloud, from declared stacks, region and deployment. Instances boot as hosts that prove their identity
and join. One is terminated externally, and the cell serves again. Another gets an interruption notice from its own
metadata while the queue of notices cannot be read.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from lab.hosts import client
from lab.hosts.places import CHECKOUT, read_places
from tests.asking import CLIENT
from tests.scenarios.running_fleet import free_ports

pytestmark = [pytest.mark.long, pytest.mark.scenario, pytest.mark.own_fleet, pytest.mark.timeout(900)]

LIMIT_S = 600.0
REGION, TYPE = "us-east-1", "trn1.32xlarge"
INSTANCE = re.compile(r"i-[0-9a-f]{17}")


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
        assert self._api("POST", "capacity-pools/", json=body).is_success

    def rows(self, path: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._api("GET", path).json()["results"]
        return found

    def _api(self, method: str, path: str, **rest: Any) -> httpx.Response:
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


def test_a_cloud_launches_a_fleet_and_heals_what_it_takes(cloud: Cloud) -> None:
    said = cloud.lab("cloud", "up", "--detach", "--region", REGION, "--round-trip", "10ms")
    assert "every cell is ready, on 2 instances each" in said
    assert "".join(eventually(cloud.streamed, "an answer is streamed"))

    assert not cloud.rows("incidents/?kind=hardware-differs"), "an instance lacks devices of its type"
    before = cloud.nodes()
    assert len(before) == 2
    assert all(INSTANCE.fullmatch(instance) for instance in before.values())
    cloud.declare_spot_first()
    cloud.lab("cloud", "terminate", taken := sorted(before.values())[0])

    def healed() -> dict[str, str]:
        found = cloud.nodes()
        return found if len(found) == 2 and taken not in found.values() else {}

    after = eventually(healed, "the cell is ready on other instances")
    assert set(after.values()) & set(before.values())
    assert "".join(eventually(cloud.streamed, "an answer is streamed again"))
    [end] = [line for line in cloud.lab("cloud", "instances").splitlines() if taken in line]
    assert "running" not in end
    heed_what_the_metadata_alone_says(cloud)
    assert json.loads(cloud.lab("status", "--json"))["hosts"]
    assert cloud.lab("down") == "The laboratory has ended.\n"


def heed_what_the_metadata_alone_says(cloud: Cloud) -> None:
    [(node, instance)] = eventually(cloud.spot_spares, "what took a spare's place is spot").items()
    cloud.lab("cloud", "refuse", "ReceiveMessage", "AccessDenied", "--times", "100000")
    unread = "incidents/?state=open&kind=notices-unread"
    eventually(lambda: cloud.rows(unread), "nobody waits at the queue any more, where the warning would still come")
    cloud.lab("cloud", "spot-warning", instance)

    def said() -> list[str]:
        events = cloud.rows("events/?page_size=500")
        return [row["message"] for row in events if row["kind"] == "node.notice" and node in row["message"]]

    [message] = eventually(said, "its notice is known")
    assert message.startswith(f"{node}: interruption until ")
    assert message.endswith(": reported by the machine's own metadata")

    def replaced() -> bool:
        return bool(spares := cloud.spot_spares()) and node not in spares

    eventually(replaced, "another one took its place before it ended")
    cloud.lab("cloud", "heal")
