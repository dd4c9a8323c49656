"""Raw requests: a cell only receives requests that the ingress has checked, with the key that it has checked."""

import asyncio
import contextlib
import json
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_agent.cell_proxy.rewrite import BadBody, rewrite_body
from engine_agent.protocol.api_surface import CELL_PATHS
from engine_agent.protocol.strict_json import strict_loads
from tests.engine_agent.attacks.framing import CORPUS, MINE
from tests.engine_agent.ingress.cells import FakeCell, Request
from tests.engine_agent.ingress.ingresses import RunningIngress, pool
from tests.engine_agent.ingress.keyed import keyed

pytestmark = [pytest.mark.processes, pytest.mark.asyncio]
KEY = keyed("0a0a0a0a", tenant="mine", pools=("mine",))
OTHER = keyed("0b0b0b0b", tenant="theirs", pools=("theirs",))
LAST = b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
UNENDED_S = 0.5
"""Limit for requests that never end."""


class AnyCell(FakeCell):
    """Also answers bodies that are not JSON: the real cell's decision is evaluated afterwards."""

    async def _generate(self, request: Request, writer: asyncio.StreamWriter) -> None:
        body = json.dumps({"cell": self.name}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))


async def send(ingress: RunningIngress, raw: bytes) -> bytes:
    """The answer to these bytes on a new connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", ingress.settings.port)
    said = b""
    with contextlib.suppress(OSError, TimeoutError):
        writer.write(raw + LAST)
        async with asyncio.timeout(UNENDED_S):
            while piece := await reader.read(65536):
                said += piece
    writer.close()
    return said


def cell_would_serve(request: Request) -> bool:
    model = request.headers.get("x-switchyard-model")
    if "content-encoding" in request.headers:
        return False
    try:
        rewrite_body(request.path.partition("?")[0].encode(), request.body, 0, "own", model)
    except BadBody:
        return False
    return True


@pytest.fixture
def raw() -> list[bytes]:
    key = f"Authorization: Bearer {KEY.text}".encode()
    return [each.replace(b"@KEY@", key) for each in CORPUS]


async def test_no_request_reaches_a_cell_but_as_the_ingress_understood_it(
    ingress: RunningIngress, raw: list[bytes]
) -> None:
    assert len(raw) >= 100
    async with AnyCell("mine").running() as mine, AnyCell("theirs").running() as theirs:
        pools = (pool(mine, name="mine", models=("mine",)), pool(theirs, name="theirs", models=("theirs",)))
        await ingress.route(*pools, keys=(KEY.entry, OTHER.entry), keys_required=True)
        await ingress.sees(mine="up", theirs="up")
        for attack in raw:
            said = await send(ingress, attack)
            assert not said or said.startswith((b"HTTP/1.1 ", b"HTTP/1.0 ")), attack
            assert not re.search(rb"HTTP/1.[01] 50[0234]", said), (attack, said)
            answer = await ingress.post(MINE, **OTHER.headers)
            assert answer.status_code == 403, "what others sent does not stand before the next request"
        for request in mine.requests:
            assert request.method == "POST"
            assert request.path.partition("?")[0] in CELL_PATHS
            assert request.headers["x-switchyard-tenant"] == "mine"
            if cell_would_serve(request):
                assert strict_loads(request.body)["model"] == "mine", request
        assert theirs.requests == []
        assert (await ingress.post(MINE, **KEY.headers)).json() == {"cell": "mine"}
        assert len(mine.requests) > 30, "many of them are fine"


NAMES = st.sampled_from(
    ['"model"', '"mod\\u0065l"', '"Model"', '"model "', '"a"', '"messages"', '""', '"model\\u0000"', '"\\"model"']
)
STRINGS = st.sampled_from(
    ['"one"', '"two"', '"o\\u006ee"', '"one\\u0000"', '"on\\u00e9"', '"\\u0074wo"', '"none"', '""', '"one "']
)
OTHERS = st.sampled_from(
    ["1", "null", "true", '["one"]', '{"model":"two"}', "-0", "1e5", '[[[{"model":"one"}]]]', "NaN", "01"]
)
DEEP = st.integers(15, 30).map(lambda levels: "[" * levels + '{"model":"two"}' + "]" * levels)
MEMBERS = st.lists(st.tuples(NAMES, STRINGS | OTHERS | DEEP, st.sampled_from(["", " ", "\n"])), max_size=4)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(MEMBERS, st.sampled_from(["{%s}", "{%s", "{%s}x", "[{%s}]", " {%s} ", "{%s,}"]))
def differing(bodies: list[bytes], members: list[tuple[str, str, str]], frame: str) -> None:
    bodies.append((frame % ",".join(f"{blank}{name}{blank}:{value}" for name, value, blank in members)).encode())


async def test_haproxy_and_python_find_the_same_model_or_the_request_is_refused(ingress: RunningIngress) -> None:
    bodies: list[bytes] = []
    differing(bodies)
    async with AnyCell("one").running() as one, AnyCell("two").running() as two:
        await ingress.route(pool(one, name="one", models=("one",)), pool(two, name="two", models=("two",)))
        await ingress.sees(one="up", two="up")
        for body in bodies:
            before = len(one.requests), len(two.requests)
            assert (await ingress.post(body)).status_code in {200, 400, 404, 429}, body
            reached = [cell.name for cell, count in zip((one, two), before, strict=True) if len(cell.requests) > count]
            cells = {"one": one, "two": two}
            served = [name for name in reached if cell_would_serve(cells[name].requests[-1])]
            assert served in ([], [model_by_python(body)]), body


def model_by_python(body: bytes) -> str | None:
    """Top level only: deeper members are for the engine."""
    try:
        found = json.loads(body)
    except ValueError:
        return None
    return found.get("model") if isinstance(found, dict) else None
