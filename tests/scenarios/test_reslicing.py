"""A host of eight shares of this computer's CPUs serves as eight nodes, then four, then one, as deployments need other
node sizes. Meanwhile another deployment, on it and on a second host, answers every request. The same of the parts of
this computer that provider `local` has in two regions.
"""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.asking import CLIENT
from tests.engine_agent.ingress.traffic import SteadyTraffic
from tests.scenarios.running_fleet import LIMIT_S, REGIONS, WORKER, RunningFleet, eventually
from tests.scenarios.test_continuation import continued, undisturbed_streams
from tests.scenarios.test_join import REGION, Host

pytestmark = [pytest.mark.long, pytest.mark.scenario, pytest.mark.own_fleet, pytest.mark.timeout(1500)]

SHARES = (1, 2, 8)
PORTS = {"ingress": 28500 + 20 * WORKER, "second": 26000 + 200 * WORKER, "divided": 26040 + 200 * WORKER}
"""First port of each host. All are on this computer, each with its own folder and agents."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    running = RunningFleet(tmp_path_factory.mktemp("fleet") / "home")
    running.environment["SWITCHYARD_DEMO_PROVIDER"] = "machines"  # it needs no nodes, which would cost a processor
    try:
        running.begin()
        running.post("regions", {"name": REGION, "provider": "machines"})
        for shares in SHARES:
            add_deployment(running, shares)
        yield running
    finally:
        running.down()


def add_deployment(fleet: RunningFleet, shares: int, region: str = REGION, machines: int = 1) -> None:
    """`of-2` runs on nodes with two of eight shares of a machine's memory, and so on. `machines`: this computer is
    divided among so many."""
    gib = psutil.virtual_memory().total / 2**30 / machines
    kind, version = f"share.{shares}", f"of-{shares}"
    fleet.post("instance-types", {"name": kind, "accelerator": "cpu", "memory_gib": round(gib * shares / 8, 2)})
    body = {"model": "sim-70b", "version": version, "based_on": "sim-70b@1", "parallelism": {kind: {"nodes": 1}}}
    fleet.post("model-versions", {**body, "max_concurrency": 16})
    fleet.post(f"model-versions/sim-70b@{version}/validate")
    eventually(lambda: fleet.api(f"model-versions/sim-70b@{version}")["state"] == "validated")
    fleet.post(
        "deployments",
        {
            "name": version, "model_version": f"sim-70b@{version}", "instance_types": [kind], "allow_unreleased": True,
            "regions": [{"region": region, "cells": 0}],
        },
    )  # fmt: skip


@contextlib.contextmanager
def joined(fleet: RunningFleet, folder: Path, name: str, **options: Any) -> Iterator[str]:
    """A host that joined by an invitation with these options. Yields the ID of its machine."""
    host = Host((), "127.0.0.1", folder / name / "switchyard")
    before = set(machines(fleet))
    line = fleet.post("machines/invitations", {"region": REGION, "count": 1, **options})["line"]
    try:
        host.prefix.parent.mkdir()
        done = host.run(f"{line} --port {PORTS[name]}")
        assert done.returncode == 0, done
        (machine,) = eventually(lambda: set(machines(fleet)) - before)
        yield machine
    finally:
        python = host.prefix / "current/venv/bin/python"
        host.run(f"{python} -m engine_agent leave --now --code {host.prefix}")
        assert host.processes() == []


def machines(fleet: RunningFleet) -> dict[str, Any]:
    return {machine["id"]: machine for machine in fleet.api("machines", region=REGION)["results"]}


def spares(fleet: RunningFleet) -> int:
    nodes = fleet.api("nodes", region=REGION, state="ready")["results"]
    return sum(node["connected"] and not node["cell"] for node in nodes)


def hosts_of(fleet: RunningFleet, deployment: str) -> list[str]:
    """The machine of each ready cell's leader."""
    machine_of = {node["id"]: node["machine"] for node in fleet.api("nodes", region=REGION)["results"]}
    cells = fleet.cells(deployment=deployment, state="ready").values()
    return sorted(machine_of[cell["nodes"][0]["id"]] for cell in cells)


@contextlib.contextmanager
def load(url: str, model: str) -> Iterator[SteadyTraffic]:
    """Five short requests a second from another thread until the block ends, and every answer."""
    traffic, stop = SteadyTraffic(url, per_s=5, body=request_of(model)), threading.Event()

    async def flow() -> None:
        async with traffic.flowing():
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=asyncio.run, args=(flow(),))
    thread.start()
    try:
        yield traffic
    finally:
        stop.set()
        thread.join()


def request_of(model: str) -> bytes:
    return json.dumps({"model": model, "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}).encode()


def answers(url: str, model: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return CLIENT.post(f"{url}/v1/chat/completions", content=request_of(model)).status_code == 200
    return False


def test_the_part_of_this_computer_in_a_region_follows_demand_and_no_request_fails(tmp_path: Path) -> None:
    """Provider `local`: the other region's part serves meanwhile."""
    fleet = RunningFleet(tmp_path / "home")
    fleet.environment["SWITCHYARD_LOCAL_LAYOUT"] = "4x1"
    try:
        fleet.begin()
        serving, divided = REGIONS
        for name in ("smollm2", "sim-70b"):
            fleet.patch(f"deployments/{name}", {"regions": [{"region": region, "cells": 0} for region in REGIONS]})
        for region in REGIONS:
            fleet.patch(f"regions/{region}", {"spares": {}})
        for shares in (2, 4):
            add_deployment(fleet, shares, divided, machines=len(REGIONS))
        fleet.scale("sim-70b", serving, 1)
        eventually(lambda: answers(fleet.ingress(serving), "sim-70b"))
        (there,) = parts(fleet, serving)
        assert there["layout"] == "4x1"
        with load(fleet.ingress(serving), "sim-70b") as traffic:
            fleet.scale("sim-70b", divided, 1)
            for deployment, before, layout in (("of-4", "sim-70b", "2x2"), ("of-2", "of-4", "4x1")):
                fleet.scale(before, divided, 0)
                fleet.scale(deployment, divided, 1)
                (part,) = parts(fleet, divided)
                assert part["layout"] == layout
                kind = deployment.replace("of-", "share.")
                assert {node["instance_type"] for node in nodes_in(fleet, divided)} == {kind}
            assert parts(fleet, serving)[0]["layout"] == "4x1"
        assert traffic.failures == []
        assert traffic.served.total() == traffic.sent > 0
    finally:
        fleet.down()
    assert fleet.processes() == []


def nodes_in(fleet: RunningFleet, region: str) -> list[Any]:
    found: list[Any] = fleet.api("nodes", region=region, state="ready")["results"]
    return found


def parts(fleet: RunningFleet, region: str) -> list[Any]:
    """The machines of a region whose nodes are parts of them."""
    found: list[Any] = fleet.api("machines", region=region)["results"]
    return [machine for machine in found if machine["layout"] and machine["state"] != "gone"]


def test_a_host_is_divided_for_each_demand_and_no_request_fails(fleet: RunningFleet, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{PORTS['ingress']}"
    with (
        joined(fleet, tmp_path, "ingress", role="ingress"),
        joined(fleet, tmp_path, "second", layout="2x1", instance_type="share.1") as second,
    ):
        eventually(lambda: spares(fleet) == 2, LIMIT_S)
        fleet.post(f"machines/{second}/layout", {"layout": "2x1", "pinned": True})
        fleet.scale("of-1", REGION, 1)
        fleet.patch("traffic/policies/of-1", {"continuation": True})
        eventually(lambda: answers(url, "of-1"))
        with (
            joined(fleet, tmp_path, "divided", layout="8x1", instance_type="share.1") as divided,
            load(url, "of-1") as traffic,
            undisturbed_streams(url, "of-1", rate=1.0) as streams,
        ):
            eventually(lambda: spares(fleet) == 9, LIMIT_S)
            fleet.scale("of-1", REGION, 2)
            assert hosts_of(fleet, "of-1") == sorted([divided, second]), "on different hosts while one is free"
            fleet.scale("of-1", REGION, 1)
            assert hosts_of(fleet, "of-1") == [second]
            for deployment, cells, layout in (("of-2", 4, "4x2"), ("of-8", 1, "1x8")):
                began = time.monotonic()
                fleet.scale(deployment, REGION, cells)
                print(f"{cells} cells of {deployment} after {time.monotonic() - began:.1f} s")  # noqa: T201
                assert machines(fleet)[divided]["layout"] == layout
                assert hosts_of(fleet, deployment) == [divided] * cells
                eventually(lambda name=deployment: answers(url, name))  # type: ignore[misc]
                fleet.scale(deployment, REGION, 0)
            assert machines(fleet)[second]["layout"] == "2x1"
        print(f"{traffic.sent} requests, {traffic.served.total()} served by {len(traffic.served)} cells")  # noqa: T201
        print(f"{len(streams)} streams")  # noqa: T201
        assert continued(tmp_path)["leaving"] > 0, "the host that is divided had streams before"
        assert traffic.failures == []
        assert traffic.served.total() == traffic.sent
