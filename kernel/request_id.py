"""The number under which one request is found in every log: taken from `X-Request-Id` or made, carried on to tasks,
agents and audit records. Values live in the context of the code that runs; nothing here is stored."""

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

HEADER = "X-Request-Id"
MESSAGE_HEADER = "switchyard_request_id"
"""Of Celery's messages."""
_FIT = re.compile(r"[A-Za-z0-9._:-]{1,64}")

_request_id: ContextVar[str] = ContextVar("switchyard_request_id", default="")


def request_id() -> str:
    """That of the request, task or command that runs now; "" outside all of them."""
    return _request_id.get()


def usable_request_id(given: str) -> str:
    """What a caller sent, if it is fit to be logged; else a new one of 16 random bytes in hexadecimal."""
    return given if _FIT.fullmatch(given) else secrets.token_hex(16)


@contextmanager
def bind_request_id(given: str = "") -> Iterator[str]:
    """Give what runs inside a number: the given one if it is fit, else a new one."""
    chosen = usable_request_id(given)
    token = _request_id.set(chosen)
    try:
        yield chosen
    finally:
        _request_id.reset(token)
