"""The client for code without an event loop: the other one, in a thread."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from typing import Any, Self, TypeVar, Unpack

from switchyard_client.answers import Answer, Body, Event, Pending
from switchyard_client.async_client import AsyncSwitchyard
from switchyard_client.options import (
    CallOptions,
    ChatOptions,
    ClientOptions,
    EmbeddingsOptions,
    Inputs,
    Messages,
    SubmitOptions,
)

T = TypeVar("T")


class Switchyard:
    """The same for code without an event loop, with the options of `AsyncSwitchyard`. Calls run on a loop in a thread
    of this client, so threads may share it. After a fork the child gets its own thread and connections."""

    def __init__(self, regions: str | Sequence[str], **options: Unpack[ClientOptions]) -> None:
        self._regions, self._options = regions, options
        self._lock = threading.Lock()
        self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connections and the thread."""
        if self._pid == os.getpid() and not self._loop.is_closed():
            self._run(self._client.aclose())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def post(self, path: str, body: Body, **options: Unpack[CallOptions]) -> Answer:
        return self._run(self._ours().post(path, body, **options))

    def stream(self, path: str, body: Body, **options: Unpack[CallOptions]) -> AbstractContextManager[Iterator[Event]]:
        return self._reading(self._ours().stream(path, body, **options))

    def get(self, path: str, **options: Unpack[CallOptions]) -> Answer:
        return self._run(self._ours().get(path, **options))

    def chat(self, model: str, messages: Messages, **options: Unpack[ChatOptions]) -> Answer:
        return self._run(self._ours().chat(model, messages, **options))

    def stream_chat(
        self, model: str, messages: Messages, **options: Unpack[ChatOptions]
    ) -> AbstractContextManager[Iterator[Event]]:
        return self._reading(self._ours().stream_chat(model, messages, **options))

    def embeddings(self, model: str, inputs: Inputs, **options: Unpack[EmbeddingsOptions]) -> Answer:
        return self._run(self._ours().embeddings(model, inputs, **options))

    def models(self) -> list[dict[str, Any]]:
        return self._run(self._ours().models())

    def submit(self, path: str, body: Body, **options: Unpack[SubmitOptions]) -> Pending:
        return self._run(self._ours().submit(path, body, **options))

    def retrieve(self, request: Pending | str) -> Pending:
        return self._run(self._ours().retrieve(request))

    def cancel(self, request: Pending | str) -> Pending:
        return self._run(self._ours().cancel(request))

    def wait(self, request: Pending | str, **options: Any) -> Pending:
        return self._run(self._ours().wait(request, **options))

    @contextmanager
    def _reading(self, opening: AbstractAsyncContextManager[AsyncIterator[Event]]) -> Iterator[Iterator[Event]]:
        """One task opens, reads and closes a stream, because its deadline belongs to that task."""
        passed: asyncio.Queue[Event | Exception | None] = asyncio.Queue(maxsize=64)

        async def read() -> None:
            try:
                async with opening as events:
                    async for event in events:
                        await passed.put(event)
                await passed.put(None)
            except Exception as error:  # it is raised where events are read
                await passed.put(error)

        def taken() -> Iterator[Event]:
            while (event := self._run(passed.get())) is not None:
                if isinstance(event, Exception):
                    raise event
                yield event

        reading = asyncio.run_coroutine_threadsafe(read(), self._loop)
        try:
            yield taken()
        finally:
            reading.cancel()

    def _ours(self) -> AsyncSwitchyard:
        with self._lock:
            if self._pid != os.getpid():
                self._start()
        return self._client

    def _start(self) -> None:
        self._pid, self._loop, self._client = (
            os.getpid(),
            asyncio.new_event_loop(),
            AsyncSwitchyard(self._regions, **self._options),
        )
        self._thread = threading.Thread(target=self._loop.run_forever, name="switchyard-client", daemon=True)
        self._thread.start()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return running.result()
        except BaseException:
            running.cancel()  # Ctrl-C also ends the request
            raise
