"""Lets watchers wait in front of Django, where a waiting request would occupy a thread and a database connection. A
request with a revision in `since` goes to Django; if nothing has changed, its response is held back, and the watcher
costs only a coroutine. After a change of that kind Django handles the request again, with permissions. One connection
per process polls for changes, only while there are watchers. It never decides what changed or who may see it; the view
does."""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from controlplane.api.change_feed import CannotWait, ChangeFeed
from kernel.rest.throttling import WATCH_RETRY
from kernel.rest.view_sets import UNCHANGED

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

PREFIX = "/api/v1/"
_HEADER = UNCHANGED.lower().encode()
AT_ONCE = 8
"""Watchers of one process that may call Django concurrently, so that one change does not starve other requests."""

OF_ONE_USER = 200
"""Waiting requests per user and process; a browser or command line has a handful, a program some for each kind. The
total limit is 25 such users (controlplane.api.change_feed)."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class BufferedResponse:
    """Django's response, not yet sent."""

    messages: list[Message] = field(default_factory=list)

    async def take(self, message: Message) -> None:
        self.messages.append(message)

    @property
    def would_wait(self) -> tuple[str, float, str] | None:
        """The watched kind, the seconds to wait, and the user; None if the response has changes."""
        for name, value in self.messages[0].get("headers", ()) if self.messages else ():
            if name.lower() == _HEADER:
                user, kind, seconds = value.decode().split(" ")
                return kind, float(seconds), user
        return None

    async def give(self, send: Send) -> None:
        for message in self.messages:
            await send(message)


class WatchMiddleware:
    """ASGI middleware: passes everything through except watches, which may be repeated."""

    def __init__(
        self, application: Application, feed: ChangeFeed, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._application = application
        self._feed = feed
        self._monotonic = monotonic
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._waiting: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not _is_watch(scope):
            await self._application(scope, receive, send)
            return
        client = _Client(receive)
        try:
            answer = await self._respond(scope, client)
        finally:
            await client.forget()
        if answer is not None:
            await answer.give(send)

    async def _respond(self, scope: Scope, client: "_Client") -> BufferedResponse | None:
        """Django's response after a change or the timeout; None if the client has disconnected."""
        began = self._monotonic()
        try:
            async with self._feed.watcher() as watcher:
                answer = await self._request(scope, client)
                while (waits := answer.would_wait) is not None:
                    kind, patience_s, user = waits
                    left_s = patience_s - (self._monotonic() - began)
                    if left_s <= 0 or not await self._wait_as(user, watcher.changed(kind), client, left_s):
                        return None if client.is_gone else answer
                    answer = await self._request({**scope, WATCH_RETRY: True}, client)
        except CannotWait as refusal:
            log.warning("%s", refusal)
            answer = await self._request(scope, client)
        return answer

    async def _request(self, scope: Scope, client: "_Client") -> BufferedResponse:
        answer = BufferedResponse()
        async with self._turns:
            await self._application(dict(scope), client.receive_again(), answer.take)
        return answer

    async def _wait_as(self, user: str, change: Coroutine[Any, Any, None], client: "_Client", left_s: float) -> bool:
        """Waits like `_wait`, unless this user already has the maximum of waiting requests."""
        if self._waiting[user] >= OF_ONE_USER:
            change.close()
            return False
        self._waiting[user] += 1
        try:
            return await self._wait(change, client, left_s)
        finally:
            self._waiting[user] -= 1
            self._waiting += Counter()  # forgets users without waiting requests

    @staticmethod
    async def _wait(change: Awaitable[None], client: "_Client", left_s: float) -> bool:
        """Whether something changed before the timeout or a disconnect."""
        waiting = asyncio.ensure_future(change)
        try:
            await asyncio.wait({waiting, client.leaving}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            return waiting.done() and not client.is_gone
        finally:
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting


class _Client:
    """The client of a request without a body: the request is replayed several times, the disconnect awaited once."""

    def __init__(self, receive: Receive) -> None:
        self.leaving = asyncio.ensure_future(self._disconnected(receive))

    @property
    def is_gone(self) -> bool:
        return self.leaving.done()

    def receive_again(self) -> Receive:
        """The ASGI messages of a first request."""
        empty = iter([{"type": "http.request", "body": b"", "more_body": False}])

        async def receive() -> Message:
            if (message := next(empty, None)) is not None:
                return dict(message)
            await asyncio.shield(self.leaving)
            return {"type": "http.disconnect"}

        return receive

    async def forget(self) -> None:
        self.leaving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.leaving

    @staticmethod
    async def _disconnected(receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass


def _is_watch(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] != "GET" or not scope["path"].startswith(PREFIX):
        return False
    return any(part.startswith(b"since=r") for part in scope.get("query_string", b"").split(b"&"))
