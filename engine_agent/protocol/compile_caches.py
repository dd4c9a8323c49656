"""Compile caches between agents and the control plane, over HTTP at `/agents/caches/KEY`. An agent names the cache of
its own start; the control plane adds model version, instance type and rank, which it knows itself.

- `GET`: its facts (`CacheFacts`) as JSON, or 404. `GET /agents/caches/KEY/archive`: its archive, which other nodes may
  have as well. Its digest comes from the control plane alone, and only once it has verified and stored the archive.
- `PUT` of the parts, in order: 200 with `next`, the byte that must follow. Without a body it only asks; with
  `Content-Range: bytes */TOTAL` it then ends the upload, and `next` is TOTAL once the cache is stored.

`PUT` answers 403 if the node is in no cell or caches are off, 409 if there is one already, 413 if it is too large, and
425 while the cell does not serve yet."""

import re
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta, Struct

PART_BYTES = 4 * 1024 * 1024
"""The longest body that the control plane takes from an agent."""
DIGEST_HEADER = "X-Content-SHA256"
UNPACKED_HEADER = "X-Unpacked-Bytes"
ARCHIVE_NAME = "archive"
MOST_CACHE_BYTES = 64 * 1024**3
_RANGE = re.compile(r"bytes ([0-9]{1,12})-([0-9]{1,12})/([0-9]{1,12})")
_END = re.compile(r"bytes \*/([0-9]{1,12})")
_NUMBER = re.compile(r"[0-9]{1,12}")


class CacheFacts(Struct, frozen=True):
    """A stored cache. `digest`: SHA-256 of its archive, in hexadecimal."""

    digest: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    packed_bytes: Annotated[int, Meta(gt=0, le=MOST_CACHE_BYTES)]
    unpacked_bytes: Annotated[int, Meta(gt=0, le=MOST_CACHE_BYTES)]


@dataclass(frozen=True, slots=True)
class PartRange:
    """Bytes `first` to `last`, inclusive, of `total`."""

    first: int
    last: int
    total: int


def parse_range(text: str) -> PartRange | None:
    """Parses a `Content-Range`; None if it is not the range of a part."""
    found = _RANGE.fullmatch(text)
    if found is None:
        return None
    part = PartRange(*map(int, found.groups()))
    is_one = part.first <= part.last < part.total <= MOST_CACHE_BYTES
    return part if is_one and part.last - part.first < PART_BYTES else None


def parse_end(text: str) -> int | None:
    """Parses the `Content-Range` that ends an upload: the bytes of the archive; None if it is not one."""
    total = int(found[1]) if (found := _END.fullmatch(text)) else 0
    return total if 0 < total <= MOST_CACHE_BYTES else None


def parse_unpacked(text: str | None) -> int | None:
    """Parses the size of an unpacked cache; None if it is not one."""
    return int(text) if text and _NUMBER.fullmatch(text) and 0 < int(text) <= MOST_CACHE_BYTES else None
