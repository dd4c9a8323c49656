"""A prefill and a decode cell on the running fleet: a long prompt is handed over, and without the prefill cell the
decode cell answers alone."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from tests.asking import CLIENT
from tests.scenarios.running_fleet import REGIONS, START_LIMIT_S, AskedFleet, eventually

pytestmark = [pytest.mark.long, pytest.mark.scenario, pytest.mark.timeout(900)]

NAME, WHERE = "apart", REGIONS[1]
LONG = "Tell me about the weather in the mountains. " * 100
"""Some 900 tokens: more than a decode cell reads itself."""


def ask(fleet: AskedFleet, prompt: str) -> tuple[int, str]:
    """Status, and what was answered."""
    body = {"model": NAME, "messages": [{"role": "user", "content": prompt}], "max_tokens": 8, "temperature": 0}
    answer = CLIENT.post(f"{fleet.ingress(WHERE)}/v1/chat/completions", json=body, timeout=60)
    return answer.status_code, answer.json()["choices"][0]["message"]["content"] if answer.is_success else answer.text


def cell_of(fleet: AskedFleet, role: str) -> dict[str, Any]:
    (found,) = (cell for cell in fleet.cells(deployment=NAME).values() if cell["role"] == role)
    return dict(found)


def handovers(fleet: AskedFleet) -> dict[str, Any]:
    return dict(cell_of(fleet, "decode")["load"]["handovers"] or {})


@pytest.fixture
def apart(fleet: AskedFleet) -> Iterator[AskedFleet]:
    """With a deployment of one prefill and one decode cell, each of one node."""
    stable, _ = fleet.versions()
    single = {"model": "sim-70b", "version": "alone", "based_on": stable, "parallelism": {"local.cpu": {"nodes": 1}}}
    fleet.post("model-versions", single)
    fleet.post("model-versions/sim-70b@alone/validate")
    eventually(lambda: fleet.api("model-versions/sim-70b@alone")["state"] == "validated")
    pools = {"region": WHERE, "cells": {"prefill": 1, "decode": 1}}
    deployment = {"name": NAME, "model_version": "sim-70b@alone", "instance_types": ["local.cpu"], "regions": [pools]}
    fleet.post("deployments", {**deployment, "allow_unreleased": True})

    def states() -> list[tuple[str, str]]:
        return sorted((cell["role"], cell["state"]) for cell in fleet.cells(deployment=NAME).values())

    try:
        eventually(lambda: states() == [("decode", "ready"), ("prefill", "ready")], START_LIMIT_S)
        eventually(lambda: cell_of(fleet, "decode")["id"] in fleet.routed_cells(WHERE))
        yield fleet
    finally:
        fleet.patch(f"deployments/{NAME}", {"regions": [{"region": WHERE, "cells": 0}]})
        eventually(lambda: not fleet.cells(deployment=NAME), START_LIMIT_S)
        fleet.delete(f"deployments/{NAME}")


def test_a_long_prompt_is_handed_over_and_without_the_prefill_cell_it_is_answered_all_the_same(
    apart: AskedFleet,
) -> None:
    prefill = cell_of(apart, "prefill")
    assert prefill["id"] not in apart.routed_cells(WHERE)
    status, text = ask(apart, LONG)
    assert status == 200
    eventually(lambda: handovers(apart).get("handovers_total", 0) >= 1)

    apart.take_down(prefill["nodes"][0]["id"])
    assert ask(apart, LONG + "Once more.")[0] == 200, "nobody waits for a cell that is gone"
    assert ask(apart, LONG) == (200, text)
    before, tries = handovers(apart)["handovers_total"], count()
    eventually(lambda: cell_of(apart, "prefill")["generation"] > prefill["generation"], START_LIMIT_S)
    eventually(lambda: cell_of(apart, "prefill")["state"] == "ready", START_LIMIT_S)

    def is_handed_over_again() -> bool:
        # Each prompt is new: what the decode cell has read alone it hands over no more.
        assert ask(apart, f"{next(tries)} {LONG}")[0] == 200
        return bool(handovers(apart)["handovers_total"] > before)

    eventually(is_handed_over_again)
