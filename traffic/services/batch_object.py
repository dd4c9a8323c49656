"""Input and results of a batch as objects in a tenant's own bucket. What may be used is asked again each time; an input
is read whole, of one content, before anything of it is believed; a result is written once and replaces nothing."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO, cast

from fleet.providers.aws.calls import CallFailed, Refused
from fleet.providers.aws.object_stream import ObjectChanged, ObjectReader, ObjectWriter
from fleet.providers.aws.objects import OtherObject
from traffic.models import Batch, TenantGrant
from traffic.models.tenant_access import GrantUse
from traffic.planning.batch import LineError
from traffic.planning.object_uri import ObjectUri, parse_object_uri
from traffic.selectors.tenant_grant import place_grant_for, place_refusal
from traffic.services.file_bucket import GONE, said_of, spooled
from traffic.services.file_store import READ_BYTES, FileStore, StoreAway, pieces

JSONL = "application/jsonl"


class UnusableObject(Exception):
    """An input that cannot be read, or results that cannot be written, and it is not only for now."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code

    def error(self, param: str) -> LineError:
        return LineError(self.code, str(self), None, f"switchyard.{param}")


@dataclass(frozen=True, slots=True)
class PinnedInput:
    """The content of an input, on this host's disk, and its name in S3."""

    file: BinaryIO
    etag: str


def input_fetch(batch: Batch, most: int) -> PinnedInput:
    """The whole of a batch's object of at most so many bytes.

    Raises:
        UnusableObject: it is not there, too long, not allowed, or was replaced meanwhile.
        StoreAway: S3 does not answer now, or there is no room for it.
    """
    place, grant = _granted(batch, batch.input_uri, GrantUse.READ)
    with _explained(place), ObjectReader(grant.region, place.bucket, place.key) as reader:
        if reader.size > most:
            raise UnusableObject("file_too_large", f"{place} has {reader.size} bytes; an input may have {most}")
        copy = spooled(cast("BinaryIO", io.BufferedReader(reader, READ_BYTES)))
        return PinnedInput(copy, reader.etag.strip('"')[:128])


def results_copy(batch: Batch, store: FileStore, name: str, filename: str) -> None:
    """Write a file of the store as an object to where the batch's results go. One that is there already with the same
    content is as good: somebody who died wrote it.

    Raises:
        UnusableObject: it cannot be written there, or another object has that name.
        StoreAway: S3 does not answer now.
    """
    place, grant = _granted(batch, batch.output_uri, GrantUse.WRITE)
    target = place.below(filename)
    with store.open(name) as file, _explained(target):
        writer = ObjectWriter(grant.region, target.bucket, target.key, kind=JSONL)
        try:
            for piece in pieces(file):
                writer.write(piece)
            writer.commit()
        finally:
            writer.abort()


def _granted(batch: Batch, uri: str, use: GrantUse) -> tuple[ObjectUri, TenantGrant]:
    place = parse_object_uri(uri)
    grant = place_grant_for(batch.tenant, place, use)
    if grant is None:
        raise UnusableObject("place_not_allowed", place_refusal(batch.tenant, place, use))
    return place, grant


@contextmanager
def _explained(place: ObjectUri) -> Iterator[None]:
    try:
        yield
    except Refused as refused:
        if refused.is_for_now:
            raise StoreAway(f"{place}: {said_of(refused)}") from refused
        code = "object_not_found" if refused.code in GONE else "object_not_accessible"
        said = "there is no such object" if refused.code in GONE else said_of(refused)
        raise UnusableObject(code, f"{place}: {said}") from refused
    except ObjectChanged as changed:
        raise UnusableObject("object_changed", f"{changed}: leave it until the batch is in progress") from changed
    except OtherObject as other:
        raise UnusableObject("object_exists", str(other)) from other
    except CallFailed as failed:
        raise StoreAway(f"{place}: {said_of(failed)}") from failed
