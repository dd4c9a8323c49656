"""Work that must not run inside the transaction of a request, such as hashing a password. Inside one it raises
`RunOutsideTransaction`: audit.middleware rolls back, does the work, and runs the request again with its result."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, cast

from django.db import connection

_R = TypeVar("_R")


class RunOutsideTransaction(BaseException):
    """Rolls the transaction back, so that `work` runs before the request runs again. `except Exception` misses it."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__("this work must not run inside a transaction")
        self.work = work


class RequestWork:
    """Results of work for one request. `turn` counts the random values, such as salts, that a run has used, so that
    each run gets the same ones."""

    def __init__(self) -> None:
        self.results: dict[Any, Callable[[], Any]] = {}
        self.chances: list[Any] = []
        self.turn = 0

    def chance(self, make: Callable[[], Any]) -> Any:
        """Returns the value that `make` returned at this turn of the first run."""
        if self.turn == len(self.chances):
            self.chances.append(make())
        self.turn += 1
        return self.chances[self.turn - 1]

    def result(self, key: Any, work: Callable[[], Any]) -> Any:
        """Returns or raises what `work` does. Raises RunOutsideTransaction if `work` has not run yet."""
        if key not in self.results:
            raise RunOutsideTransaction(lambda: self.results.__setitem__(key, _run_for_outcome(work)))
        return self.results[key]()


_current: ContextVar[RequestWork | None] = ContextVar("switchyard_outside_work", default=None)


def request_work() -> RequestWork | None:
    """Returns the current request's work, or None outside its transaction or if it cannot run again."""
    return _current.get() if connection.in_atomic_block else None


def run_outside_transaction(key: Hashable, work: Callable[[], _R]) -> _R:
    """Returns or raises what `work` does. Inside the transaction of a request that can run again, it runs before it."""
    request = request_work()
    return cast(_R, request.result(key, work)) if request else work()


@contextmanager
def begin_run(work: RequestWork) -> Iterator[None]:
    work.turn = 0
    token = _current.set(work)
    try:
        yield
    finally:
        _current.reset(token)


def is_inside_transaction() -> bool:
    """Whether a transaction is open, other than the one that a test rolls back."""
    return any(not getattr(block, "_from_testcase", False) for block in connection.atomic_blocks)


def refuse_inside_transaction(what: str) -> None:
    """Guards calls to other systems, such as a cloud: a transaction would hold its locks and its connection while it
    waits. Raises RuntimeError if a transaction is open."""
    if is_inside_transaction():
        raise RuntimeError(f"{what} inside of a transaction: make it before or after")


def _run_for_outcome(work: Callable[[], Any]) -> Callable[[], Any]:
    try:
        result = work()
    except Exception as error:
        return _raising(error)
    return lambda: result


def _raising(error: Exception) -> Callable[[], Any]:
    def again() -> Any:
        raise error

    return again
