"""One deployment on two instance types of this host: each cell is rendered for its type and gets its share of requests,
and cells move to the other type on request.
"""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.asking import CLIENT
from tests.scenarios.running_fleet import REGIONS, START_LIMIT_S, RunningFleet, eventually

pytestmark = [pytest.mark.long, pytest.mark.scenario, pytest.mark.timeout(900)]

NAME, WHERE = "mixed", REGIONS[1]
SMALL, LARGE = "local.small", "local.cpu"
TESTED = {LARGE: 24, SMALL: 6}


@pytest.fixture
def mixed(fleet: RunningFleet) -> Iterator[RunningFleet]:
    """A deployment with one cell on each type."""
    fleet.post("instance-types", {"name": SMALL, "accelerator": "cpu", "memory_gib": 4})
    stable, _ = fleet.versions()
    fleet.post(
        "model-versions",
        {
            "model": "sim-70b",
            "version": "mixed",
            "based_on": stable,
            "parallelism": {LARGE: {"nodes": 1}, SMALL: {"nodes": 1}},
            "max_concurrency": TESTED[LARGE],
            "by_type": {SMALL: {"max_concurrency": TESTED[SMALL]}},
        },
    )
    fleet.post("model-versions/sim-70b@mixed/validate")
    eventually(lambda: fleet.api("model-versions/sim-70b@mixed")["state"] == "validated")
    deployment = {
        "name": NAME, "model_version": "sim-70b@mixed", "instance_types": [LARGE, SMALL], "allow_unreleased": True,
        "regions": [{"region": WHERE, "cells": 2}], "by_type": {WHERE: {LARGE: 1, SMALL: 1}},
    }  # fmt: skip
    fleet.post("deployments", deployment)
    try:
        eventually(lambda: types(fleet) == {LARGE: 1, SMALL: 1}, START_LIMIT_S)
        eventually(lambda: set(fleet.cells(deployment=NAME)) <= fleet.routed_cells(WHERE))
        yield fleet
    finally:
        fleet.patch(f"deployments/{NAME}", {"regions": [{"region": WHERE, "cells": 0}]})
        eventually(lambda: not fleet.cells(deployment=NAME), START_LIMIT_S)
        fleet.delete(f"deployments/{NAME}")


def types(fleet: RunningFleet) -> Counter[str]:
    """Instance types of its serving cells, if all serve."""
    cells = fleet.cells(deployment=NAME).values()
    ready = all(cell["state"] == "ready" for cell in cells)
    return Counter(cell["instance_type"] for cell in cells) if ready else Counter()


def ask(fleet: RunningFleet) -> str:
    body = {"model": NAME, "messages": [{"role": "user", "content": "go on"}], "max_tokens": 60}
    answer = CLIENT.post(f"{fleet.ingress(WHERE)}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return str(answer.headers["x-switchyard-cell"])


def test_cells_on_two_types_share_requests_by_what_they_were_tested_for_and_move(mixed: RunningFleet) -> None:
    cells = {cell["instance_type"]: name for name, cell in mixed.cells(deployment=NAME).items()}
    nodes = {node["id"]: node["instance_type"] for node in mixed.api("nodes")["results"]}
    for kind, name in cells.items():
        assert {nodes[node["id"]] for node in mixed.cells(deployment=NAME)[name]["nodes"]} == {kind}
    with ThreadPoolExecutor(20) as callers:
        answered = Counter(callers.map(lambda _: ask(mixed), range(100)))
    assert sum(answered.values()) == 100
    assert answered[cells[LARGE]] > 2 * answered[cells[SMALL]], "4 to 1, as they were tested; equal weights give 1 to 1"

    mixed.patch(f"deployments/{NAME}", {"by_type": {WHERE: {SMALL: 0}}})
    eventually(lambda: types(mixed) == {LARGE: 2}, START_LIMIT_S)
    mixed.patch(f"deployments/{NAME}", {"instance_types": [LARGE]})
    assert mixed.api(f"deployments/{NAME}")["regions"][0]["by_type"] == {}
