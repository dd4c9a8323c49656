"""OpenAI's Files and Batch APIs through HAProxy, the control plane and a cell, with openai-python."""

import asyncio
import functools
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

from controlplane.request_bodies import RequestBodies
from controlplane.web import server_config
from tests.engine_agent.cell_proxy.proxy_process import until
from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import RunningIngress, pool
from tests.fleet.rows import NOW
from tests.traffic.rows import ENDPOINT, MODEL, SOON, jsonl, line, serving_fleet, work_on_batches
from traffic.batches.models import Batch, StoredFile
from traffic.batches.planning.batch import BatchSettings
from traffic.files.services.store import file_store
from traffic.keys.selectors import keys_for_ingresses
from traffic.keys.services import key_create

pytestmark = [pytest.mark.processes, pytest.mark.django_db(transaction=True), pytest.mark.asyncio]
T = TypeVar("T")


@pytest.fixture(autouse=True)
def _web_of_a_test(settings: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings.PLAIN_LINKS = True
    settings.FILES = str(tmp_path / "files")
    monkeypatch.setitem(connections.settings["default"], "CONN_MAX_AGE", 0)


async def in_database(work: Callable[[], T]) -> T:
    return await sync_to_async(work, thread_sensitive=True)()


@dataclass
class Rig:
    ingress: RunningIngress
    cell: FakeCell
    key: str = ""

    def client(self, key: str | None = None) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.ingress.url}/v1", api_key=key or self.key, max_retries=0)

    async def new_key(self, tenant: str, **limits: Any) -> str:
        new = await in_database(lambda: key_create(name=tenant, tenant=tenant, actor="root", now=NOW, **limits))
        keys = await in_database(keys_for_ingresses)
        await self.ingress.route(pool(self.cell, name=MODEL, models=(MODEL,)), keys=keys, keys_required=True)
        await self.ingress.sees(**{self.cell.name: "up"})
        return new.text

    @asynccontextmanager
    async def worked(self, settings: BatchSettings = SOON) -> AsyncIterator[None]:
        stopping = asyncio.Event()
        running = asyncio.create_task(work_on_batches(stopping, settings))
        try:
            yield
        finally:
            stopping.set()
            await running


@asynccontextmanager
async def rig(home: Path) -> AsyncIterator[Rig]:
    application = RequestBodies(cast(Any, get_asgi_application()))
    config = server_config(application, host="127.0.0.1", port=0)
    config.timeout_graceful_shutdown = 60  # a cancelled request leaves its database connection open
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())

    async def is_up() -> bool:
        return server.started

    await until(is_up, "web serves")
    port = server.servers[0].sockets[0].getsockname()[1]
    # Web shares the loop with the cell, whose health checks are late while Django works.
    ingress = RunningIngress(home / "home", check_interval_ms=10_000)
    ingress.use(replace(ingress.settings, control_plane=(f"http://127.0.0.1:{port}",)))
    try:
        async with ingress.running(), FakeCell().running() as cell:
            await in_database(lambda: serving_fleet(ingress.settings.port))
            made = Rig(ingress, cell)
            made.key = await made.new_key("acme")
            yield made
    finally:
        server.should_exit = True
        await serving
        await in_database(connections.close_all)


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    found: list[Any] = []

    async def has_ended() -> bool:
        found[:] = [await client.batches.retrieve(batch_id)]
        return found[0].status in {"completed", "failed", "expired", "cancelled"}

    await until(has_ended, "the batch has ended")
    return found[0]


async def upload(client: openai.AsyncOpenAI, content: bytes, **more: Any) -> Any:
    return await client.files.create(file=("in.jsonl", content), purpose="batch", **more)


async def begin(client: openai.AsyncOpenAI, file_id: str, **more: Any) -> Any:
    return await client.batches.create(
        input_file_id=file_id, endpoint=cast(Any, ENDPOINT), completion_window="24h", **more
    )


async def test_a_file_is_kept_listed_read_and_deleted(tmp_path: Path) -> None:
    async with rig(tmp_path) as fleet, fleet.client() as client:
        content = jsonl(*(line(number, "x" * 500) for number in range(2000)))
        assert len(content) > 1024 * 1024, "longer than any other body that the control plane accepts"
        made = await upload(client, content, expires_after={"anchor": "created_at", "seconds": 3600})
        assert (made.bytes, made.filename, made.purpose, made.status) == (
            len(content), "in.jsonl", "batch", "processed",
        )  # fmt: skip
        assert made.expires_at == made.created_at + 3600
        assert (await client.files.retrieve(made.id)) == made
        assert (await client.files.wait_for_processing(made.id)) == made
        assert (await client.files.content(made.id)).content == content
        other = await upload(client, b"x\n")
        assert [file.id async for file in client.files.list(limit=1)] == [other.id, made.id]
        assert [file.id async for file in client.files.list(order="asc", purpose="batch")] == [made.id, other.id]
        assert [file.id async for file in client.files.list(purpose="batch_output")] == []
        gone = await client.files.delete(made.id)
        assert (gone.id, gone.deleted) == (made.id, True)
        for call in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError, match="No such File object"):
                await call(made.id)


NO_FILES: list[tuple[int, str, str, bytes, dict[str, str]]] = [
        (400, "invalid_value", "in.jsonl", b"x", {"purpose": "fine-tune"}),
        (400, "invalid_file_format", "in.csv", b"x", {"purpose": "batch"}),
        (400, "empty_file", "in.jsonl", b"", {"purpose": "batch"}),
        (400, "invalid_value", "in.jsonl", b"x", {"purpose": "batch", "expires_after[anchor]": "now"}),
        (400, "invalid_value", "in.jsonl", b"x", {"purpose": "batch", "expires_after[anchor]": "created_at",
                                                   "expires_after[seconds]": "1"}),
        (413, "file_too_large", "in.jsonl", b"x" * 1024 * 1024 + b"x", {"purpose": "batch"}),
        (413, "file_too_large", "in.jsonl", b"x" * 2 * 1024 * 1024, {"purpose": "batch"}),
]  # fmt: skip
"""Status and code of the answer, and the name, content and fields of the upload."""


async def test_a_file_that_is_none_leaves_nothing(tmp_path: Path, settings: Any) -> None:
    settings.FILE_MAX_BYTES = 1024 * 1024
    async with rig(tmp_path) as fleet:
        headers = {"Authorization": f"Bearer {fleet.key}"}
        for status, code, name, content, fields in NO_FILES:
            answer = await fleet.ingress.http.post(
                "/v1/files", files={"file": (name, content)}, data=fields, headers=headers
            )
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), (name, fields)
            assert await in_database(StoredFile.objects.count) == 0
            assert (list(file_store().names("files")), list(file_store().names("unfinished"))) == ([], [])


async def test_an_upload_that_is_no_form_or_of_nobody_is_refused(tmp_path: Path) -> None:
    async with rig(tmp_path) as fleet:
        http, headers = fleet.ingress.http, {"Authorization": f"Bearer {fleet.key}"}
        answer = await http.post("/v1/files", content=b"{}", headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
        form = {"Content-Type": "multipart/form-data", **headers}
        answer = await http.post("/v1/files", content=b"{}", headers=form)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_form")
        answer = await http.post("/v1/files", files={"other": ("a.jsonl", b"x")}, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_form")
        answer = await http.post("/v1/files", data={"purpose": "batch"}, headers=headers)
        assert answer.status_code in {400, 415}
        answer = await http.post("/v1/files", files={"file": ("a.jsonl", b"x")})
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "missing_api_key")


async def test_a_batch_goes_from_its_file_to_its_results(tmp_path: Path) -> None:
    async with rig(tmp_path) as fleet, fleet.client() as client:
        file = await upload(client, jsonl(*(line(number) for number in range(9))))
        batch = await begin(client, file.id, metadata={"for": "a test"})
        assert (batch.status, batch.object, batch.input_file_id) == ("validating", "batch", file.id)
        assert batch.expires_at == batch.created_at + 86_400
        async with fleet.worked():
            done = await ended(client, batch.id)
        assert (done.status, done.metadata, done.errors) == ("completed", {"for": "a test"}, None)
        assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (9, 9, 0)
        assert done.error_file_id is None
        lines = [json.loads(each) for each in (await client.files.content(done.output_file_id)).text.splitlines()]
        assert sorted(each["custom_id"] for each in lines) == [f"id-{number}" for number in range(9)]
        assert {each["response"]["status_code"] for each in lines} == {200}
        outputs = [file async for file in client.files.list(purpose="batch_output")]
        assert [file.id for file in outputs] == [done.output_file_id]
        heard = fleet.cell.requests[0].headers
        assert (heard["x-switchyard-tenant"], heard["x-switchyard-class"]) == ("acme", "batch")


async def test_lists_page_and_raw_responses_are_json(tmp_path: Path) -> None:
    async with rig(tmp_path) as fleet, fleet.client() as client:
        file = await upload(client, jsonl(line(1)))
        made = [(await begin(client, file.id)).id for _ in range(3)]
        assert [batch.id async for batch in client.batches.list(limit=1)] == made[::-1]
        first = await client.batches.list(limit=2)
        assert (first.has_more, [batch.id for batch in first.data]) == (True, made[:0:-1])
        raw = await client.batches.with_raw_response.retrieve(made[0])
        assert raw.parse().id == made[0]
        with pytest.raises(openai.BadRequestError, match="must be a whole number from 1 to 100"):
            await client.batches.list(limit=101)
        with pytest.raises(openai.BadRequestError, match="must be an ID in this list"):
            await client.batches.list(after="batch_none")


async def test_a_batch_is_cancelled_before_it_is_validated_and_not_twice_ended(tmp_path: Path) -> None:
    async with rig(tmp_path) as fleet, fleet.client() as client:
        file = await upload(client, jsonl(line(1)))
        first = await begin(client, file.id)
        assert (await client.batches.cancel(first.id)).status == "cancelling"
        assert (await client.batches.cancel(first.id)).status == "cancelling"
        async with fleet.worked():
            gone = await ended(client, first.id)
            assert (gone.status, gone.output_file_id, gone.request_counts.total) == ("cancelled", None, 0)
            assert (await client.batches.cancel(first.id)).status == "cancelled"
            other = await upload(client, jsonl(line(1, "and now?")))
            second = await ended(client, (await begin(client, other.id)).id)
        assert second.status == "completed"
        with pytest.raises(openai.ConflictError, match="Cannot cancel a batch with status 'completed'"):
            await client.batches.cancel(second.id)
        assert {b"and now?" in request.body for request in fleet.cell.requests} == {True}  # none of the first


CANCELLED: dict[str, str | None] = {
    "validating": "cancelling",
    "in_progress": "cancelling",
    "cancelling": "cancelling",
    "cancelled": "cancelled",
    "finalizing": None,
    "completed": None,
    "failed": None,
    "expired": None,
}
"""The state of a batch before it is cancelled, and after; None if the request is refused."""


async def test_a_batch_is_cancelled_until_it_ends_and_again_is_no_fault(tmp_path: Path) -> None:
    async with rig(tmp_path) as fleet, fleet.client() as client:
        file = await upload(client, jsonl(line(1)))
        for state, then in CANCELLED.items():
            made: str = (await begin(client, file.id)).id
            await in_database(functools.partial(Batch.objects.filter(id=made).update, state=state))
            if then:
                cancelled = await client.batches.cancel(made)
                assert (cancelled.status, cancelled.cancelling_at is not None) == (
                    then,
                    state in {"validating", "in_progress"},
                )
            else:
                with pytest.raises(openai.ConflictError, match=f"Cannot cancel a batch with status '{state}'"):
                    await client.batches.cancel(made)
            assert (await client.batches.retrieve(made)).status == (then or state)


async def test_a_batch_cancelled_on_its_way_has_what_was_answered(tmp_path: Path) -> None:
    async with rig(tmp_path) as fleet, fleet.client() as client:
        batch = await begin(client, (await upload(client, jsonl(*(line(number) for number in range(60))))).id)
        async with fleet.worked():

            async def some_are_answered() -> bool:
                counts = (await client.batches.retrieve(batch.id)).request_counts
                return counts is not None and counts.completed > 0

            await until(some_are_answered, "some lines are answered")
            await client.batches.cancel(batch.id)
            gone = await ended(client, batch.id)
        texts = [(await client.files.content(file)).text for file in (gone.output_file_id, gone.error_file_id) if file]
    lines = [json.loads(each) for text in texts for each in text.splitlines()]
    assert (gone.status, gone.request_counts.total) == ("cancelled", 60)
    assert sorted(each["custom_id"] for each in lines) == sorted(f"id-{number}" for number in range(60))
    unsent = [each for each in lines if each["error"]]
    assert {each["error"]["code"] for each in unsent} <= {"batch_cancelled"}
    assert gone.request_counts.failed == len(unsent)


BAD_FILES: dict[str, tuple[bytes, str, int | None]] = {
    "no JSON": (jsonl(line(1)) + b"{\n", "invalid_json_line", 2),
    "no object": (b"[1]\n", "invalid_json_line", 1),
    "not UTF-8": (b'{"custom_id": "\xff"}\n', "invalid_json_line", 1),
    "two members of a name": (b'{"custom_id": "a", "custom_id": "b"}\n', "invalid_json_line", 1),
    "a mark of the order of bytes": (b"\xef\xbb\xbf" + jsonl(line(1)), "invalid_json_line", 1),
    "no number": (b'{"custom_id": NaN}\n', "invalid_json_line", 1),
    "deep": (b"[" * 100_000 + b"\n", "invalid_json_line", 1),
    "a long line": (jsonl(line(1), line(2, "x" * 1024 * 1024)), "invalid_json_line", 2),
    "twice": (jsonl(line(1), line(2), line(1)), "duplicate_custom_id", 3),
    "no id": (jsonl({**line(1), "custom_id": None}), "missing_required_parameter", 1),
    "another path": (jsonl(line(1), line(2, url="/v1/embeddings")), "url_mismatch", 2),
    "another method": (jsonl(line(1, method="GET")), "invalid_method", 1),
    "two models": (jsonl(line(1), line(2, body={"model": "b", "messages": []})), "model_not_found", 2),
    "no body": (jsonl(line(1, body=None)), "missing_required_parameter", 1),
    "a stream": (jsonl(line(1, body={"model": MODEL, "messages": [], "stream": True})), "invalid_value", 1),
    "a model of nobody": (jsonl(line(1, body={"model": "none", "messages": []})), "model_not_found", 1),
    "blank": (b" \n\n", "empty_file", None),
    "too many": (jsonl(*(line(number) for number in range(9))), "too_many_tasks", None),
}


BY_DEFAULT = ("no JSON", "a long line", "too many")
"""The kinds that the default run sends through the ingress. planning/test_lines.py and test_runner.py have the rest."""


async def test_every_kind_of_bad_file_fails_its_batch_with_code_and_line(tmp_path: Path, thorough: bool) -> None:
    few = replace(SOON, max_lines=8)
    kinds = BAD_FILES if thorough else {kind: BAD_FILES[kind] for kind in BY_DEFAULT}
    async with rig(tmp_path) as fleet, fleet.client() as client:
        begun = {}
        for kind, (content, _, _) in kinds.items():
            begun[kind] = (await begin(client, (await upload(client, content)).id)).id
        async with fleet.worked(few):
            for kind, (_, code, number) in kinds.items():
                batch = await ended(client, begun[kind])
                assert batch.errors is not None, kind
                first = batch.errors.data[0]
                assert (kind, batch.status, first.code, first.line) == (kind, "failed", code, number)
                assert (batch.output_file_id, batch.error_file_id, batch.request_counts.total) == (None, None, 0)
        assert fleet.cell.requests == []


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"endpoint": "/v1/audio/speech"}, "endpoint"),
    ({"completion_window": "1h"}, "completion_window"),
    ({"input_file_id": "file-0"}, "input_file_id"),
    ({"input_file_id": "file-" + "0" * 32}, "input_file_id"),
    ({"metadata": {"a": "x" * 513}}, "metadata"),
    ({"metadata": {str(number): "x" for number in range(17)}}, "metadata"),
    ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
    ({"extra_body": {"switchyard": {"completion_window": "1s"}}}, "switchyard.completion_window"),
    ({"extra_body": {"switchyard": {"priority": 10}}}, "switchyard.priority"),
    ({"extra_body": {"switchyard": {"speed": 1}}}, "switchyard.speed"),
    ({"extra_body": {"switchyard": {"input_uri": "s3://acme/in"}}}, "input_file_id"),
    ({"input_file_id": "", "extra_body": {"switchyard": {"input_uri": "s3://acme/in"}}}, "switchyard.input_uri"),
    ({"input_file_id": "", "extra_body": {"switchyard": {"input_uri": "/etc/passwd"}}}, "switchyard.input_uri"),
    ({"extra_body": {"switchyard": {"output_uri": "s3://acme/../x"}}}, "switchyard.output_uri"),
    ({"extra_body": {"switchyard": {"output_uri": ["s3://acme"]}}}, "switchyard.output_uri"),
    ({"input_file_id": ""}, "input_file_id"),
    ({"extra_body": {"target_model_names": "x"}}, "target_model_names"),
]


async def test_what_is_wrong_with_a_batch_is_said_by_field(tmp_path: Path) -> None:
    async with rig(tmp_path) as fleet, fleet.client() as client:
        file = await upload(client, jsonl(line(1)))
        for changes, param in BAD_FIELDS:
            asked: Any = {"input_file_id": file.id, "endpoint": ENDPOINT, "completion_window": "24h"} | changes
            with pytest.raises((openai.BadRequestError, openai.PermissionDeniedError)) as caught:
                await client.batches.create(**asked)
            assert caught.value.param == param, changes


async def test_another_tenant_finds_nothing_of_it(tmp_path: Path) -> None:
    async with rig(tmp_path) as fleet, fleet.client() as client:
        globex = await fleet.new_key("globex")
        file = await upload(client, jsonl(line(1)))
        batch = await begin(client, file.id)
        async with fleet.client(globex) as other:
            calls: list[Callable[[], Any]] = [
                lambda: other.files.retrieve(file.id),
                lambda: other.files.content(file.id),
                lambda: other.files.delete(file.id),
                lambda: other.batches.retrieve(batch.id),
                lambda: other.batches.cancel(batch.id),
            ]
            for call in calls:
                with pytest.raises(openai.NotFoundError):
                    await call()
            with pytest.raises(openai.BadRequestError, match="does not exist"):
                await begin(other, file.id)
            assert [each async for each in other.files.list()] == []
            assert [each async for each in other.batches.list()] == []
        assert (await client.batches.retrieve(batch.id)).status == "validating"
