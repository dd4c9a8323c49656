"""Asks a blocking question again and again, off the event loop, until the answer is yes or the time is over."""

import asyncio
from collections.abc import Callable

from controlplane.embedded.errors import CannotStart


async def until(is_so: Callable[[], bool], *, within_s: float, every_s: float, otherwise: str) -> None:
    """Wait until `is_so()`.

    Raises:
        CannotStart: it was not within `within_s`; says `otherwise`.
    """
    try:
        async with asyncio.timeout(within_s):
            while not await asyncio.to_thread(is_so):  # noqa: ASYNC110 - the state lies in another process
                await asyncio.sleep(every_s)
    except TimeoutError:
        raise CannotStart(otherwise) from None
