"""A whole fleet as `make up` starts it, in a temporary home, with queries for tests."""

import json
import os
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil
import psycopg

from lab.steady_load import agent_and_engine
from tests.asking import CLIENT
from tests.ports import claimed, release

CHECKOUT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 600
STOP_LIMIT_S = 240
LIMIT_S = 240.0
"""Generous limit for busy machines; the benches measure durations."""
POLL_S = 0.05
POLL_MOST_S = 0.3
"""Poll interval, first and last. Each poll costs the web process CPU that engines need to start, so it slows down."""
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
NODE_PORTS = range(22000, 12999, -1000)
"""The first of each thousand ports for nodes, so many fleets may run at the same time."""
PORTS_EACH = 140
PORTS_FROM = 23000 + PORTS_EACH * WORKER
"""Those of seven workers are below a thousand: an ingress uses ports 2000 to 5000 above its first."""
REGIONS = ("us-east-1", "us-west-2")


class AskedFleet:
    """A running fleet, as seen by a client with the addresses of its API and ingresses. `url`: that of web."""

    url: str

    def ingress(self, region: str = REGIONS[0]) -> str:
        """Address of one of a region's ingresses."""
        raise NotImplementedError

    def token(self) -> str:
        raise NotImplementedError

    def take_down(self, node: str) -> None:
        """Kill all processes of a node without notice; `wait_until_whole` waits until it is back."""
        raise NotImplementedError

    def api(self, path: str, **query: str) -> Any:
        """GET from the REST API with the operator's token."""
        return self._ask("GET", path, params=query)

    def patch(self, path: str, body: Any) -> Any:
        return self._ask("PATCH", path, json=body)

    def post(self, path: str, body: Any = None) -> Any:
        return self._ask("POST", path, json=body or {})

    def delete(self, path: str) -> Any:
        return self._ask("DELETE", path, headers={"If-Match": "*"})

    def cells(self, **query: str) -> dict[str, Any]:
        return {cell["id"]: cell for cell in self.api("cells", **query)["results"]}

    def scale(self, deployment: str, region: str, cells: int) -> None:
        """Wait until exactly this many cells are ready there."""
        self.patch(f"deployments/{deployment}", {"regions": [{"region": region, "cells": cells}]})

        def states() -> list[str]:
            return [cell["state"] for cell in self.cells(deployment=deployment, region=region).values()]

        eventually(lambda: states() == ["ready"] * cells, START_LIMIT_S)

    def versions(self, deployment: str = "sim-70b") -> tuple[str, str]:
        """The version that a deployment runs, and the other one of 1 and 2, to which it can move."""
        runs = self.api(f"deployments/{deployment}")["model_version"]
        return runs, next(each for each in (f"{deployment}@1", f"{deployment}@2") if each != runs)

    def routed_cells(self, region: str) -> set[str]:
        """Cells in the routing table in force in a region."""
        newest = max(self.api("routing-tables", region=region)["results"], key=lambda table: table["revision"])
        body = self.api(f"routing-tables/{newest['id']}")["body"]
        return {cell["cell"] for pool in body["pools"] for cell in pool["cells"] if not cell["drain"]}

    def engine_pids(self) -> dict[str, int]:
        """Node -> pid of its engine, for nodes in cells."""
        nodes = self.api("nodes")["results"]
        return {node["id"]: node["engine"]["pid"] for node in nodes if node["cell"]}

    def is_whole(self) -> bool:
        """Whether every wanted cell is ready and routed, and one node per region is spare."""
        cells = self.cells()
        if any(cell["state"] != "ready" for cell in cells.values()):
            return False  # further queries would cost the CPU on which engines start
        spares = [node for node in self.api("nodes", state="ready")["results"] if not node["cell"]]
        routed = set().union(*(self.routed_cells(region) for region in REGIONS))
        return set(cells) == routed and {node["region"] for node in spares} == set(REGIONS)

    def wait_until_whole(self) -> None:
        """Its limit is the longest start of vLLM."""
        eventually(self.is_whole, START_LIMIT_S)

    def _ask(self, method: str, path: str, headers: Mapping[str, str] | None = None, **arguments: Any) -> Any:
        answer = CLIENT.request(
            method,
            f"{self.url}/api/v1/{path.strip('/')}/",
            headers={"Authorization": f"Bearer {self.token()}", **(headers or {})},
            **arguments,
        )
        if answer.is_server_error:
            raise httpx.NetworkError(f"{method} {path}: {answer.status_code} {answer.text[:300]}")
        assert answer.is_success, answer.text
        return answer.json()


class RunningFleet(AskedFleet):
    """Starts and stops through the same commands as the Makefile's targets. It imports from a hub on `hub_port`, if a
    test serves one."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.port = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        self.agent_port = free_ports(1)
        self.ingress_port = free_ports(len(REGIONS))
        self.node_ports = node_ports()
        weakref.finalize(self, release, self.node_ports)  # a worker runs more fleets than there are such ranges
        self.hub_port = free_ports(1)
        imports, shipped = home / "models", Path(os.environ.get("SWITCHYARD_CACHE", CHECKOUT / ".cache")) / "artifacts"
        inherited = {
            name: value
            for name, value in os.environ.items()
            # The test session has separate servers and settings.
            if name not in {"DATABASE_URL", "REDIS_URL", "DJANGO_SETTINGS_MODULE"}
        }
        self.environment = {
            **inherited,
            "SWITCHYARD_HOME": str(home),
            "SWITCHYARD_PORT": str(self.port),
            "SWITCHYARD_AGENT_PORT": str(self.agent_port),
            "SWITCHYARD_INGRESS_PORT": str(self.ingress_port),
            "SWITCHYARD_NODE_PORTS": str(self.node_ports),
            "SWITCHYARD_HF_ENDPOINT": f"http://127.0.0.1:{self.hub_port}",
            "SWITCHYARD_IMPORT_STORE": imports.as_uri(),
            "SWITCHYARD_ARTIFACT_SOURCES": f"{shipped.resolve().as_uri()},{imports.as_uri()}",
            "WAIT_S": str(START_LIMIT_S - 20),
        }

    # --- the Makefile's verbs -----------------------------------------------------------------------------------------

    def up(self, engine: str) -> str:
        self.environment["ENGINE"] = engine
        return self._run(["up", "--detach"], START_LIMIT_S)

    def down(self) -> str:
        return self._run(["down"], STOP_LIMIT_S)

    def back_up(self, file: Path) -> None:
        self._run(["backup", str(file)], STOP_LIMIT_S)

    def restore(self, file: Path) -> None:
        self._run(["restore", str(file)], STOP_LIMIT_S)

    def begin(self) -> None:
        """As `up`, without waiting for cells: returns when the control plane answers."""
        self.environment |= {"ENGINE": "sim", "WAIT_S": "1"}
        self._run(["up", "--detach"], START_LIMIT_S, status=1)
        eventually(self.answers)

    def answers(self) -> bool:
        try:
            return bool(self.api("regions")["results"])
        except (OSError, httpx.HTTPError):
            return False

    def _run(self, arguments: list[str], limit_s: float, *, status: int = 0) -> str:
        command = [sys.executable, "-m", "controlplane.embedded", *arguments]
        done = subprocess.run(
            command, cwd=CHECKOUT, env=self.environment, capture_output=True, text=True, timeout=limit_s, check=False
        )
        said = f"{' '.join(arguments)}: {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr}"
        assert done.returncode == status, f"{said}\n{self.ends_of_logs()}"
        return done.stdout

    # --- its state
    # -----------------------------------------------------------------------------------------------------

    def ingress(self, region: str = REGIONS[0]) -> str:
        return f"http://127.0.0.1:{self.ingress_port + REGIONS.index(region)}"

    def token(self) -> str:
        return (self.home / "operator-token").read_text().strip()

    def take_down(self, node: str) -> None:
        processes = agent_and_engine(node, home=self.home)
        assert len(processes) == 2
        for process in processes:
            process.kill()

    def run_in_shell(self, script: str) -> None:
        """Runs a script with Django, on the database of the fleet: for what only clouds or devices report."""
        state = json.loads((self.home / "up.json").read_text())
        environment = {
            **os.environ,
            "SWITCHYARD_HOME": str(self.home),
            "DATABASE_URL": state["database_url"],
            "VALKEY_URL": state.get("valkey_url", ""),
            "SECRET_KEY": "of-a-test-that-signs-nothing-0123456789-abcdefghijkl",
        }
        command = [sys.executable, "manage.py", "shell", "-c", script]
        done = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def wait_for_passes(self, count: int) -> None:
        """Until the reconciler has started this many more passes; each renews its lease."""
        address = json.loads((self.home / "up.json").read_text())["database_url"]
        with psycopg.connect(address, autocommit=True) as database:

            def renewed() -> Any:
                return database.execute("SELECT renewed_at FROM kernel_lease WHERE name = 'reconciler'").fetchone()

            def seen() -> bool:
                times.add(renewed())
                return len(times) > count

            times = {renewed()}
            eventually(seen)

    def ends_of_logs(self) -> str:
        """The last log lines of each service and node."""
        logs = [*sorted(self.home.glob("logs/*.log")), *sorted(self.home.glob("nodes/*/*.log"))]
        return "\n".join(f"--- {log}\n{log.read_text(errors='replace')[-1500:]}" for log in logs if log.is_file())

    def processes(self) -> list[psutil.Process]:
        """Every live process that belongs to this home."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("SWITCHYARD_HOME") == str(self.home):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def service(self, name: str) -> psutil.Process:
        """A child of the launcher: web, worker, jobs, valkey or postgres."""
        state = json.loads((self.home / "up.json").read_text())
        return psutil.Process(state["sessions"][name])


def eventually(condition: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
    """Poll until the condition holds, and return its result. An API that does not answer counts as "not yet"."""
    deadline, pause_s = time.monotonic() + limit_s, POLL_S
    said: Any = None
    while time.monotonic() < deadline:
        try:
            if said := condition():
                return said
        except (httpx.TransportError, psutil.NoSuchProcess, OSError, KeyError) as error:
            said = error
        time.sleep(pause_s)  # the condition depends on other processes, which send no events to tests
        pause_s = min(pause_s * 1.5, POLL_MOST_S)
    raise AssertionError(f"not within {limit_s:.0f} s; the last answer was {said!r}")


def free_ports(count: int) -> int:
    """The first of `count` consecutive free ports below the range of outgoing connections, reserved while this process
    lives.
    """
    for base in range(PORTS_FROM, PORTS_FROM + PORTS_EACH, 4):
        if all(_is_free(base + offset) for offset in range(count)) and claimed(base):
            return base
    raise AssertionError("no free ports")


def node_ports() -> int:
    """The first of a thousand ports for nodes, reserved until `release`."""
    base = next((base for base in NODE_PORTS if claimed(base)), None)
    assert base is not None, f"{len(NODE_PORTS)} other test processes run fleets"
    return base


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0
