"""Makes reported texts storable: PostgreSQL stores no NUL in text or jsonb, and the tail of a log after a crash is full
of them. Changes nothing else. Input of callers is refused instead (kernel.decoding)."""

import re

from django.db import DataError, IntegrityError

UNSTORABLE_ERRORS = (DataError, IntegrityError, ValueError, OverflowError, RecursionError)
"""Errors of values that no column can store: a number out of range, a text too long, a nesting too deep."""

_NUL = re.compile(r"\\(?:\\|u0000)")
"""Or an escaped backslash, after which the text is not an escape."""


def json_without_nul(encoded: bytes) -> str:
    """Returns the JSON with every NUL replaced by U+FFFD."""
    text = encoded.decode()
    return _NUL.sub(_without_nul, text) if "\\u0000" in text else text


def _without_nul(found: re.Match[str]) -> str:
    return "\\ufffd" if found[0].endswith("0") else found[0]
