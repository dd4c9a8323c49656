"""OpenAI's Responses API through HAProxy, the control plane and a cell, with openai-python."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import openai
import pytest
import uvicorn
from asgiref.sync import sync_to_async
from django.core.asgi import get_asgi_application
from django.db import connections
from django.utils import timezone

from controlplane.request_bodies import RequestBodies
from controlplane.web import server_config
from tests.engine_agent.cell_proxy.proxy_process import until
from tests.engine_agent.ingress.cells import FakeCell, Request, _write_chunk, _write_head
from tests.engine_agent.ingress.ingresses import RunningIngress, pool
from tests.fleet.rows import NOW
from tests.traffic.rows import serving_fleet
from traffic.async_requests.planner import AsyncSettings
from traffic.async_requests.services.sender import AsyncSender
from traffic.keys.selectors import keys_for_ingresses
from traffic.keys.services import key_create, key_revoke
from traffic.responses.api import CreateResponse
from traffic.responses.models import StoredResponse
from traffic.responses.planner import event_bytes

pytestmark = [pytest.mark.processes, pytest.mark.django_db(transaction=True), pytest.mark.asyncio]
LIMIT_S = 60.0
PATH = "/v1/responses"
MODEL = "sim-70b"
T = TypeVar("T")


@pytest.fixture(autouse=True)
def _web_of_a_test(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links are plain; each thread of web closes its database connection, since there is no pool."""
    settings.PLAIN_LINKS = True
    monkeypatch.setitem(connections.settings["default"], "CONN_MAX_AGE", 0)


async def in_database(work: Callable[[], T]) -> T:
    return await sync_to_async(work, thread_sensitive=True)()


class ResponsesCell(FakeCell):
    """A cell whose engine returns the number of items that it read."""

    async def _generate(self, request: Request, writer: asyncio.StreamWriter) -> None:
        asked = request.json
        items = asked["input"] if isinstance(asked["input"], list) else [asked["input"]]
        text = f"{len(items)} items"
        content: list[Any] = [{"type": "output_text", "text": text, "annotations": [], "logprobs": None}]
        item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": content}
        usage = {"input_tokens": len(items), "output_tokens": 2, "total_tokens": len(items) + 2}
        begun = {
            "id": "resp_of_engine", "object": "response", "created_at": 7, "model": asked["model"], "output": [],
            "status": "in_progress", "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
        }  # fmt: skip
        whole = {**begun, "status": "completed", "output": [item], "usage": usage}
        if not asked.get("stream"):
            await self.release.wait()
            body = json.dumps(whole).encode()
            _write_head(writer, 200, len(body))
            writer.write(body)
            return
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        delta = {"type": "response.output_text.delta", "item_id": "msg_1", "delta": '"response"', "sequence_number": 1,
                 "output_index": 0, "content_index": 0, "logprobs": []}  # fmt: skip
        _write_chunk(writer, event_bytes({"type": "response.created", "response": begun, "sequence_number": 0}))
        _write_chunk(writer, event_bytes(delta))
        await self.release.wait()
        _write_chunk(writer, event_bytes({"type": "response.completed", "response": whole, "sequence_number": 2}))
        _write_chunk(writer, b"")


@dataclass
class Rig:
    """With `web` None, the control plane is unreachable."""

    ingress: RunningIngress
    cell: FakeCell
    web: "Web"
    key: str

    def client(self, key: str | None = None) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.ingress.url}/v1", api_key=key or self.key, max_retries=0)

    async def post(self, body: bytes, key: str | None = None) -> Any:
        headers = {"Authorization": f"Bearer {key or self.key}"}
        return await self.ingress.http.post(PATH, content=body, headers=headers)

    async def new_key(self, tenant: str, **limits: Any) -> str:
        new = await in_database(lambda: key_create(name=tenant, tenant=tenant, actor="root", now=NOW, **limits))
        await self.route()
        return new.text

    async def route(self) -> None:
        keys = await in_database(keys_for_ingresses)
        await self.ingress.route(pool(self.cell, name=MODEL, models=(MODEL,)), keys=keys, keys_required=True)
        await self.ingress.sees(**{self.cell.name: "up"})


class Web:
    """The web process's HTTP, in the test's loop."""

    def __init__(self) -> None:
        application = RequestBodies(CreateResponse(cast(Any, get_asgi_application())))
        config = server_config(application, host="127.0.0.1", port=0)
        config.timeout_graceful_shutdown = 60  # a cancelled request leaves its database connection open
        self._server = uvicorn.Server(config)
        self.port = 0

    async def start(self) -> None:
        self._serving = asyncio.create_task(self._server.serve())
        await until(self._is_up, "web serves")
        self.port = self._server.servers[0].sockets[0].getsockname()[1]

    async def _is_up(self) -> bool:
        return self._server.started

    async def stop(self) -> None:
        self._server.should_exit = True
        await self._serving


@asynccontextmanager
async def rig(home: Path, **limits: Any) -> AsyncIterator[Rig]:
    # Web shares the loop with the cell, whose health checks are late while Django works.
    web, ingress = Web(), RunningIngress(home / "home", check_interval_ms=10_000)
    await web.start()
    ingress.use(replace(ingress.settings, control_plane=(f"http://127.0.0.1:{web.port}",)))
    try:
        async with ingress.running(), ResponsesCell().running() as cell:
            await in_database(lambda: serving_fleet(ingress.settings.port))
            made = Rig(ingress, cell, web, "")
            made.key = await made.new_key("acme", **limits)
            yield made
    finally:
        await web.stop()
        await in_database(connections.close_all)


async def rows() -> list[StoredResponse]:
    return await in_database(lambda: list(StoredResponse.objects.order_by("created_at")))


async def test_a_conversation_is_kept_followed_listed_and_deleted(tmp_path: Path) -> None:
    async with rig(tmp_path) as fleet, fleet.client() as client:
        first = await client.responses.create(model=MODEL, input="one", store=True)
        assert (first.output_text, first.status, first.to_dict()["store"]) == ("1 items", "completed", True)
        second = await client.responses.create(model=MODEL, input="two", previous_response_id=first.id)
        assert (second.output_text, second.previous_response_id) == ("3 items", first.id)
        sent = fleet.cell.requests[-1]
        assert [item.get("role") for item in sent.json["input"]] == ["user", "assistant", "user"]
        assert sent.json["store"] is False
        assert not {"previous_response_id", "background"} & sent.json.keys()
        assert sent.headers["x-switchyard-tenant"] == "acme"
        assert not {"authorization", "x-switchyard-counted"} & sent.headers.keys()
        assert (await client.responses.retrieve(second.id)).output_text == "3 items"
        (item,) = (await client.responses.input_items.list(second.id)).data
        assert json.loads(item.to_json())["content"] == [{"type": "input_text", "text": "two"}]
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError, match="not found"):
            await client.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError, match="Previous response with id") as caught:
            await client.responses.create(model=MODEL, input="x", previous_response_id=second.id)
        assert caught.value.code == "previous_response_not_found"


async def test_a_stream_is_ours_from_its_first_event_and_kept_at_its_last(tmp_path: Path) -> None:
    async with rig(tmp_path) as fleet, fleet.client() as client:
        fleet.cell.release.clear()
        stream = await client.responses.create(model=MODEL, input="one", store=True, stream=True)
        events: list[Any] = []
        async for event in stream:
            events.append(event)
            if event.type == "response.output_text.delta":
                assert await rows() == []
                fleet.cell.release.set()
        assert [event.type for event in events] == [
            "response.created",
            "response.output_text.delta",
            "response.completed",
        ]
        (row,) = await rows()
        assert {events[0].response.id, events[2].response.id} == {row.id}
        assert (await client.responses.retrieve(row.id)).output_text == "1 items"


async def test_a_response_in_the_background_is_polled_and_another_is_cancelled(tmp_path: Path) -> None:
    async with rig(tmp_path) as fleet, fleet.client() as client:
        begun = await client.responses.create(model=MODEL, input="one", background=True)
        assert (begun.status, begun.background) == ("queued", True)
        other = await client.responses.create(model=MODEL, input="two", background=True)
        assert (await client.responses.cancel(other.id)).status == "cancelled"
        sender, stopping = AsyncSender(AsyncSettings(poll_s=0.05)), asyncio.Event()
        running = asyncio.create_task(sender.run(stopping))

        async def is_completed() -> bool:
            return (await client.responses.retrieve(begun.id)).status == "completed"

        try:
            await until(is_completed, "it is made")
        finally:
            stopping.set()
            await running
        (sent,) = fleet.cell.requests
        assert (sent.headers["x-switchyard-tenant"], sent.headers["x-switchyard-class"]) == ("acme", "near_realtime")
        assert (await client.responses.retrieve(begun.id)).output_text == "1 items"
        following = await client.responses.create(model=MODEL, input="three", previous_response_id=begun.id)
        assert following.output_text == "3 items"


async def test_another_tenant_finds_nothing_of_it(tmp_path: Path) -> None:
    async with rig(tmp_path) as fleet, fleet.client() as client:
        globex = await fleet.new_key("globex")
        mine = await client.responses.create(model=MODEL, input="secret", store=True)
        later = await client.responses.create(model=MODEL, input="secret", background=True)
        async with fleet.client(globex) as other:
            for response_id in (mine.id, later.id):
                calls = (
                    other.responses.retrieve(response_id),
                    other.responses.cancel(response_id),
                    other.responses.delete(response_id),
                    _listed(other, response_id),
                )
                for call in calls:
                    with pytest.raises(openai.NotFoundError):
                        await call
                with pytest.raises(openai.BadRequestError, match="not found"):
                    await other.responses.create(model=MODEL, input="x", previous_response_id=response_id)
        assert len(await rows()) == 2
        assert len(fleet.cell.requests) == 1


async def _listed(client: openai.AsyncOpenAI, response_id: str) -> Any:
    return await client.responses.input_items.list(response_id)


async def test_a_plain_response_never_comes_to_the_control_plane_which_may_be_away(tmp_path: Path) -> None:
    async with rig(tmp_path) as fleet, fleet.client() as client:
        plain: list[Any] = [{}, {"store": False}, {"background": False}, {"store": False, "previous_response_id": None}]
        for members in plain:
            made: Any = await client.responses.create(model=MODEL, input="x", **members)
            assert made.id == "resp_of_engine"
        await fleet.web.stop()

        async def is_said() -> bool:
            answer = await fleet.post(b'{"model":"sim-70b","input":"x","store":true}')
            return bool(answer.status_code == 503 and answer.json()["error"]["code"] == "control_plane_away")

        await until(is_said, "its check has failed")
        with pytest.raises(openai.APIStatusError) as caught:
            await client.responses.retrieve("resp_" + "0" * 32)
        assert (caught.value.status_code, caught.value.code) == (503, "control_plane_away")
        again = await client.responses.create(model=MODEL, input="x", store=False)
        assert again.output_text == "1 items"
        long = await client.responses.create(model=MODEL, input="x" * 100_000, store=False)
        assert long.output_text == "1 items"


async def test_a_long_request_is_understood_wherever_its_members_stand(tmp_path: Path) -> None:
    async with rig(tmp_path) as fleet:
        padding = b'"input":"' + b"x" * 100_000 + b'"'
        answer = await fleet.post(b'{"model":"sim-70b",' + padding + b',"store":true}')
        assert (answer.status_code, answer.json()["store"]) == (200, True)
        (row,) = await rows()
        follow = f'{{"previous_response_id":"{row.id}","model":"sim-70b",'.encode() + padding + b"}"
        assert (await fleet.post(follow)).json()["output"][0]["content"][0]["text"] == "3 items"
        plain = await fleet.post(b'{"model":"sim-70b",' + padding + b',"store":false}')
        assert plain.json()["id"] == "resp_of_engine"
        assert not {"authorization", "x-switchyard-stored"} & fleet.cell.requests[-1].headers.keys()
        too_long = await fleet.post(b'{"model":"sim-70b","store":true,"input":"' + b"x" * 1024 * 1025 + b'"}')
        assert (too_long.status_code, too_long.json()["error"]["code"]) == (413, "request_too_large")


TWO_MEANINGS = (
    b'{"model":"sim-70b","input":"x","store":true,"store":false}',
    b'{"model":"sim-70b","input":"x","background":true,"background":false}',
    b'{"model":"sim-70b","model":"other","input":"x","store":true}',
    b'{"model":"sim-70b","input":"x","input":"y","store":true}',
)


async def test_what_has_two_meanings_is_refused_and_sent_nowhere(tmp_path: Path) -> None:
    async with rig(tmp_path) as fleet:
        for body in TWO_MEANINGS:
            answer = await fleet.post(body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json"), body
            assert (fleet.cell.requests, await rows()) == ([], [])


async def test_one_request_counts_once_and_holds_one_place(tmp_path: Path) -> None:
    async with rig(tmp_path, requests_per_min=4, max_concurrent=1, tokens_per_min=100_000) as fleet:
        body = b'{"model":"sim-70b","input":"x","store":true}'
        remaining = [(await fleet.post(body)).headers["x-ratelimit-remaining-requests"] for _ in range(2)]
        assert remaining == ["3", "2"]
        fleet.cell.release.clear()
        first = asyncio.create_task(fleet.post(body))
        await until(_has(fleet.cell, 3), "the cell has it")
        refused = await fleet.post(body)
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "concurrency")
        fleet.cell.release.set()
        assert (await first).status_code == 200
        later = await fleet.post(b'{"model":"sim-70b","input":"x","background":true}')
        assert later.json()["status"] == "queued"
        assert (await fleet.post(body)).status_code == 200, "waiting requests are not counted yet"
        assert (await fleet.post(body)).json()["error"]["code"] == "rate_limit_exceeded"


def _has(cell: FakeCell, count: int) -> Callable[[], Any]:
    async def has() -> bool:
        return len(cell.requests) == count

    return has


async def test_nobody_but_the_control_plane_says_that_a_request_was_counted(tmp_path: Path) -> None:
    async with rig(tmp_path, requests_per_min=2) as fleet:
        headers = {"Authorization": f"Bearer {fleet.key}", "X-Switchyard-Counted": fleet.key}
        body = b'{"model":"sim-70b","input":"x"}'
        answers = [await fleet.ingress.http.post(PATH, content=body, headers=headers) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert "x-switchyard-counted" not in fleet.cell.requests[0].headers


async def test_who_asks_the_control_plane_itself_is_counted_at_the_ingress(tmp_path: Path) -> None:
    async with rig(tmp_path, requests_per_min=1) as fleet:
        url = f"http://127.0.0.1:{fleet.web.port}{PATH}"
        headers = {"Authorization": f"Bearer {fleet.key}", "X-Switchyard-Counted": fleet.key}
        body = b'{"model":"sim-70b","input":"x","store":true}'
        answers = [await fleet.ingress.http.post(url, content=body, headers=headers) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 429]


async def test_who_leaves_stops_the_engine_and_nothing_is_kept(tmp_path: Path) -> None:
    async with rig(tmp_path) as fleet, fleet.client() as client:
        fleet.cell.release.clear()
        stream = await client.responses.create(model=MODEL, input="x", store=True, stream=True)
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        whole = asyncio.create_task(fleet.post(b'{"model":"sim-70b","input":"x","store":true}'))
        await until(_has(fleet.cell, 2), "the cell has it")
        whole.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await whole
        ended = fleet.cell

        async def is_cut() -> bool:
            return all(writer.transport.is_closing() for writer in ended._writers if writer in busy)

        busy = set(ended._writers)
        await until(is_cut, "both are cut")  # before the engine may continue, else it may finish first
        fleet.cell.release.set()
        assert await rows() == []


async def test_a_revoked_key_finds_and_makes_nothing(tmp_path: Path) -> None:
    async with rig(tmp_path) as fleet, fleet.client() as client:
        made = await client.responses.create(model=MODEL, input="x", store=True)
        later = await client.responses.create(model=MODEL, input="x", background=True)
        prefix = fleet.key.split("_")[1]
        await in_database(lambda: key_revoke(prefix=prefix, actor="root", now=timezone.now()))
        await fleet.route()
        for call in (client.responses.retrieve(made.id), client.responses.cancel(later.id)):
            with pytest.raises(openai.AuthenticationError):
                await call


async def test_an_engines_refusal_is_passed_on_and_nothing_is_kept(tmp_path: Path) -> None:
    async with rig(tmp_path) as fleet:
        fleet.cell.fails = True
        assert (await fleet.post(b'{"model":"sim-70b","input":"x","store":true}')).status_code == 500
        unknown = await fleet.post(b'{"model":"none","input":"x","store":true}')
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        assert await rows() == []
