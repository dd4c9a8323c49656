"""Work that must not run inside the transaction of a request, such as hashing a password: whoever is asked for it
inside one raises `WorkOutside`. The transaction is taken back, the work done without one, and the request run again
(audit.middleware); then its result is there.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, cast

from django.db import connection

_R = TypeVar("_R")


class WorkOutside(BaseException):
    """Takes the transaction back; `work` is to be done before the request is run again. Nobody on the way may take it
    for a fault."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__("this work must not run inside a transaction")
        self.work = work


class OutsideWork:
    """What was worked out for one request. `turn` counts what a run has asked for that differs by chance, such as
    salts, so that each run meets the same."""

    def __init__(self) -> None:
        self.results: dict[Any, Callable[[], Any]] = {}
        self.chances: list[Any] = []
        self.turn = 0

    def chance(self, make: Callable[[], Any]) -> Any:
        """What `make` gave at this turn of the first run."""
        if self.turn == len(self.chances):
            self.chances.append(make())
        self.turn += 1
        return self.chances[self.turn - 1]

    def result(self, key: Any, work: Callable[[], Any]) -> Any:
        """What `work` returns or raises.

        Raises:
            WorkOutside: it was not worked out yet.
        """
        if key not in self.results:
            raise WorkOutside(lambda: self.results.__setitem__(key, _outcome(work)))
        return self.results[key]()


_current: ContextVar[OutsideWork | None] = ContextVar("switchyard_outside_work", default=None)


def outside_work() -> OutsideWork | None:
    """That of the request that runs now, if it is inside its transaction and can be run again."""
    return _current.get() if connection.in_atomic_block else None


def done_outside(key: Hashable, work: Callable[[], _R]) -> _R:
    """What `work` returns or raises, done before the request's transaction if there is one that can be run again."""
    request = outside_work()
    return cast(_R, request.result(key, work)) if request else work()


@contextmanager
def one_run(work: OutsideWork) -> Iterator[None]:
    work.turn = 0
    token = _current.set(work)
    try:
        yield
    finally:
        _current.reset(token)


def refuse_inside_transaction(what: str) -> None:
    """For what waits for somebody else, such as a call to a cloud: a transaction would hold its locks and its
    connection for as long. The one that a test is taken back by does not count.

    Raises:
        RuntimeError: a transaction is open.
    """
    if any(not getattr(block, "_from_testcase", False) for block in connection.atomic_blocks):
        raise RuntimeError(f"{what} inside of a transaction: make it before or after")


def _outcome(work: Callable[[], Any]) -> Callable[[], Any]:
    try:
        result = work()
    except Exception as error:
        return _raising(error)
    return lambda: result


def _raising(error: Exception) -> Callable[[], Any]:
    def again() -> Any:
        raise error

    return again
