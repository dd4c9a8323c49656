"""Makes what came from outside storable: PostgreSQL takes no NUL, neither in text nor in jsonb, and the tail of a log
that a crash cut short is full of them. Changes nothing else."""

import re

_NUL = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")


def storable_json(encoded: bytes) -> str:
    """The same JSON with U+FFFD, the replacement character, in the place of every NUL."""
    text = encoded.decode()
    return _NUL.sub(r"\1\\ufffd", text) if "\\u0000" in text else text
