"""What an ingress says of a request's text: hashes of its beginnings, and how much of it the chosen cell is to have.
Pure; `engine_agent/ingress/prompt_prefixes.lua` makes them."""

import re
from dataclasses import dataclass

from engine_agent.protocol.proxy_messages import MAX_REQUEST_PREFIXES, PREFIX_DIGITS

PREFIXES_HEADER = b"x-switchyard-cache-prefixes"
"""`BYTES:END,END,…:HASHES`."""
MATCHED_HEADER = b"x-switchyard-cache-matched"
"""How many bytes of that text the ingress found in this cell's index."""
_PREFIXES = re.compile(rb"([0-9]{1,9}):([0-9,]{1,800}):([0-9a-f]{12,960})")


@dataclass(frozen=True, slots=True)
class RequestPrefixes:
    """`ends` are the lengths of a text's beginnings in bytes, in order; `prefixes` are their hashes, each of a
    beginning and of all by which its blocks differ from those of equal text: adapter, tenant, salt. `text_bytes`: of
    the whole."""

    prefixes: tuple[int, ...]
    ends: tuple[int, ...]
    text_bytes: int


def read_prefixes(value: bytes) -> RequestPrefixes | None:
    """The header's value; None: nothing that can be read."""
    found = _PREFIXES.fullmatch(value)
    if found is None or len(found[3]) % PREFIX_DIGITS:
        return None
    ends = tuple(int(end) for end in found[2].split(b",") if end)
    hashes = tuple(int(found[3][at : at + PREFIX_DIGITS], 16) for at in range(0, len(found[3]), PREFIX_DIGITS))
    text_bytes = int(found[1])
    if len(ends) != len(hashes) or len(ends) > MAX_REQUEST_PREFIXES or list(ends) != sorted(set(ends)):
        return None
    return RequestPrefixes(hashes, ends, text_bytes) if ends[-1] <= text_bytes else None
