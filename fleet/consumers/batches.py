"""Answers many who wait with one call, such as one query. While a call is under way others gather for the next one, so
a crowd costs a few calls and somebody alone waits for none."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

BATCH = 500

A = TypeVar("A")
R = TypeVar("R")


class Batches(Generic[A, R]):
    """`call` gets up to `BATCH` questions, oldest first, and returns an answer to each, in their order. An answer that
    is an exception is raised where it was asked for; one that `call` raises is that of all."""

    def __init__(self, call: Callable[[list[A]], Awaitable[Sequence[R | Exception]]]) -> None:
        self._call = call
        self._waiting: deque[tuple[A, asyncio.Future[R]]] = deque()
        self._answering: asyncio.Task[None] | None = None

    async def ask(self, question: A) -> R:
        """The answer to one question."""
        answer: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((question, answer))
        if self._answering is None or self._answering.done():
            self._answering = asyncio.create_task(self._answer())
        return await answer

    async def _answer(self) -> None:
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
            try:
                found = await self._call([question for question, _ in batch])
            except Exception as error:
                found = [error] * len(batch)
            for (_, future), answer in zip(batch, found, strict=True):
                if future.done():  # who asked is gone
                    continue
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)
