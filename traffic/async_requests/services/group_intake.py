"""Accepts concurrent requests of one process together. While a thread writes a group, the requests that arrive form the
next one. A lone request waits for nothing. Once groups have several requests, each waits `PAUSE_S` for more, because
its statements cost more than its rows."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from asgiref.sync import sync_to_async
from django.db import connections

from kernel import clock
from traffic.async_requests.planner import AsyncSettings
from traffic.async_requests.selectors import async_request_json
from traffic.async_requests.services.body_groups import answer_load
from traffic.async_requests.services.intake import AcceptedId, AsyncSubmission, async_requests_accept
from traffic.tenants.planner import ApplicationRefused
from traffic.tenants.selectors import Application

GROUP_MOST = 250
PAUSE_S = 0.02

Shown = dict[str, Any]
InThread = Callable[[Callable[[], list[Shown | Exception]]], Awaitable[list[Shown | Exception]]]


@dataclass(slots=True, eq=False)
class _Waiting:
    application: Application
    submission: AsyncSubmission
    shown: "asyncio.Future[Shown]"


class GroupIntake:
    """For one event loop. At most one group is written at a time, in a separate thread unless `in_thread` runs it
    elsewhere."""

    def __init__(self, settings: AsyncSettings | None = None, in_thread: InThread | None = None) -> None:
        self._settings = settings or AsyncSettings()
        self._threads = ThreadPoolExecutor(1, "near-real-time")
        self._in_thread = in_thread or self._in_own_thread
        self._waiting: list[_Waiting] = []
        self._writing: asyncio.Task[None] | None = None

    async def accept(self, application: Application, submission: AsyncSubmission) -> Shown:
        """Accepts a request. Returns it in the application's format. Raises ApplicationRefused, or StoreAway or
        DatabaseError if it cannot be stored now."""
        loop = asyncio.get_running_loop()
        shown: asyncio.Future[Shown] = loop.create_future()
        self._waiting.append(_Waiting(application, submission, shown))
        if self._writing is None:
            self._writing = loop.create_task(self._write_all())
        return await shown

    async def _write_all(self) -> None:
        try:
            while self._waiting:
                group = self._waiting[:GROUP_MOST]
                del self._waiting[:GROUP_MOST]
                await self._write(group)
                if len(group) > 1 and len(self._waiting) < GROUP_MOST:
                    await asyncio.sleep(PAUSE_S)
        finally:
            self._writing = None

    async def _write(self, group: list[_Waiting]) -> None:
        several = [(each.application, each.submission) for each in group]
        results: Sequence[Shown | Exception]
        try:
            results = await self._in_thread(partial(_accept_all, several, clock.now(), self._settings))
        except Exception as error:
            results = [error for _ in group]
        for each, result in zip(group, results, strict=True):
            if each.shown.done():
                continue  # the client is gone
            if isinstance(result, Exception):
                each.shown.set_exception(result)
            else:
                each.shown.set_result(result)

    async def _in_own_thread(self, work: Callable[[], list[Shown | Exception]]) -> list[Shown | Exception]:
        def fresh() -> list[Shown | Exception]:
            try:
                return work()
            finally:
                connections.close_all()  # back to the pool that web's threads share

        return await sync_to_async(fresh, thread_sensitive=False, executor=self._threads)()


def _accept_all(
    several: Sequence[tuple[Application, AsyncSubmission]], now: datetime, settings: AsyncSettings
) -> list[Shown | Exception]:
    """Accepts the requests of each application in one statement. An error of one application is the result of its
    requests only."""
    numbers: dict[Application, list[int]] = {}
    for number, (application, _) in enumerate(several):
        numbers.setdefault(application, []).append(number)
    results: dict[int, Shown | Exception] = {}
    for application, own in numbers.items():
        submissions = [several[number][1] for number in own]
        results |= zip(own, _accept_of(application, submissions, now, settings), strict=True)
    return [results[number] for number in range(len(several))]


def _accept_of(
    application: Application, submissions: Sequence[AsyncSubmission], now: datetime, settings: AsyncSettings
) -> list[Shown | Exception]:
    try:
        accepted = async_requests_accept(application=application, submissions=submissions, now=now, settings=settings)
        return [each if isinstance(each, ApplicationRefused) else _shown(each, settings) for each in accepted]
    except Exception as error:
        return [error for _ in submissions]


def _shown(accepted: AcceptedId, settings: AsyncSettings) -> Shown:
    """The secret of a callback is shown once."""
    request = accepted.request()
    shown = async_request_json(request if accepted.is_new else answer_load(request), settings)
    if accepted.is_new and request.callback_secret:
        shown["callback_secret"] = request.callback_secret
    return shown
