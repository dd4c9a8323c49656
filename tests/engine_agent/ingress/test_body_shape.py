"""Bodies that a cell could not parse, or could read differently, get a clean 400 from the ingress."""

import json
from typing import Any

import pytest

from engine_agent.protocol.strict_json import DEEPEST, LONGEST_NAME_CHARS
from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import RunningIngress, pool

pytestmark = [pytest.mark.processes, pytest.mark.asyncio]
MEDIUM = 100_000
PADDING = (0, MEDIUM, 300_000)
"""For the HAProxy that serves, and for the parsers of medium and of large bodies."""
MESSAGES = "/v1/messages"


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


def padded(members: str, padding: int) -> bytes:
    return f'{{{members},"text":"{"x" * padding}","model":"demo"}}'.encode()


REFUSED = {
    "deep": (f'"messages":{nested(DEEPEST)}', f"it is nested deeper than {DEEPEST} levels"),
    "very deep": (f'"messages":{nested(15_000)}', f"it is nested deeper than {DEEPEST} levels"),
    "deep, and no JSON": ('"a":' + '{"a":' * 2_000 + "1", f"it is nested deeper than {DEEPEST} levels"),
    "a NUL in a name": ('"messages":[{"ro\\u0000le":"user"}]', "a member has a NUL in its name"),
    "a NUL in the first name": ('"\\u0000a" : 1', "a member has a NUL in its name"),
}


@pytest.mark.parametrize(
    "padding", [pytest.param(each, marks=pytest.mark.long if each == MEDIUM else ()) for each in PADDING]
)
@pytest.mark.parametrize("name", REFUSED)
async def test_a_body_of_a_bad_shape_is_refused_here(ingress: RunningIngress, name: str, padding: int) -> None:
    members, reason = REFUSED[name]
    async with FakeCell().running() as cell:
        await ingress.route(pool(cell))
        await ingress.sees(**{cell.name: "up"})
        for body in (padded(members, padding), padded(f'"model":"demo",{members}', padding)):
            answer = await ingress.post(body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
            assert reason.removeprefix("it is ") in answer.json()["error"]["message"]
            said = (await ingress.http.post(MESSAGES, content=body)).json()
            assert (said["type"], said["error"]["type"]) == ("error", "invalid_request_error")
        assert not cell.requests


async def test_names_of_60_kb_are_refused(ingress: RunningIngress) -> None:
    async with FakeCell().running() as cell:
        await ingress.route(pool(cell))
        await ingress.sees(**{cell.name: "up"})
        for name in ("n" * 60_000, "\\n" * 30_000):
            answer = await ingress.post(f'{{"model":"demo","tools":[{{"{name}" :1}}]}}'.encode())
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
            assert f"more than {LONGEST_NAME_CHARS} bytes" in answer.json()["error"]["message"]
        assert not cell.requests


async def test_a_model_with_a_nul_is_no_other_model(ingress: RunningIngress) -> None:
    async with FakeCell().running() as cell:
        await ingress.route(pool(cell))
        await ingress.sees(**{cell.name: "up"})
        for padding in PADDING:
            for member in ('"model":"demo\\u0000zzz"', '"mod\\u0065l":"demo\\u0000zzz"'):
                answer = await ingress.post(f'{{{member},"text":"{"x" * padding}"}}'.encode())
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
        assert not cell.requests


async def test_what_only_looks_like_it_is_served(ingress: RunningIngress) -> None:
    texts = ["[{" * 500 + '\0\\u0000": \\' + '"' * 50 + "x" * padding for padding in PADDING]
    tools = [{"name": "\\u0000", "n" * (LONGEST_NAME_CHARS - 1): ["y" * 2000, {"a": []}]}] * 100
    async with FakeCell().running() as cell:
        await ingress.route(pool(cell))
        await ingress.sees(**{cell.name: "up"})
        deepest = json.loads(nested(DEEPEST - 1))
        requests: list[dict[str, Any]] = [{"messages": [{"content": text}]} for text in texts]
        for request in (*requests, {"tools": tools}, {"messages": deepest}):
            body = json.dumps(request | {"model": "demo"}).encode()
            answer = await ingress.post(body)
            assert answer.status_code == 200, answer.text
            assert cell.requests[-1].body == body
