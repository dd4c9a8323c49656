"""Accepts concurrent requests of one process together. While one thread writes a group, the requests of the others form
the next group, so a lone request waits for nothing and many share their statements."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from threading import Event, Lock

from django.db import connection

from traffic.async_requests.models import AsyncRequest
from traffic.async_requests.planner import AsyncSettings
from traffic.async_requests.services.intake import (
    AcceptedId,
    AsyncSubmission,
    async_request_accept,
    async_requests_accept,
)
from traffic.tenants.selectors import Application

GROUP_MOST = 100


@dataclass(slots=True, eq=False)
class _Waiting:
    """One thread's request. `result` is set by the thread that writes its group; None when it is woken to write."""

    application: Application
    submission: AsyncSubmission
    result: AcceptedId | BaseException | None = None
    woken: Event = field(default_factory=Event)


class GroupIntake:
    """At most one thread writes at a time; it hands over to a waiting one."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._waiting: list[_Waiting] = []
        self._is_writing = False

    def accept(
        self, application: Application, submission: AsyncSubmission, *, now: datetime, settings: AsyncSettings
    ) -> tuple[AsyncRequest, bool]:
        """As `async_request_accept`. Requests inside of a transaction are accepted alone."""
        if connection.in_atomic_block:
            return async_request_accept(application=application, submission=submission, now=now, settings=settings)
        mine = _Waiting(application, submission)
        with self._lock:
            self._waiting.append(mine)
            writes, self._is_writing = not self._is_writing, True
        if not writes:
            mine.woken.wait()
        if mine.result is None:
            self._write(mine, now, settings)
        if isinstance(mine.result, AcceptedId):
            return mine.result.request(), mine.result.is_new
        raise mine.result or RuntimeError("the thread that wrote the group was killed")

    def _write(self, mine: _Waiting, now: datetime, settings: AsyncSettings) -> None:
        with self._lock:
            self._waiting.remove(mine)
            group = [mine, *self._waiting[: GROUP_MOST - 1]]
            del self._waiting[: GROUP_MOST - 1]
        try:
            for application in {each.application for each in group}:
                _accept([each for each in group if each.application == application], now, settings)
        finally:
            with self._lock:
                following = self._waiting[0] if self._waiting else None
                self._is_writing = following is not None
            for each in group[1:]:
                each.woken.set()
            if following is not None:
                following.woken.set()


def _accept(group: list[_Waiting], now: datetime, settings: AsyncSettings) -> None:
    results: Sequence[AcceptedId | BaseException]
    try:
        results = async_requests_accept(
            application=group[0].application,
            submissions=[each.submission for each in group],
            now=now,
            settings=settings,
        )
    except Exception as error:
        results = [error for _ in group]
    for each, result in zip(group, results, strict=True):
        each.result = result


INTAKE = GroupIntake()
