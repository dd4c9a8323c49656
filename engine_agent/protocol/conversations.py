"""Connections that a server of asyncio accepts, each closed however its conversation ends.

asyncio gives a coroutine to a task of its own, and one that is cancelled before its first step, as when its process
ends, never comes to what would close the connection.
"""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial

Converse = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[None, None, None]]


def conversing(converse: Converse) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]:
    """What `asyncio.start_server` is to call; errors that `converse` raises go to the loop's handler, as ever."""
    tasks: set[asyncio.Task[None]] = set()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(converse(reader, writer))
        tasks.add(task)
        task.add_done_callback(partial(_end, tasks, writer))

    return begin


def _end(tasks: set[asyncio.Task[None]], writer: asyncio.StreamWriter, task: asyncio.Task[None]) -> None:
    tasks.discard(task)
    writer.close()
    if not task.cancelled() and (error := task.exception()) is not None:
        context = {"message": "a conversation failed", "exception": error, "transport": writer.transport}
        task.get_loop().call_exception_handler(context)
