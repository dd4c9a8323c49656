"""A running fleet as benches use it: its API, a steady load on its ingresses, and the timeline of what happened.

It needs a running fleet from `make up` with the same SWITCHYARD_HOME."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import psutil

from lab.steady_load import Answer, background_load

HOME = Path(os.environ.get("SWITCHYARD_HOME", ".switchyard")).resolve()
SERVER = f"http://127.0.0.1:{os.environ.get('SWITCHYARD_PORT', '8000')}"
AGENT_PORT = os.environ.get("SWITCHYARD_AGENT_PORT") or int(os.environ.get("SWITCHYARD_PORT", "8000")) + 443
IS_PLAIN = os.environ.get("SWITCHYARD_PLAIN_LINKS") == "1"
AGENT_SERVER = SERVER if IS_PLAIN else f"https://127.0.0.1:{AGENT_PORT}"
POLL_S = 0.1
ACTIVE = {"running", "paused", "baking", "rolling_back"}
Row = dict[str, Any]


class Fleet:
    """The REST API with the operator's token. Control-plane processes that are away for a moment are tried again."""

    def __init__(self, timeout_s: float = 30.0) -> None:
        token = (HOME / "operator-token").read_text().strip()
        self._client = httpx.Client(
            base_url=f"{SERVER}/api/v1/", headers={"Authorization": f"Bearer {token}"}, timeout=timeout_s
        )

    def ask(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        answer = self._client.request(method, f"{path.strip('/')}/", json=body, params=query)
        if answer.is_server_error:
            raise httpx.NetworkError(f"{method} {path}: {answer.status_code} {answer.text[:300]}")
        if answer.is_error:
            raise SystemExit(f"{method} {path}: {answer.status_code} {answer.text}")
        return answer.json()

    def get(self, path: str, **query: Any) -> Any:
        return self.ask("GET", path, **query)

    def post(self, path: str, **body: Any) -> Any:
        return self.ask("POST", path, body)

    def metrics(self) -> str:
        return self._client.get(f"{SERVER}/metrics").raise_for_status().text

    def rows(self, path: str, **query: Any) -> list[Row]:
        rows: list[Row] = self.get(path, page_size=1000, **query)["results"]
        return rows

    def cells(self, deployment: str) -> dict[str, Row]:
        return {cell["id"]: cell for cell in self.rows("cells", deployment=deployment)}

    def wanted(self, deployment: str) -> dict[str, int]:
        return {place["region"]: place["cells"] for place in self.get(f"deployments/{deployment}")["regions"]}

    def scale(self, deployment: str, region: str, cells: int) -> None:
        self.ask("PATCH", f"deployments/{deployment}", {"regions": [{"region": region, "cells": cells}]})

    def ingresses(self, deployment: str) -> list[str]:
        served = self.wanted(deployment)
        return [region["ingress_url"] for region in self.rows("regions") if region["name"] in served]

    def is_whole(self, deployment: str) -> bool:
        """Whether as many cells as are wanted serve, no more and no fewer, and nothing moves."""
        states = [cell["state"] for cell in self.cells(deployment).values()]
        # In one request: between two of them a rollout may pass from one active state to another.
        moving = any(row["state"] in ACTIVE for row in self.rows("rollouts", deployment=deployment))
        return not moving and states == ["ready"] * sum(self.wanted(deployment).values())

    def last_event(self) -> int:
        newest = self.get("events", page_size=1)["results"]
        return int(newest[0]["id"]) if newest else 0

    def events(self, since_id: int, **query: Any) -> list[Row]:
        return sorted(self.rows("events", since_id=since_id, **query), key=lambda event: int(event["id"]))


def wait_for(condition: Callable[[], Any], limit_s: float, what: str, poll_s: float = POLL_S) -> Any:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            if value := condition():
                return value
        except httpx.TransportError:
            pass
        time.sleep(poll_s)
    raise SystemExit(f"not within {limit_s:.0f} s: {what}")


@contextmanager
def load(urls: list[str], model: str, rate: float, max_tokens: int) -> Iterator[list[Answer]]:
    """`rate` streaming requests a second to each address while the block runs, and what became of them all."""
    with background_load(urls, model, rate, max_tokens=max_tokens) as answers:
        time.sleep(3)
        yield answers
        time.sleep(3)


def last_pass_age_s(server: str = SERVER, loop: str = "fleet.reconcile", timeout_s: float = 10.0) -> float:
    return float(httpx.get(f"{server}/healthz", timeout=timeout_s).json()["loops"][loop])


def at(event: Row) -> float:
    return datetime.fromisoformat(event["at"]).timestamp()


def fewest_ready(events: list[Row], ready: set[str]) -> int:
    """Returns the least number of simultaneously ready cells, from those ready before and the events of cells since."""
    now, fewest = set(ready), len(ready)
    for event in events:
        if event["kind"] == "cell.ready":
            now.add(event["cell"])
        elif event["kind"].startswith("cell."):
            now.discard(event["cell"])
        fewest = min(fewest, len(now))
    return fewest


def spans(events: list[Row], begins: str, ends: str) -> list[float]:
    """Seconds from each event of one kind to the next of the other kind of the same cell."""
    began: dict[str, float] = {}
    found = []
    for event in events:
        if event["kind"] == ends and event["cell"] in began:
            found.append(at(event) - began.pop(event["cell"]))
        if event["kind"] == begins:
            began[event["cell"]] = at(event)
    return found


def launched() -> Row:
    """What the launcher states of itself: its children's pids and the address of the database."""
    status: Row = json.loads((HOME / "up.json").read_text())
    return status


def service(name: str) -> list[psutil.Process]:
    process = psutil.Process(launched()["sessions"][name])
    return [*process.children(recursive=True), process]
