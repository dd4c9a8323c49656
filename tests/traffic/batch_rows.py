"""Files and batches for tests, and a runner that works until they have ended."""

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import Any

from asgiref.sync import sync_to_async

from tests.fleet.rows import NOW
from traffic.models import Batch, StoredFile
from traffic.models.batch import OPEN_STATES
from traffic.planning.batch import BatchSettings, checked_batch
from traffic.planning.stored_file import FilePurpose, FileSettings
from traffic.selectors.application import Application
from traffic.services.batch import batch_create
from traffic.services.batch_runner import BatchChores, BatchSender
from traffic.services.file_store import file_store
from traffic.services.stored_file import Upload, stored_name

ENDPOINT = "/v1/chat/completions"
MODEL = "sim-70b"
SOON = BatchSettings(poll_s=0.02, sync_every_s=0.02, renew_every_s=0.1, first_retry_s=0.05, longest_retry_s=0.1,
                     range_lines=4)  # fmt: skip


def line(number: int | str, content: str = "why?", **changes: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}]}
    return {"custom_id": f"id-{number}", "method": "POST", "url": ENDPOINT, "body": body, **changes}


def jsonl(*lines: object) -> bytes:
    """A file; what is bytes already goes in as it is."""
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
    """A batch over what is asked for."""
    payload = {"endpoint": ENDPOINT, "completion_window": "24h", **asked}
    return batch_create(
        application=Application(tenant=tenant, key=key),
        asked=checked_batch(payload),
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
    """Run one process of batches until `done`, which is asked in the database's thread, is true."""
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
