"""Hashes passwords, a few at a time (settings.PASSWORD_HASHERS).

A hash takes a third of a CPU second and unauthenticated requests can cause one, so each needs one of few slots; without
a free slot the request is refused immediately. No pooled connection waits for a hash: outside a transaction the thread
first returns its connection, and inside one it raises `RunOutsideTransaction` (kernel.outside_transaction)."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

from django.contrib.auth.hashers import PBKDF2PasswordHasher
from django.db import connection

from kernel.outside_transaction import request_work
from kernel.refusals import Busy

STRANGERS_SLOTS = 2
"""Slots of this process. Two concurrent hashes keep two cores busy; more would only slow each of them down."""
KNOWN_SLOTS = 1
"""Additional slots for known browsers and for users who are logged in."""
RETRY_AFTER_S = 2.0
"""A hash takes well below a second, also on a busy machine."""

_strangers = threading.BoundedSemaphore(STRANGERS_SLOTS)
_known = threading.BoundedSemaphore(KNOWN_SLOTS)
_held: ContextVar[bool] = ContextVar("switchyard_hash_slot", default=False)


@contextmanager
def hash_slot(*, known: bool = False) -> Iterator[None]:
    """Hold a slot; a nested call uses the same one. With `known` it may use the reserve. Raises Busy if no slot is
    free."""
    if _held.get():
        yield
        return
    slot = next(
        (each for each in ((_strangers, _known) if known else (_strangers,)) if each.acquire(blocking=False)), None
    )
    if slot is None:
        raise Busy("too many passwords are being checked now; try again in a few seconds", RETRY_AFTER_S)
    token = _held.set(True)
    try:
        yield
    finally:
        _held.reset(token)
        slot.release()


class SlottedPasswordHasher(PBKDF2PasswordHasher):
    """Django's own hasher and format, in a slot."""

    def encode(self, password: str, salt: str, iterations: int | None = None) -> str:
        """The hash as it is stored. Raises Busy if no slot is free."""
        request = request_work()
        if request is None:
            return self._hash(password, salt, iterations)
        # A view that reaches this point has authenticated its user.
        work = partial(self._hash, password, salt, iterations, known=True)
        return str(request.result((password, salt, iterations), work))

    def salt(self) -> str:
        """Returns a new salt, the same one in each run of a request."""
        request = request_work()
        return str(request.chance(super().salt)) if request is not None else super().salt()

    def _hash(self, password: str, salt: str, iterations: int | None, known: bool = False) -> str:
        with hash_slot(known=known):
            if not connection.in_atomic_block:
                connection.close()  # return it to the pool; the next query takes another one
            return super().encode(password, salt, iterations)
