"""Clients see an adapter as a model: it leads to the cells that have it, and to no others."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from engine_agent.ingress.bad_table import BadTable
from engine_agent.ingress.desired import desired_from
from engine_agent.ingress.routing_maps import ADAPTERS_MAP, CELLS_MAP, LISTING_MAP, MODELS_MAP
from engine_agent.protocol.api_surface import LOADING_PATHS
from engine_agent.protocol.ingress_messages import Affinity, Pool, PoolAdapter, cell_server_name
from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import AWAY, HOME, RunningIngress, pool
from tests.engine_agent.ingress.keyed import keyed
from tests.engine_agent.ingress.test_desired import with_pool
from tests.engine_agent.ingress.test_spill import until_spill_is

TUNED = "acme/tuned"


def with_adapter(served: Pool, *holders: FakeCell, name: str = TUNED, everywhere: bool = False) -> Pool:
    """The pool with an adapter in these of its cells, or in all."""
    starts = None if everywhere else tuple(cell_server_name(cell.name, cell.generation) for cell in holders)
    return msgspec.structs.replace(served, adapters=(PoolAdapter(name, "demo", starts),))


def body(model: str = TUNED, **more: Any) -> bytes:
    return json.dumps({"model": model, **more}).encode()


async def cells_of(ingress: RunningIngress, times: int = 8, **more: Any) -> set[str]:
    """Which cells answer requests for the adapter."""
    answers = [await ingress.post(body(**more)) for _ in range(times)]
    assert {answer.status_code for answer in answers} == {200}, [answer.text for answer in answers]
    return {answer.headers["x-switchyard-cell"] for answer in answers}


def test_a_name_leads_to_its_pool_and_is_listed_with_its_parent() -> None:
    maps = desired_from(with_pool(adapters=(PoolAdapter("tuned", "chat"),), created_at=7)).maps
    assert maps[MODELS_MAP]["tuned"] == "pool.chat"
    assert maps[ADAPTERS_MAP] == {"tuned": "*"}
    assert json.loads(maps[LISTING_MAP]["=tuned"]) == {
        "id": "tuned", "object": "model", "created": 7, "owned_by": "switchyard", "parent": "chat",
    }  # fmt: skip
    assert maps[LISTING_MAP]["/tuned"] == "pool.chat"
    assert [each["id"] for each in json.loads(maps[LISTING_MAP]["all"])["data"]] == ["chat", "org/chat", "tuned"]


@pytest.mark.parametrize(("holders", "entry"), [(("c-1-g3", "c-9-g1"), "/c-1-g3"), ((), "/"), (("c-1-g2",), "/")])
def test_while_some_cells_lack_it_the_map_names_the_starts_that_have_it(holders: tuple[str, ...], entry: str) -> None:
    maps = desired_from(with_pool(adapters=(PoolAdapter("tuned", "chat", holders),))).maps
    assert maps[ADAPTERS_MAP] == {"tuned": entry}


def test_without_adapters_there_is_no_map_of_them() -> None:
    assert ADAPTERS_MAP not in desired_from(with_pool()).maps
    assert CELLS_MAP not in desired_from(with_pool()).maps


@pytest.mark.parametrize(("name", "reason"), [("chat", "model chat is listed twice"), ("-x", "adapter '-x'")])
def test_a_name_that_is_a_model_s_or_none_is_refused(name: str, reason: str) -> None:
    with pytest.raises(BadTable, match=reason):
        desired_from(with_pool(adapters=(PoolAdapter(name, "chat"),)))


@contextlib.asynccontextmanager
async def two_cells(ingress: RunningIngress) -> AsyncIterator[tuple[FakeCell, FakeCell]]:
    async with FakeCell("old").running() as old, FakeCell("new").running() as new:
        await ingress.route(with_adapter(pool(old, new), new))
        await ingress.sees(old="up", new="up")
        yield old, new


@pytest.mark.processes
@pytest.mark.asyncio
async def test_during_a_rollout_its_requests_meet_the_cells_that_have_it_alone(ingress: RunningIngress) -> None:
    async with two_cells(ingress) as (old, new):
        worker = ingress.worker_pid
        assert await cells_of(ingress) == {"new"}
        assert await cells_of(ingress, 2, prompt="x" * 300_000) == {"new"}, "also by way of a body parser"
        assert {request.headers["x-switchyard-adapter"] for request in new.requests} == {"acme%2Ftuned"}
        forged = await ingress.post(body("demo"), **{"X-Switchyard-Adapter": TUNED})
        assert forged.status_code == 200
        (asked,) = [each for each in (*old.requests, *new.requests) if each.json["model"] == "demo"]
        assert "x-switchyard-adapter" not in asked.headers
        assert {request.json["model"] for request in old.requests} <= {"demo"}
        await ingress.route(with_adapter(pool(old, new), everywhere=True))
        assert await cells_of(ingress) == {"old", "new"}
        assert ingress.worker_pid == worker, "cells get an adapter without a reload"


@pytest.mark.processes
@pytest.mark.asyncio
async def test_without_a_cell_that_has_it_no_other_one_is_asked(ingress: RunningIngress) -> None:
    async with two_cells(ingress) as (old, new):
        assert (await ingress.http.get("/health", params={"model": TUNED})).status_code == 200
        await new.die()
        await ingress.sees(old="up", new="down")
        answer = await ingress.post(body())
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_ready_cell")
        assert "retry-after" in answer.headers
        assert (await ingress.http.get("/health", params={"model": TUNED})).status_code == 503
        assert (await ingress.http.get("/health", params={"model": "demo"})).status_code == 200
        assert not old.requests
        assert (await ingress.post(body("demo"))).headers["x-switchyard-cell"] == "old"


@pytest.mark.processes
@pytest.mark.asyncio
async def test_a_full_cell_that_has_it_is_waited_for(ingress: RunningIngress) -> None:
    async with FakeCell("old").running() as old, FakeCell("new", max_connections=1, step_s=0.1).running() as new:
        await ingress.route(with_adapter(pool(old, new, affinity=Affinity()), new))
        await ingress.sees(old="up", new="up")
        answers = await asyncio.gather(*(ingress.post(body(prompt_cache_key=str(at))) for at in range(4)))
        assert [answer.headers.get("x-switchyard-cell") for answer in answers] == ["new"] * 4


@pytest.mark.processes
@pytest.mark.asyncio
async def test_one_conversation_has_another_key_for_each_adapter_and_keeps_its_cell(ingress: RunningIngress) -> None:
    """As many cells as adapters: with the prompt alone as key, all requests would go to one cell."""
    names = [f"tenant-{at}" for at in range(12)]
    adapters = tuple(PoolAdapter(name, "demo") for name in names)
    async with contextlib.AsyncExitStack() as stack:
        cells = [await stack.enter_async_context(FakeCell(f"c-{at}").running()) for at in range(4)]
        await ingress.route(msgspec.structs.replace(pool(*cells, affinity=Affinity()), adapters=adapters))
        await ingress.sees(**{cell.name: "up" for cell in cells})
        homes = {}
        for name in (*names, "demo"):
            answers = [await ingress.post(body(name, prompt_cache_key="one")) for _ in range(3)]
            found = {answer.headers["x-switchyard-cell"] for answer in answers}
            assert len(found) == 1, name
            homes[name] = found.pop()
        assert len(set(homes.values())) > 1
        large = await ingress.post(body(names[0], prompt_cache_key="one", prompt="x" * 300_000))
        assert large.headers["x-switchyard-cell"] == homes[names[0]]


@pytest.mark.processes
@pytest.mark.asyncio
async def test_a_key_is_shown_and_may_use_the_adapters_of_the_deployments_that_it_opens(
    ingress: RunningIngress,
) -> None:
    mine, theirs = keyed("0a1b2c3d", pools=("demo",)), keyed("9f8e7d6c", pools=("other",))
    async with FakeCell("c").running() as cell, FakeCell("o").running() as other:
        pools = (with_adapter(pool(cell), everywhere=True), pool(other, name="other", models=("other",)))
        await ingress.route(*pools, keys=(mine.entry, theirs.entry), keys_required=True)
        await ingress.sees(c="up", o="up")
        assert (await ingress.post(body(), **mine.headers)).status_code == 200
        refused = await ingress.post(body(), **theirs.headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "model_not_allowed")
        listed = (await ingress.http.get("/v1/models", headers=mine.headers)).json()["data"]
        assert [(each["id"], each.get("parent")) for each in listed] == [(TUNED, "demo"), ("demo", None)]
        hidden = (await ingress.http.get("/v1/models", headers=theirs.headers)).json()["data"]
        assert [each["id"] for each in hidden] == ["other"]
        one = await ingress.http.get(f"/v1/models/{TUNED}", headers=mine.headers)
        assert one.json()["parent"] == "demo"
        assert (await ingress.http.get(f"/v1/models/{TUNED}", headers=theirs.headers)).status_code == 404


@pytest.mark.processes
@pytest.mark.asyncio
async def test_nobody_loads_or_unloads_an_adapter_by_a_request(ingress: RunningIngress) -> None:
    key = keyed()
    async with FakeCell("c").running() as cell:
        await ingress.route(pool(cell), keys=(key.entry,), keys_required=True)
        await ingress.sees(c="up")
        for path in LOADING_PATHS:
            load = {"lora_name": "mine", "lora_path": "/etc/passwd"}
            answer = await ingress.http.post(path, json=load, headers=key.headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "adapters_by_version")
            assert "belong to a model version" in answer.json()["error"]["message"]
            assert (await ingress.http.post(path, json=load)).status_code == 401
        assert not cell.requests


@pytest_asyncio.fixture
async def away(tmp_path: Path) -> AsyncIterator[RunningIngress]:
    async with RunningIngress(tmp_path / "away", AWAY).running() as running:
        yield running


@pytest.mark.processes
@pytest.mark.asyncio
async def test_where_no_cell_of_this_region_has_it_the_other_region_serves_and_its_own_requests_stay(
    ingress: RunningIngress, away: RunningIngress
) -> None:
    async with FakeCell("near").running() as near, FakeCell("far").running() as far:
        await away.route(with_adapter(pool(far, spill=[ingress], fractions={HOME: 1.0}), far))
        await ingress.route(with_adapter(pool(near, spill=[away], fractions={HOME: 1.0})))
        await ingress.sees(near="up")
        await away.sees(far="up")
        await until_spill_is(True, ingress)
        await until_spill_is(True, away)
        assert await cells_of(ingress) == {"far"}
        assert await cells_of(ingress, 1, prompt="x" * 300_000) == {"far"}
        assert await cells_of(away) == {"far"}, "its share of requests would leave, and nobody there has it"
        assert not near.requests
        assert (await ingress.post(body("demo"))).headers["x-switchyard-cell"] == "near"
