"""Hashes passwords, a few at a time. A hash takes a third of a second of a core and anybody may ask for one, so each
takes one of few slots; whoever finds none is refused at once and waits for nothing. No pooled connection waits for a
hash either: outside a transaction the thread gives its own back first, and inside that of a request it is not made
(kernel.outside_transaction).

Every password passes here (settings.PASSWORD_HASHERS), whoever checks or sets it.
"""

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
"""Of this process. Two hashes at once keep two cores busy; more would only make each of them slower."""
KNOWN_SLOTS = 1
"""Beyond those, for browsers that logged in before and for users who are logged in."""
RETRY_AFTER_S = 2.0
"""A hash is over in well below a second, also on a busy machine."""

_strangers = threading.BoundedSemaphore(STRANGERS_SLOTS)
_known = threading.BoundedSemaphore(KNOWN_SLOTS)
_held: ContextVar[bool] = ContextVar("switchyard_hash_slot", default=False)


@contextmanager
def hash_slot(*, known: bool = False) -> Iterator[None]:
    """Hold a slot; one inside another is the same. `known`: may take from the reserve.

    Raises:
        Busy: all are taken.
    """
    if _held.get():
        yield
        return
    slot = next(
        (each for each in ((_strangers, _known) if known else (_strangers,)) if each.acquire(blocking=False)), None
    )
    if slot is None:
        raise Busy("too many passwords are being checked at this moment; try again in a few seconds", RETRY_AFTER_S)
    token = _held.set(True)
    try:
        yield
    finally:
        _held.reset(token)
        slot.release()


class SlottedPasswordHasher(PBKDF2PasswordHasher):
    """Django's own hasher and format, in a slot."""

    def encode(self, password: str, salt: str, iterations: int | None = None) -> str:
        """The hash as it is stored.

        Raises:
            Busy: no slot is free.
        """
        request = request_work()
        if request is None:
            return self._hash(password, salt, iterations)
        # A view that comes this far let its user in.
        work = partial(self._hash, password, salt, iterations, known=True)
        return str(request.result((password, salt, iterations), work))

    def salt(self) -> str:
        """A new one; the same in each run of a request."""
        request = request_work()
        return str(request.chance(super().salt)) if request is not None else super().salt()

    def _hash(self, password: str, salt: str, iterations: int | None, known: bool = False) -> str:
        with hash_slot(known=known):
            if not connection.in_atomic_block:
                connection.close()  # back to the pool; the next query takes another
            return super().encode(password, salt, iterations)
