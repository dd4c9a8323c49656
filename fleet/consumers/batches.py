"""Answers many who wait with one call, such as one query. While a call is under way others gather for the next one, so
a crowd costs a few calls and somebody alone waits for none."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic
from typing import Generic, TypeVar

BATCH = 500

A = TypeVar("A")
R = TypeVar("R")


class Batches(Generic[A, R]):
    """`call` gets up to `BATCH` questions, oldest first, and returns an answer to each, in their order. An answer that
    is an exception is raised where it was asked for; one that `call` raises is that of all."""

    def __init__(self, call: Callable[[list[A]], Awaitable[Sequence[R | Exception]]]) -> None:
        self._call = call
        self._waiting: deque[tuple[A, asyncio.Future[R], float]] = deque()
        self._answering: asyncio.Task[None] | None = None
        self._oldest_asked_s: float | None = None

    @property
    def unanswered_s(self) -> float:
        """How long the oldest question has waited for its answer; 0 if none waits."""
        return 0.0 if self._oldest_asked_s is None else monotonic() - self._oldest_asked_s

    async def ask(self, question: A) -> R:
        answer: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((question, answer, monotonic()))
        if self._answering is None or self._answering.done():
            self._answering = asyncio.create_task(self._answer())
        return await answer

    async def _answer(self) -> None:
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
            self._oldest_asked_s = batch[0][2]
            try:
                found = await self._call([question for question, *_ in batch])
            except Exception as error:
                found = [error] * len(batch)
            self._oldest_asked_s = self._waiting[0][2] if self._waiting else None
            for (_, future, _), answer in zip(batch, found, strict=True):
                if future.done():  # who asked is gone
                    continue
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)
