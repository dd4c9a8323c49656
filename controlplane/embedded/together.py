"""Runs several coroutines at once and reports the first failure as it is, not wrapped in a group."""

import asyncio
from collections.abc import Coroutine
from typing import Any


async def together(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run all to their end; when one fails, cancel the others and raise its error."""
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(coroutine)
    except BaseExceptionGroup as failures:
        raise _first(failures) from None


def _first(failure: BaseException) -> BaseException:
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    return failure
