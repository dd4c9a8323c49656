"""Requests reach a cell of their model, and all others get an error that names the mistake."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import openai
import pytest

from engine_agent.protocol.ingress_messages import Affinity
from tests.engine_agent.fake_control_plane import eventually
from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import RunningIngress, ask, pool, read_stream, waits

pytestmark = pytest.mark.processes


@pytest.mark.asyncio
async def test_the_model_in_the_body_picks_the_pool_and_answers_stream(ingress: RunningIngress) -> None:
    async with FakeCell(chunks=3).running() as one, FakeCell().running() as other, ingress.client() as client:
        await ingress.route(pool(one), pool(other, name="other", models=("org/other-1.5B", "alias")))
        await ingress.sees(**{one.name: "up", other.name: "up"})
        assert await ask(client) == one.name
        assert await ask(client, "org/other-1.5B") == await ask(client, "alias") == other.name
        assert await read_stream(client) == "0 1 2 "
        answer = await client.chat.completions.with_raw_response.create(model="demo", messages=[])
        assert answer.headers["x-switchyard-cell"] == one.name


@pytest.mark.asyncio
async def test_a_model_after_a_long_prompt_or_deep_nesting_or_escapes_is_found(ingress: RunningIngress) -> None:
    deep: list[object] = []
    for _ in range(60):
        deep = [deep]
    bodies = [
        json.dumps({"messages": "x" * 90_000, "model": "org/m"}),
        json.dumps({"messages": "x" * 4_100_000, "model": "org/m"}),
        json.dumps({"messages": deep, "model": "org/m"}),
        '{"model":"org\\/\\u006d"}',
        '{"m\\u006fdel" : "org/m", "a": [1.5e-3, true, null, {"model": 3}]}',
    ]
    async with FakeCell().running() as cell:
        await ingress.route(pool(cell, models=("org/m",)))
        await ingress.sees(**{cell.name: "up"})
        for body in bodies:
            assert (await ingress.post(body.encode())).status_code == 200, body[:80]
        assert [len(request.body) for request in cell.requests] == [len(body) for body in bodies]


BAD_BODIES: list[tuple[bytes, str, str | None]] = [
    (b"", "it is empty", None),
    (b"hello", "not a value at byte 1", None),
    (b'{"a": "nobody"', "',' or '}' was expected at byte 15", None),
    (b'{"a": "nobody",}', "a key in quotes was expected at byte 16", None),
    (b'{"a": "nobody"} x', "more text after the end at byte 17", None),
    (b'{"a": [' + b"1," * 5000 + b'1], "mod\\u0065l": "demo"}', "5000 values name no model; put `model` first", None),
    (b'{"a": "\x01"}', "a control character in a string at byte 8", None),
    (b'{"a": "\\q"}', "an unknown escape at byte 8", None),
    (b'{"a": "', "a string without its end at byte 7", None),
    (b'{"a": 01}', "not a value at byte 7", None),
    (b"[" * 65, "nested deeper than 64 levels", None),
    (b'["model"]', "a JSON object was expected", None),
    (b"{}", "the field `model` is missing", "model"),
    (b'{"a": {"model": "demo"}}', "the field `model` is missing", "model"),
    (b'{"model": 5}', "must be a string, not a number", "model"),
    (b'{"model": null}', "must be a string, not null", "model"),
    (b'{"model": ["demo"]}', "must be a string, not a list", "model"),
]


@pytest.mark.asyncio
async def test_a_bad_body_is_answered_400_with_what_is_wrong_and_where(ingress: RunningIngress) -> None:
    async with FakeCell().running() as cell:
        await ingress.route(pool(cell))
        for body, said, param in BAD_BODIES:
            answer = await ingress.post(body)
            error = answer.json()["error"]
            assert answer.status_code == 400, body
            assert said in error["message"], (body, error)
            assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert cell.requests == []


@pytest.mark.asyncio
async def test_an_unknown_model_is_answered_404_in_the_form_the_client_knows(ingress: RunningIngress) -> None:
    async with FakeCell().running() as cell, ingress.client() as client:
        await ingress.route(pool(cell))
        with pytest.raises(openai.NotFoundError) as caught:
            await ask(client, 'no"body')
        assert caught.value.code == "model_not_found"
        assert 'The model `no"body` does not exist' in caught.value.message


@pytest.mark.asyncio
async def test_a_body_over_the_limit_is_answered_413_however_it_is_sent(ingress: RunningIngress) -> None:
    async with FakeCell().running() as cell, ingress.client() as client:
        await ingress.route(pool(cell))
        with pytest.raises(openai.APIStatusError) as caught:
            await ask(client, text="x" * 5_000_000)
        assert caught.value.status_code == 413
        assert caught.value.code == "request_too_large"
        assert (await ingress.http.post("/v1/completions", content=_pieces(80, 65536))).status_code == 413


async def _pieces(count: int, size: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b" " * size


@pytest.mark.asyncio
async def test_models_are_listed_and_shown_by_the_ingress_itself(ingress: RunningIngress) -> None:
    async with FakeCell().running() as cell, ingress.client() as client:
        await ingress.route(pool(cell, models=("org/b", "a")))
        assert [model.id async for model in client.models.list()] == ["a", "org/b"]
        assert (await client.models.retrieve("org/b")).id == "org/b"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("nobody")
        assert cell.requests == []


@pytest.mark.asyncio
async def test_wrong_paths_and_methods_are_told_in_json(ingress: RunningIngress) -> None:
    await ingress.route()
    wrong_path = await ingress.http.post("/v1/nothing", json={})
    assert (wrong_path.status_code, wrong_path.json()["error"]["code"]) == (404, "unknown_url")
    assert "POST /v1/nothing" in wrong_path.json()["error"]["message"]
    for method, path, allowed in (("GET", "/v1/chat/completions", "POST"), ("POST", "/v1/models", "GET")):
        answer = await ingress.http.request(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
        assert answer.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.asyncio
async def test_without_a_ready_cell_it_is_503_with_a_time_to_come_back(ingress: RunningIngress) -> None:
    async with ingress.client() as client:
        with pytest.raises(openai.InternalServerError) as untold:
            await ask(client)
        assert untold.value.code == "no_routing_table"
        await ingress.route(pool(), retry_after_s=7)
        with pytest.raises(openai.InternalServerError) as caught:
            await ask(client)
        assert (caught.value.status_code, caught.value.code) == (503, "no_ready_cell")
        assert waits(caught.value.response.headers)


@pytest.mark.asyncio
async def test_health_is_of_the_process_and_with_a_model_of_its_cells(ingress: RunningIngress) -> None:
    client = ingress.http
    async with FakeCell().running() as cell:
        assert (await client.get("/healthz")).status_code == 200
        await ingress.route(pool(cell, models=("org/m",)), pool(name="empty", models=("e",)))
        await ingress.sees(**{cell.name: "up"})
        statuses = [(await client.get(f"/healthz?model={model}")).status_code for model in ("org%2Fm", "e", "x")]
        assert statuses == [200, 503, 503]
        for path in ("/metrics", "/stats", "/haproxy?stats"):
            assert (await client.get(path)).status_code == 404, "what is for operators is not on the applications' port"


async def in_flight(ingress: RunningIngress, limits: list[int], requests: int, affinity: Affinity | None) -> list[int]:
    """Requests per cell with these limits, after so many endless requests; all with one key where keys count."""
    async with contextlib.AsyncExitStack() as stack:
        cells = [
            await stack.enter_async_context(FakeCell(f"c-{at}", max_connections=most).running())
            for at, most in enumerate(limits)
        ]
        for cell in cells:
            cell.release.clear()
        await ingress.route(pool(*cells, affinity=affinity))
        await ingress.sees(**{cell.name: "up" for cell in cells})
        body = json.dumps({"model": "demo", "prompt_cache_key": "one"}).encode()
        async with asyncio.TaskGroup() as group:
            for number in range(requests):
                group.create_task(ingress.post(body))
                await eventually(lambda number=number: sum(cell.in_flight for cell in cells) == number + 1)  # type: ignore[misc]
            found = [cell.in_flight for cell in cells]
            for cell in cells:
                cell.release.set()
        return found


@pytest.mark.asyncio
async def test_what_is_outstanding_is_divided_by_what_cells_run_at_once(ingress: RunningIngress) -> None:
    assert await in_flight(ingress, [32, 16, 8], 28, None) == [16, 8, 4]


@pytest.mark.asyncio
async def test_a_large_cell_keeps_a_key_up_to_its_part_of_what_there_is(ingress: RunningIngress) -> None:
    """Above 1.25 times its share, which is 3.2 times a small cell's, requests of its key go elsewhere."""
    found = await in_flight(ingress, [32, 10], 20, Affinity())
    assert sum(found) == 20
    assert found[0] >= 15, "by the mean of both it would have lost the key at 13"
