"""`service_tier` of a request: the class that its cell serves it in, and who may ask for which tier."""

import json
from typing import Any

import httpx
import pytest

from engine_agent.protocol.api_surface import SERVICE_TIERS
from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import RunningIngress, pool
from tests.engine_agent.ingress.keyed import keyed

pytestmark = [pytest.mark.processes, pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]
CLASS = "x-switchyard-class"
LONG = "word " * 8000
"""Longer than the serving HAProxy's buffers."""


async def ask(ingress: RunningIngress, tier: Any, *, text: str = "hi", key: str = "", **headers: str) -> httpx.Response:
    body = {"model": "demo", "messages": [{"role": "user", "content": text}], "service_tier": tier}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    return await ingress.post(json.dumps(body).encode(), **headers)


@pytest.mark.parametrize("text", ["hi", LONG], ids=["short", "long"])
async def test_a_tier_is_a_class_and_the_answer_states_it(shared_ingress: RunningIngress, text: str) -> None:
    async with FakeCell().running() as cell:
        await shared_ingress.route(pool(cell))
        await shared_ingress.sees(**{cell.name: "up"})
        served = {tier: await ask(shared_ingress, tier, text=text) for tier in (*SERVICE_TIERS, None)}
        assert {answer.status_code for answer in served.values()} == {200}
        classes = {tier: answer.headers[CLASS] for tier, answer in served.items()}
        assert classes == {**dict.fromkeys((*SERVICE_TIERS, None), "realtime"), "flex": "batch"}
        assert [request.headers[CLASS] for request in cell.requests] == list(classes.values())
        assert not any("x-switchyard-tier" in request.headers for request in cell.requests)


@pytest.mark.parametrize("text", ["hi", LONG], ids=["short", "long"])
async def test_an_unknown_tier_and_one_that_is_not_allowed_are_named(shared_ingress: RunningIngress, text: str) -> None:
    urgent, calm = keyed(), keyed("1b2c3d4e", serving_class="near_realtime")
    async with FakeCell().running() as cell:
        await shared_ingress.route(pool(cell), keys=(urgent.entry, calm.entry))
        await shared_ingress.sees(**{cell.name: "up"})
        for tier in ("fastest", "Flex", "flex\n", "flex priority", 7, 20_000 * "x", "flex" + 20_000 * " "):
            answer = await ask(shared_ingress, tier, text=text)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_value", "service_tier")
        for refused in (
            await ask(shared_ingress, "priority", text=text, key=calm.text),
            await ask(shared_ingress, "priority", text=text, key=urgent.text, **{"X-Switchyard-Class": "batch"}),
        ):
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "service_tier_not_allowed")
        assert not cell.requests
        for key, tier, served in ((urgent, "priority", "realtime"), (calm, "default", "near_realtime")):
            assert (await ask(shared_ingress, tier, text=text, key=key.text)).headers[CLASS] == served
        assert (await ask(shared_ingress, "flex", text=text, key=calm.text)).headers[CLASS] == "batch"


async def test_a_less_urgent_deployment_serves_no_priority(shared_ingress: RunningIngress) -> None:
    async with FakeCell().running() as cell:
        await shared_ingress.route(pool(cell, serving_class="near_realtime"))
        await shared_ingress.sees(**{cell.name: "up"})
        assert (await ask(shared_ingress, "priority")).json()["error"]["code"] == "service_tier_not_allowed"
        assert (await ask(shared_ingress, "auto")).headers[CLASS] == "near_realtime"


async def test_a_client_cannot_state_the_tier_by_a_header(shared_ingress: RunningIngress) -> None:
    async with FakeCell().running() as cell:
        await shared_ingress.route(pool(cell))
        await shared_ingress.sees(**{cell.name: "up"})
        for text in ("hi", LONG):
            answer = await ask(shared_ingress, "default", text=text, **{"X-Switchyard-Tier": "flex"})
            assert answer.headers[CLASS] == "realtime"
