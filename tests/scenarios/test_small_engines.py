"""The demo on llama.cpp and on Triton, as `make up ENGINE=…` starts it: it answers, and a killed engine is started
again."""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.asking import CLIENT
from tests.scenarios.running_fleet import START_LIMIT_S, RunningFleet, eventually

pytestmark = [pytest.mark.long, pytest.mark.scenario, pytest.mark.own_fleet, pytest.mark.timeout(900)]


VERSIONS = {"llama-cpp": "smollm2@135m-q4-", "triton": "smollm2@135m-triton-"}


@pytest.fixture(scope="module", params=VERSIONS)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def small(engine: str) -> Iterator[RunningFleet]:
    with tempfile.TemporaryDirectory(prefix="llama-") as folder:
        fleet = RunningFleet(Path(folder).resolve() / "home")
        try:
            fleet.up(engine)
            fleet.wait_until_whole()
            yield fleet
        finally:
            fleet.down()


def answer(fleet: RunningFleet) -> Any:
    body = {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    found = CLIENT.post(f"{fleet.ingress()}/v1/completions", json=body)
    return found.json() if found.status_code == 200 else None


def test_it_answers_and_a_killed_engine_is_started_again(engine: str, small: RunningFleet) -> None:
    (cell,) = small.cells(deployment="smollm2").values()
    assert cell["model_version"].startswith(VERSIONS[engine])
    assert [node["rank"] for node in cell["nodes"]] == [0]
    found = answer(small)
    assert found["choices"][0]["text"].startswith(" Paris")
    assert found["usage"]["completion_tokens"] == 4

    os.kill(small.engine_pids()[cell["nodes"][0]["id"]], signal.SIGKILL)
    eventually(lambda: small.cells()[cell["id"]]["generation"] > cell["generation"], START_LIMIT_S)
    small.wait_until_whole()
    eventually(lambda: answer(small), START_LIMIT_S)
