"""Keeps long bodies and answers outside PostgreSQL: those of one statement share a file in the file store, and a row
has only the reference. Short ones stay in their rows, as do all while the store is away. A file is durable before its
rows exist, so a kill between the two leaves only a file without rows, which `body_groups_trim` deletes."""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import uuid4

from kernel.outside_transaction import is_inside_transaction
from traffic.async_requests.models import AsyncRequest
from traffic.async_requests.planner import AsyncSettings
from traffic.files.services.store import file_store
from traffic.files.services.store_protocol import NoSuchFile, StoreAway

FOLDER = "async"
HOUR = "%Y%m%dT%H"

log = logging.getLogger(__name__)


class BodyLost(Exception):
    """The store has no such bytes, or other ones; the text says which."""


@dataclass(frozen=True, slots=True)
class BodyReference:
    """Bytes `start` to `end` of a file, and the start of their SHA-256."""

    file: str
    start: int
    end: int
    digest: str

    def __str__(self) -> str:
        return f"{self.file} {self.start} {self.end} {self.digest}"


def body_reference(text: str) -> BodyReference:
    file, start, end, digest = text.split(" ")
    return BodyReference(file, int(start), int(end), digest)


def bodies_store(bodies: Sequence[bytes], *, now: datetime, settings: AsyncSettings) -> list[str]:
    """Writes the long bodies to one file. Returns the reference of each, "" for those that stay in their rows. Writes
    nothing inside a transaction, because the store may be a remote service."""
    references = ["" for _ in bodies]
    long = [number for number, body in enumerate(bodies) if len(body) > settings.inline_bytes]
    if not long or is_inside_transaction():
        return references
    file, start = f"{FOLDER}/{now.astimezone(UTC).strftime(HOUR)}/{uuid4().hex}", 0
    try:
        writer = file_store().write(file)
        for number in long:
            writer.write(bodies[number])
            end = start + len(bodies[number])
            references[number] = str(BodyReference(file, start, end, _digest(bodies[number])))
            start = end
        writer.commit()
    except StoreAway as away:
        log.warning("the file store is away; %d bodies are stored in PostgreSQL: %s", len(long), away)
        return ["" for _ in bodies]
    return references


def body_read(inline: bytes, reference: str) -> bytes:
    """Returns a body from its row or the store. Raises StoreAway or BodyLost."""
    if not reference:
        return inline
    at = body_reference(reference)
    try:
        body = file_store().read(at.file, at.start, at.end)
    except NoSuchFile as error:
        raise BodyLost(f"the file store has no {at.file}") from error
    if _digest(body) != at.digest:
        raise BodyLost(f"the bytes of {at.file} have changed")
    return body


def answer_load(request: AsyncRequest) -> AsyncRequest:
    """Fills `answer` from the store; a lost one stays empty. Raises StoreAway. Do not save the row afterwards."""
    if request.answer_at:
        try:
            request.answer = body_read(b"", request.answer_at)
        except BodyLost as lost:
            log.error("the answer of %s is lost: %s", request.id, lost)
    return request


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()[:16]


def body_groups_trim(*, now: datetime, settings: AsyncSettings) -> int:
    """Deletes the folders of hours whose files no row can refer to: older than every request that may be open, and than
    the oldest outcome. Returns their number."""
    oldest = now - timedelta(seconds=settings.longest_limit_s)
    ended = AsyncRequest.objects.filter(ended_at__isnull=False).order_by("ended_at")
    if kept := ended.values_list("ended_at", flat=True).first():
        oldest = min(oldest, kept)
    last_hour = (oldest - timedelta(hours=1)).astimezone(UTC).strftime(HOUR)
    store = file_store()
    names = [name for name in store.folders(FOLDER) if name.rpartition("/")[2] < last_hour]
    for name in names:
        store.delete_folder(name)
    return len(names)
