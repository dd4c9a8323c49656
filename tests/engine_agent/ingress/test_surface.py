"""The table of paths against a running ingress: exactly its paths are served, and each requires the same of a key."""

import asyncio
import itertools
import json
import random
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote

import pytest
import pytest_asyncio

from engine_agent.protocol.api_surface import ANTHROPIC_PATHS, API_PATHS, CELL_PATHS, AnsweredBy
from tests.engine_agent.cell_proxy.http_stream import Message, read_message
from tests.engine_agent.ingress.cells import FakeCell, Request
from tests.engine_agent.ingress.ingresses import RunningIngress, pool
from tests.engine_agent.ingress.keyed import Keyed, keyed
from tests.engine_agent.ingress.test_async_requests import ControlPlane

pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module")]

MINE = b'{"model":"mine"}'
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "HEAD", "post", "FOO")
FUZZED = 500
KEY = keyed("0a0a0a0a", tenant="mine", pools=("mine",))
OTHER = keyed("0b0b0b0b", tenant="theirs", pools=("theirs",))


class AnyCell(FakeCell):
    async def _generate(self, request: Request, writer: asyncio.StreamWriter) -> None:
        body = json.dumps({"cell": self.name}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))


@dataclass
class Fleet:
    """An ingress, its control plane, and two cells of two pools."""

    ingress: RunningIngress
    web: ControlPlane
    mine: FakeCell
    theirs: FakeCell

    async def route(self, *keys: Keyed) -> None:
        pools = [pool(cell, name=cell.name, models=(cell.name,)) for cell in (self.mine, self.theirs)]
        await self.ingress.route(*pools, keys=tuple(key.entry for key in keys), keys_required=True)

    async def ask(
        self, method: str, path: str, body: bytes = MINE, key: Keyed | None = KEY, /, **headers: str
    ) -> Message:
        lines = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close", f"Content-Length: {len(body)}"]
        lines += [f"Authorization: Bearer {key.text}"] if key else []
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        reader, writer = await asyncio.open_connection("127.0.0.1", self.ingress.settings.port)
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        raw = await reader.read()
        writer.close()
        stream = asyncio.StreamReader()
        stream.feed_data(raw.replace(b"transfer-encoding: chunked", b"x-was: chunked"))
        stream.feed_eof()
        return await read_message(stream)

    async def reached(self, method: str, path: str) -> str:
        """The part that answered it; empty if it was refused."""
        before = len(self.mine.requests), len(self.theirs.requests), len(self.web.heard)
        answer = await self.ask(method, path)
        assert len(self.theirs.requests) == before[1], (method, path)
        if len(self.mine.requests) > before[0]:
            return AnsweredBy.CELL
        if any(heard.first_line == f"{method} {path} HTTP/1.1" for heard in self.web.heard[before[2] :]):
            return AnsweredBy.CONTROL_PLANE
        return AnsweredBy.INGRESS if answer.status < 400 else ""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    ingress, web = RunningIngress(tmp_path_factory.mktemp("home")), ControlPlane()
    await web.start()
    ingress.use(replace(ingress.settings, control_plane=(f"http://127.0.0.1:{web.port}",)))
    try:
        async with ingress.running(), AnyCell("mine").running() as mine, AnyCell("theirs").running() as theirs:
            yield Fleet(ingress, web, mine, theirs)
    finally:
        await web.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def fleet(shared_fleet: Fleet) -> Fleet:
    """Shared by all tests; without the requests and the table of earlier ones."""
    await shared_fleet.route(KEY, OTHER)
    await shared_fleet.ingress.sees(mine="up", theirs="up")
    for heard in (shared_fleet.mine.requests, shared_fleet.theirs.requests, shared_fleet.web.heard):
        heard.clear()
    return shared_fleet


def example(path: str) -> str:
    """A path of the table with an example of its variable part."""
    return path.replace("{model}", "mine").replace("{id}", "ar_1")


def expected(method: str, path: str) -> str:
    path = path.partition("?")[0]
    if path.startswith("/v1/models/"):
        path = unquote(path)  # the name of a model can be encoded or not
    for row in sorted(API_PATHS, key=lambda row: "{" in row.path):
        if path == example(row.path) or (row.answered_by is AnsweredBy.CONTROL_PLANE and is_of(row.path, path)):
            served = method in row.methods or (method == "HEAD" and "GET" in row.methods)
            return row.answered_by if served else ""
    return ""


def is_of(template: str, path: str) -> bool:
    """Whether a path matches a row with any identifiers: only the control plane knows which exist."""
    return re.fullmatch(re.sub(r"\{\w+\}", "[0-9A-Za-z_-]+", template), path) is not None


def misspelt(path: str, dice: random.Random) -> str:
    """A variant of the path that another parser could treat as the same."""
    at = dice.randrange(1, len(path))
    last = path.rstrip("/").rfind("/")
    return dice.choice(
        [
            f"{path}/",
            f"/{path}",
            f"{path}//",
            f"{path};a=b",
            f"{path}%20",
            f"{path}.json",
            f"{path}%3Fa",
            f"/x/..{path}",
            f"/.{path}",
            f"{path}/.",
            f"{path}/../x",
            f"{path[:at]}%{ord(path[at]):02X}{path[at + 1 :]}",
            f"{path[:last]}%2F{path[last + 1 :]}",
            f"{path[:last]}//{path[last + 1 :]}",
            f"{path[:last]}\\{path[last + 1 :]}",
            path.upper(),
            path[:at] + path[at].swapcase() + path[at + 1 :],
            path[:at] + path[at + 1 :],
            path[:at] + dice.choice("abc/._-%0") + path[at:],
            f"/v1{path}",
            path.removeprefix("/v1"),
            path.replace("/v1/", "/v2/"),
        ]
    )


def fuzzed() -> Iterator[tuple[str, str]]:
    dice = random.Random(16)
    paths = [example(row.path) for row in API_PATHS]
    elsewhere = ["/", "/metrics", "/load", "/stats", "/ping", "/invocations", "/sleep", "/v1/load_lora_adapter", "/v1"]
    elsewhere += ["/v1/chat/completions/render", "/v1/chat/completions/batch", "/inference/v1/generate", "/v2/embed"]
    elsewhere += [
        "/v1/audio/transcriptions",
        "/collective_rpc",
        "/server_info",
        "/docs",
        "/openapi.json",
        "/api/v1/keys",
    ]
    yield from itertools.product(METHODS, paths)
    yield from itertools.product(("GET", "POST"), elsewhere)
    yield from ((method, f"{path}?a=/v1/models") for path in paths for method in ("GET", "POST"))
    while True:
        yield dice.choice(("POST", "GET", "POST", "DELETE")), misspelt(dice.choice(paths), dice)


async def test_five_hundred_paths_and_methods_are_served_as_the_table_says_and_no_others(fleet: Fleet) -> None:
    cases = list(itertools.islice(dict.fromkeys(itertools.islice(fuzzed(), 3 * FUZZED)), FUZZED + 200))
    assert len(cases) >= FUZZED
    served = 0
    for method, path in cases:
        wanted = expected(method, path)
        assert await fleet.reached(method, path) == wanted, (method, path)
        served += bool(wanted)
    assert served >= len(API_PATHS)
    assert {request.path.partition("?")[0] for request in fleet.mine.requests} == CELL_PATHS.keys()


async def test_what_is_not_served_is_refused_in_the_form_of_its_path(fleet: Fleet) -> None:
    for row in API_PATHS:
        path = example(row.path)
        answer = await fleet.ask("PATCH", path)
        assert (answer.status, answer.json()["error"]["code"]) == (405, "method_not_allowed"), path
        assert answer.headers["allow"].split(", ") == list(row.methods)
        assert answer.json().get("type") == ("error" if path in ANTHROPIC_PATHS else None)
    answer = await fleet.ask("POST", "/v1/audio/transcriptions")
    assert (answer.status, answer.json()["error"]["code"]) == (404, "unknown_url")


async def test_a_key_opens_its_own_pool_alone_on_every_path_with_short_and_long_bodies(fleet: Fleet) -> None:
    for path, size in itertools.product(CELL_PATHS, (0, 100_000)):
        body = b'{"model":"theirs","x":"%b"}' % (b"x" * size)
        answer = await fleet.ask("POST", path, body)
        assert (answer.status, answer.json()["error"]["code"]) == (403, "model_not_allowed"), path
        assert answer.json().get("type") == ("error" if path in ANTHROPIC_PATHS else None), (path, size)
        assert (await fleet.ask("POST", path, body.replace(b"theirs", b"mine"))).status == 200, path
    assert fleet.theirs.requests == []
    assert len(fleet.mine.requests) == 2 * len(CELL_PATHS)


async def test_who_shows_no_key_or_a_wrong_one_gets_nothing_on_any_path_but_health(fleet: Fleet) -> None:
    wrong = keyed("0c0c0c0c")
    for row in API_PATHS:
        for key, code in ((None, "missing_api_key"), (wrong, "invalid_api_key")):
            if row.answered_by is AnsweredBy.CONTROL_PLANE or "health" in row.path:
                continue
            answer = await fleet.ask(row.methods[0], example(row.path), MINE, key)
            assert (answer.status, answer.json()["error"]["code"]) == (401, code), row.path
            assert (answer.json()["error"]["type"] == "authentication_error") == (row.path in ANTHROPIC_PATHS)
    assert fleet.mine.requests == fleet.theirs.requests == []


async def test_class_and_limits_hold_on_every_path(fleet: Fleet) -> None:
    slow = keyed("0d0d0d0d", tenant="slow", serving_class="batch", requests_per_min=1)
    for path in CELL_PATHS:
        await fleet.route(slow)
        statuses = [(await fleet.ask("POST", path, MINE, slow)).status for _ in range(2)]
        assert sorted(statuses) in ([200, 429], [429, 429]), "a minute has one request, whatever its path"
    assert {request.headers["x-switchyard-class"] for request in fleet.mine.requests} == {"batch"}
    answer = await fleet.ask("POST", "/v1/messages", MINE, slow)
    assert (answer.status, answer.json()["error"]["type"]) == (429, "rate_limit_error")
    assert int(answer.headers["retry-after-ms"]) <= 1000 * int(answer.headers["retry-after"])


async def test_a_key_may_come_as_x_api_key_and_goes_no_further(fleet: Fleet) -> None:
    assert (await fleet.ask("POST", "/v1/messages", MINE, None, x_api_key=KEY.text)).status == 200
    assert (await fleet.ask("POST", "/v1/chat/completions", x_api_key=KEY.text)).status == 200
    assert (await fleet.ask("GET", "/v1/usage", MINE, None, x_api_key=KEY.text)).status == 202
    assert all({"x-api-key", "authorization"}.isdisjoint(request.headers) for request in fleet.mine.requests)
    heard = next(heard for heard in fleet.web.heard if "/v1/usage" in heard.first_line)
    assert heard.headers["authorization"] == f"Bearer {KEY.text}"
    assert "x-api-key" not in heard.headers


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Authorization": f"Bearer {OTHER.text}", "x-api-key": KEY.text}, "two_api_keys"),
        ({"Authorization": "Basic YTpi", "x-api-key": KEY.text}, "two_api_keys"),
        ({"x-api-key": KEY.text, "X-Api-Key": KEY.text}, "doubled_header"),
    ],
)
async def test_two_keys_are_refused(fleet: Fleet, headers: dict[str, str], code: str) -> None:
    answer = await fleet.ask("POST", "/v1/messages", MINE, None, **headers)
    assert (answer.status, answer.json()["error"]["code"], answer.json()["type"]) == (400, code, "error")
    assert fleet.mine.requests == []


async def test_compressed_bodies_are_refused_unread(fleet: Fleet) -> None:
    for path in ("/v1/messages", "/v1/chat/completions", "/v1/async/completions"):
        answer = await fleet.ask("POST", path, content_encoding="gzip")
        assert (answer.status, answer.json()["error"]["code"]) == (415, "unsupported_encoding"), path
    assert (await fleet.ask("POST", "/v1/messages", content_encoding="identity")).status == 200


async def test_every_answer_names_its_request_as_each_client_reads_it(fleet: Fleet) -> None:
    openai = await fleet.ask("POST", "/v1/chat/completions", x_request_id="mine-1")
    anthropic = await fleet.ask("POST", "/v1/messages", x_request_id="mine-2")
    assert (openai.headers["x-request-id"], "request-id" in openai.headers) == ("mine-1", False)
    assert anthropic.headers["request-id"] == anthropic.headers["x-request-id"] == "mine-2"


async def test_a_head_that_is_too_large_is_refused_in_json_while_it_fits_a_buffer(fleet: Fleet) -> None:
    many = {f"x-{number}": "" for number in range(500)}
    heads: list[tuple[str, dict[str, str]]] = [("", {"x-a": "a" * 9_000}), ("", {"x-a": "a" * 40_000}), ("", many)]
    for query, headers in [*heads, ("?" + "a" * 9_000, {}), ("?" + "a" * 40_000, {})]:
        answer = await fleet.ask("POST", f"/v1/messages{query}", MINE, KEY, **headers)
        assert (answer.status, answer.json()["error"]["code"]) == (431, "request_head_too_large"), (query, headers)
        assert answer.json()["type"] == "error"
    for size in (60_000, 300_000):
        assert (await fleet.ask("POST", "/v1/messages", MINE, KEY, **{"x-a": "a" * size})).status == 400
    assert fleet.mine.requests == []


async def test_an_ingress_that_is_told_to_listens_on_ipv6_and_ipv4(tmp_path: Path) -> None:
    ingress = RunningIngress(tmp_path / "home")
    ingress.use(replace(ingress.settings, host="::"))
    async with ingress.running(), AnyCell().running() as cell:
        await ingress.route(pool(cell))
        await ingress.sees(**{cell.name: "up"})
        for host in ("::1", "127.0.0.1"):
            reader, writer = await asyncio.open_connection(host, ingress.settings.port)
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert b"HTTP/1.1 200" in await reader.read()
            writer.close()
