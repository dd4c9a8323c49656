"""An exception while one request is handled becomes that request's answer. It never reaches the event loop, which would
close the connection without a byte, nor another request, nor the loops of the proxy."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar


class Crashing(Protocol):
    def crashed(self, error: Exception) -> None:
        """End the request with an answer that says so. Called with whatever one of its methods raised."""


H = TypeVar("H", bound=Crashing)
P = ParamSpec("P")


def contained(method: Callable[Concatenate[H, P], None]) -> Callable[Concatenate[H, P], None]:
    """For each method that the connections, the cell and the sweep call on a handler."""

    @wraps(method)
    def called(self: H, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            report(f"{type(self).__name__}.{method.__name__}", error)
            self.crashed(error)

    return called


def contained_task(
    method: Callable[Concatenate[H, P], Coroutine[Any, Any, None]],
) -> Callable[Concatenate[H, P], Coroutine[Any, Any, None]]:
    """For each method that a handler runs as a task."""

    @wraps(method)
    async def called(self: H, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            await method(self, *args, **kwargs)
        except Exception as error:
            report(f"{type(self).__name__}.{method.__name__}", error)
            self.crashed(error)

    return called


@contextmanager
def reported(place: str) -> Iterator[None]:
    """For work that must not cost the answer: an exception ends the work, and is reported."""
    try:
        yield
    except Exception as error:
        report(place, error)


def report(place: str, error: Exception) -> None:
    """Hand it to the loop's exception handler, which logs it (`engine_agent.cell_proxy.log`)."""
    asyncio.get_running_loop().call_exception_handler({"message": place, "exception": error})
