"""Makes what came from outside storable: PostgreSQL takes no NUL, neither in text nor in jsonb, and the tail of a log
that a crash cut short is full of them. Changes nothing else. What callers sent is refused instead (kernel.decoding)."""

import re

from django.db import DataError, IntegrityError

UNSTORABLE_ERRORS = (DataError, IntegrityError, ValueError, OverflowError, RecursionError)
"""What comes of storing a thing that no column takes: a number out of range, a text too long, a nesting too deep."""

_NUL = re.compile(r"\\(?:\\|u0000)")
"""Or a backslash that is escaped itself, so that what follows it is none of these."""


def json_without_nul(encoded: bytes) -> str:
    """The same JSON with U+FFFD, the replacement character, in the place of every NUL."""
    text = encoded.decode()
    return _NUL.sub(_without_nul, text) if "\\u0000" in text else text


def _without_nul(found: re.Match[str]) -> str:
    return "\\ufffd" if found[0].endswith("0") else found[0]
