"""Rows, files, batches and forecasts for tests of traffic, a stand-in ingress, and a runner of batches."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler
from typing import Any

from asgiref.sync import sync_to_async

from tests.fleet import rows
from tests.fleet.rows import NOW
from tests.fleet.webhooks.receiver import Answer, Receiver, receiver
from traffic.async_requests.models import AsyncRequest
from traffic.async_requests.planner import AsyncSettings, AttemptResponse
from traffic.async_requests.services.intake import AsyncSubmission, async_request_accept
from traffic.async_requests.services.requests import async_attempts_settle, async_requests_claim
from traffic.batches.models import OPEN_STATES, Batch, StoredFile
from traffic.batches.planning.batch import BatchSettings, parse_new_batch
from traffic.batches.services.batch import batch_create
from traffic.batches.services.runner import BatchChores, BatchSender
from traffic.demand.models import DemandDay, DemandForecast
from traffic.files.planner import FilePurpose, FileSettings
from traffic.files.services.files import Upload, stored_name
from traffic.files.services.store import file_store
from traffic.responses.planner import JsonObject, StoreSettings
from traffic.responses.services import PassedOn, ResponseSubmission, response_begin, response_keep
from traffic.routing.models import Ingress
from traffic.routing.services.ingresses import ingress_create
from traffic.routing.services.tables import tables_publish
from traffic.tenants.selectors import Application

BODY = b'{"model":"sim-70b","messages":[{"role":"user","content":"why?"}]}'
ANSWER = b'{"id":"x","choices":[{"message":{"content":"because"}}],"usage":{"completion_tokens":1}}'


def serving_fleet(port: int = 9) -> Ingress:
    """A region whose ingress listens on `port`, and whose table has the model of `BODY`."""
    ingress = ingress_create(region=rows.region(), address="127.0.0.1", port=port, now=NOW)
    rows.cell("c1", rows.node("n-a"))
    tables_publish(now=NOW)
    return ingress


def accepted(
    tenant: str = "", *, key: str = "", now: datetime = NOW, body: bytes = BODY, **headers: Any
) -> AsyncRequest:
    request, _ = async_request_accept(
        application=Application(tenant=tenant, key=key),
        submission=AsyncSubmission("/v1/chat/completions", body, "", **headers),
        now=now,
    )
    return request


def answering_json(status: int = 200, body: bytes = ANSWER) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


@contextmanager
def standin_ingress() -> Iterator[Receiver]:
    """A server in place of an ingress; it answers 200 by default."""
    with receiver() as standin:
        standin.answer = answering_json()
        yield standin


ENDPOINT = "/v1/chat/completions"
MODEL = "sim-70b"
SOON = BatchSettings(poll_s=0.02, sync_every_s=0.02, renew_every_s=0.1, first_retry_s=0.05, longest_retry_s=0.1,
                     range_lines=4)  # fmt: skip


def line(number: int | str, content: str = "why?", **changes: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}]}
    return {"custom_id": f"id-{number}", "method": "POST", "url": ENDPOINT, "body": body, **changes}


def jsonl(*lines: object) -> bytes:
    """Joins lines to a file; bytes are used as they are."""
    return b"".join((each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n" for each in lines)


def stored(content: bytes, tenant: str = "", *, now: datetime = NOW, purpose: FilePurpose = FilePurpose.BATCH,
           expires_at: datetime | None = None) -> StoredFile:  # fmt: skip
    upload = Upload(FileSettings())
    upload.write(content)
    return upload.finish(
        application=Application(tenant=tenant),
        filename="in.jsonl",
        purpose=purpose,
        expires_at=expires_at or now.replace(year=now.year + 1),
        now=now,
    )


def begun(content: bytes, tenant: str = "", *, key: str = "", now: datetime = NOW, settings: BatchSettings = SOON,
          **asked: Any) -> Batch:  # fmt: skip
    """A batch over this content, in the state validating."""
    file = stored(content, tenant, now=now)
    return begun_with(tenant, key=key, now=now, settings=settings, input_file_id=file.id, **asked)


def begun_with(tenant: str = "", *, key: str = "", now: datetime = NOW, settings: BatchSettings = SOON,
               **asked: Any) -> Batch:  # fmt: skip
    """A batch created from this request."""
    payload = {"endpoint": ENDPOINT, "completion_window": "24h", **asked}
    return batch_create(
        application=Application(tenant=tenant, key=key),
        asked=parse_new_batch(payload),
        region="",
        now=now,
        settings=settings,
    )


def results(file_id: str) -> list[dict[str, Any]]:
    """The lines of a file in the store."""
    with file_store().open(stored_name(file_id)) as file:
        return [json.loads(each) for each in file]


def has_open_batches() -> bool:
    return Batch.objects.filter(state__in=OPEN_STATES).exists()


async def work_on_batches(stopping: asyncio.Event, settings: BatchSettings = SOON) -> None:
    await asyncio.gather(BatchChores(settings).run(stopping), BatchSender(settings).run(stopping))


async def worked_until(done: Callable[[], Any], settings: BatchSettings = SOON, limit_s: float = 60.0) -> None:
    """Runs a batch process until `done`, evaluated in the database's thread, is true."""
    stopping = asyncio.Event()
    running = asyncio.create_task(work_on_batches(stopping, settings))
    try:
        async with asyncio.timeout(limit_s):
            while not await sync_to_async(done, thread_sensitive=True)():
                with suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(running), 0.05)
    finally:
        stopping.set()
        await running


ACME, GLOBEX = Application("acme", "0a0a0a0a"), Application("globex", "0b0b0b0b")
STORE = StoreSettings()
SENDING = AsyncSettings()


def begin(
    application: Application = ACME,
    *,
    now: datetime = NOW,
    settings: StoreSettings = STORE,
    headers: dict[str, str] | None = None,
    **members: Any,
) -> PassedOn | JsonObject:
    body = json.dumps({"model": "sim-70b", "input": "hi", **members}).encode()
    stated = {"authorization": "Bearer sw_x", **(headers or {})}
    submission = ResponseSubmission(body, stated, "us-east-1")
    return response_begin(application=application, submission=submission, now=now, settings=settings)


def answer(text: str = "ho", **members: Any) -> JsonObject:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": content}
    return {"id": "resp_of_engine", "object": "response", "status": "completed", "output": [item], **members}


def kept(application: Application = ACME, *, text: str = "ho", now: datetime = NOW, **members: Any) -> str:
    """The ID of a response that its application waited for."""
    passed = begin(application, now=now, store=True, **members)
    assert isinstance(passed, PassedOn)
    response_keep(passed=passed, answer={**answer(text), **passed.marks(is_kept=True)}, now=now)
    return passed.response_id


def in_background(application: Application = ACME, **members: Any) -> str:
    begun = begin(application, background=True, **members)
    assert isinstance(begun, dict)
    return str(begun["id"])


def attempt(received: AttemptResponse, now: datetime = NOW) -> bytes:
    """Has a sender attempt what is waiting; returns what it sent."""
    (leased,) = async_requests_claim(count=1, rooms={}, now=now, settings=SENDING)
    async_attempts_settle(attempts=[(leased, received)], now=now, settings=SENDING)
    return leased.body


MADE = datetime(2026, 11, 26, 12, 0, tzinfo=UTC)
EAST = "us-east-1"


def demand_days(count: int, load: float = 20.0, serving_class: str = "realtime") -> None:
    """Whole days of constant load, up to `MADE`, of `sim-70b` in its first region."""
    deployment, region = rows.deployment(where=EAST), rows.region(EAST)
    for ago in range(count + 1):
        slots = 288 if ago else 144
        DemandDay.objects.create(
            deployment=deployment,
            origin=region,
            serving_class=serving_class,
            day=(MADE - timedelta(days=ago)).date(),
            loads=[load] * slots,
        )


def forecast_row(
    load: float = 30.0,
    made_at: datetime = MADE,
    origin: str = EAST,
    serving_class: str = "realtime",
    judged: bool = True,
) -> DemandForecast:
    """A forecast of constant load, with a p90 of 1.2 and a p99 of 1.5 times as much."""
    return DemandForecast.objects.create(
        deployment=rows.deployment(where=origin),
        origin=rows.region(origin),
        serving_class=serving_class,
        made_at=made_at,
        slot_s=900,
        p50=[load] * 96,
        p90=[1.2 * load] * 96,
        p99=[1.5 * load] * 96,
        methods=["blend"] * 96,
        is_judged=judged,
    )
