"""Creates, downloads and cancels batches of tenants for operators. Each records an event with the operator and the
tenant, in the transaction of the change."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import BinaryIO

from django.db import transaction

from kernel.events import event_record
from kernel.refusals import Conflict, InvalidInput
from kernel.tones import Tone
from traffic.async_requests.services.intake import serving_region_check
from traffic.batches.models import Batch, StoredFile
from traffic.batches.planning.batch import USUAL_WINDOW, LineError, parse_new_batch
from traffic.batches.selectors import batch_files
from traffic.batches.services.batch import batch_create, batch_end_early, batch_settings
from traffic.batches.services.validation import refused_models, shard_index
from traffic.files.planner import FilePurpose, checked_name, expiry_of
from traffic.files.services.files import Upload, file_settings
from traffic.files.services.store import StoreAway, pieces
from traffic.keys.models import ApplicationKey
from traffic.tenants.planner import ApplicationRefused
from traffic.tenants.selectors import Application, application_of, application_with

ERRORS_SHOWN = 10


@dataclass(frozen=True, slots=True)
class BatchUpload:
    """A file for a batch, seekable. `key`: the prefix of the key under which it runs, "" for none. `window` as in
    `switchyard.completion_window`."""

    file: BinaryIO
    filename: str
    key: str
    endpoint: str
    window: str = USUAL_WINDOW
    priority: int | None = None


def batch_create_for_operator(*, upload: BatchUpload, actor: str, now: datetime) -> Batch:
    """Validates every line, then stores the file for the key's tenant and creates the batch. Raises InvalidInput with
    the numbers of invalid lines. Raises ApplicationRefused if an application with this key would be refused. Raises
    Conflict if the file store is unavailable."""
    application = _application_of(upload.key, now)
    filename, settings = checked_name(upload.filename), batch_settings()
    extension = {"completion_window": upload.window}
    if upload.priority is not None:
        extension |= {"priority": upload.priority}  # type: ignore[dict-item]
    payload = {"endpoint": upload.endpoint, "completion_window": USUAL_WINDOW, "switchyard": extension}
    parse_new_batch({**payload, "input_file_id": f"file-{'0' * 32}"})  # the rest is checked before the file is read
    whole = replace(settings, shard_lines=settings.max_lines)
    index = shard_index(upload.file, upload.endpoint, whole, salt=secrets.token_bytes(16))
    if not len(index) and not index.errors:
        raise InvalidInput(field="file", rule="valid", message="the file has no lines")
    if index.errors:
        raise InvalidInput(field="file", rule="valid", message=_errors_text(index.errors, index.errors_in_all))
    region = serving_region_check(application, "", next(iter(index.models)))
    if refused := refused_models(application, region, index.first_lines):
        raise InvalidInput(field="file", rule="valid", message=_errors_text(refused, len(refused)))
    try:
        with transaction.atomic():
            stored = _store(upload.file, filename, application, now)
            asked = parse_new_batch({**payload, "input_file_id": stored.id})
            batch = batch_create(application=application, asked=asked, region=region, now=now, settings=settings)
            message = f"{_whose(batch)} was created by {actor} from {filename}: {len(index)} lines"
            _record("batch.created", message, batch, actor, now)
    except StoreAway as away:
        raise Conflict(f"{away}; try again shortly") from away
    return batch


def _application_of(key: str, now: datetime) -> Application:
    if not key:
        return application_of("", now)
    row = ApplicationKey.objects.filter(prefix=key.removeprefix("sw_")).first()
    if row is None:
        message = f"there is no key {key[:40]!r}; state the prefix that the page of keys shows, such as 0a1b2c3d"
        raise InvalidInput(field="key", rule="exists", message=message)
    return application_with(row, now)


def _errors_text(errors: Sequence[LineError], in_all: int) -> str:
    shown = [f"line {error.line}: {error.message}" if error.line else error.message for error in errors[:ERRORS_SHOWN]]
    more = f" {in_all - len(shown)} others are not shown." if in_all > len(shown) else ""
    return f"the file has {in_all} error{'s' if in_all > 1 else ''}. {' '.join(map(_sentence, shown))}{more}"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def _store(file: BinaryIO, filename: str, application: Application, now: datetime) -> StoredFile:
    """Bytes without a row, after a refusal, are garbage that is collected within a day."""
    settings = file_settings()
    writer = Upload(settings)
    try:
        file.seek(0)
        for piece in pieces(file):
            writer.write(piece)
        expires_at = expiry_of(None, None, now, settings)
        return writer.finish(
            application=application, filename=filename, purpose=FilePurpose.BATCH, expires_at=expires_at, now=now
        )
    finally:
        writer.abort()


def batch_file_open(*, batch: Batch, name: str, actor: str, now: datetime) -> StoredFile | None:
    """The results or errors (`name`) of a batch, for a download, with an event: they are a tenant's content. Returns
    None if there are none, or they have expired."""
    file = batch_files(batch, now).get(name)
    if file is not None:
        _record("batch.downloaded", f"{name} of {_whose(batch)} were downloaded by {actor}", batch, actor, now)
    return file


def batch_cancel_for_operator(*, batch_id: str, actor: str, now: datetime, why: str) -> Batch:
    """Cancels a batch for an operator, with an event. Raises Conflict if it has ended."""
    with transaction.atomic():
        try:
            batch = batch_end_early(batch=Batch.objects.get(id=batch_id), now=now)
        except ApplicationRefused as refusal:
            raise Conflict(str(refusal)) from refusal
        message = f"{_whose(batch)} was cancelled by {actor}: {why}"
        _record("batch.cancelled", message, batch, actor, now, tone=Tone.WARN)
    return batch


def _whose(batch: Batch) -> str:
    return f"batch {batch.id} of {batch.tenant or 'no tenant'}"


def _record(kind: str, message: str, batch: Batch, actor: str, now: datetime, tone: Tone = Tone.IDLE) -> None:
    detail = {"batch": batch.id, "tenant": batch.tenant}
    event_record(kind=kind, message=message, tone=tone, now=now, actor=actor[:64], detail=detail)
