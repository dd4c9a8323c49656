"""Inputs and results of batches in a tenant's bucket. Grants are checked each time, an input is read in one version,
and a result never replaces an object."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO, cast

from fleet.clouds.aws.calls import CallFailed, Refused
from fleet.clouds.aws.objects import ObjectChanged, ObjectReader, ObjectWriter, OtherObject
from traffic.batches.models import Batch
from traffic.batches.planning.batch import LineError
from traffic.files.services.store import GONE, READ_BYTES, FileStore, StoreAway, pieces, store_error_text
from traffic.tenants.models import GrantUse, TenantGrant
from traffic.tenants.planner import ObjectUri, parse_object_uri
from traffic.tenants.selectors import place_grant_for, place_refusal

JSONL = "application/jsonl"


class UnusableObject(Exception):
    """An input that cannot be read, or results that cannot be written, permanently."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code

    def error(self, param: str) -> LineError:
        return LineError(self.code, str(self), None, f"switchyard.{param}")


def input_open(batch: Batch, start: int, most: int) -> "PinnedInput":
    """Opens a batch's object at a byte, in the version that was opened first. Raises UnusableObject if it is missing,
    longer than `most`, not granted, or was replaced meanwhile; so does reading it. Raises StoreAway if S3 does not
    respond."""
    place, grant = _granted_place(batch, batch.input_uri, GrantUse.READ)
    etag = f'"{batch.input_etag}"' if batch.input_etag else ""
    with explain_errors(place):
        reader = ObjectReader(grant.region, place.bucket, place.key, start=start, etag=etag)
    size = start + reader.size
    if size > most:
        reader.close()
        raise UnusableObject("file_too_large", f"{place} has {size} bytes; an input may have {most}")
    return PinnedInput(cast("BinaryIO", _ExplainedReader(reader, place)), reader.etag.strip('"')[:128], size)


@dataclass(frozen=True, slots=True)
class PinnedInput:
    """An input, opened at a byte. `etag` is its version in S3; `bytes` is its whole size."""

    file: BinaryIO
    etag: str
    bytes: int


class _ExplainedReader(io.BufferedReader):
    """A stream of an object whose errors are `UnusableObject` or `StoreAway`."""

    def __init__(self, reader: ObjectReader, place: ObjectUri) -> None:
        super().__init__(reader, READ_BYTES)
        self._place = place

    def readline(self, size: int | None = -1, /) -> bytes:
        with explain_errors(self._place):
            return super().readline(size)


def results_copy(batch: Batch, store: FileStore, name: str, filename: str) -> None:
    """Copies a file of the store to the batch's output address. An existing object with the same content is accepted:
    it is from an attempt that was interrupted. Raises UnusableObject if it cannot be written, or another object has
    that name. Raises StoreAway if S3 does not respond."""
    place, grant = _granted_place(batch, batch.output_uri, GrantUse.WRITE)
    target = place.below(filename)
    with store.open(name) as file, explain_errors(target):
        writer = ObjectWriter(grant.region, target.bucket, target.key, kind=JSONL)
        try:
            for piece in pieces(file):
                writer.write(piece)
            writer.commit()
        finally:
            writer.abort()


def _granted_place(batch: Batch, uri: str, use: GrantUse) -> tuple[ObjectUri, TenantGrant]:
    place = parse_object_uri(uri)
    grant = place_grant_for(batch.tenant, place, use)
    if grant is None:
        raise UnusableObject("place_not_allowed", place_refusal(batch.tenant, place, use))
    return place, grant


@contextmanager
def explain_errors(place: ObjectUri) -> Iterator[None]:
    try:
        yield
    except Refused as refused:
        if refused.is_for_now:
            raise StoreAway(f"{place}: {store_error_text(refused)}") from refused
        code = "object_not_found" if refused.code in GONE else "object_not_accessible"
        problem = "there is no such object" if refused.code in GONE else store_error_text(refused)
        raise UnusableObject(code, f"{place}: {problem}") from refused
    except ObjectChanged as changed:
        raise UnusableObject(
            "object_changed", f"{changed}; do not change it until the batch is in progress"
        ) from changed
    except OtherObject as other:
        raise UnusableObject("object_exists", str(other)) from other
    except CallFailed as failed:
        raise StoreAway(f"{place}: {store_error_text(failed)}") from failed
