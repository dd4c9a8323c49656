"""Requests of one web process that arrive at the same time."""

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import OperationalError

from tests.traffic.rows import BODY, serving_fleet
from traffic.async_requests.models import AsyncRequest
from traffic.async_requests.planner import AsyncSettings
from traffic.async_requests.services import group_intake
from traffic.async_requests.services.group_intake import GroupIntake
from traffic.async_requests.services.intake import AsyncSubmission, async_requests_accept
from traffic.tenants.planner import ApplicationRefused
from traffic.tenants.selectors import Application

pytestmark = [pytest.mark.processes, pytest.mark.django_db(transaction=True), pytest.mark.asyncio]
SETTINGS = AsyncSettings(max_open_per_tenant=6)
REQUESTS = 8


async def in_database(work: Any) -> Any:
    return await sync_to_async(work, thread_sensitive=True)()


async def test_requests_that_come_while_a_group_is_written_are_the_next_group(monkeypatch: pytest.MonkeyPatch) -> None:
    await in_database(serving_fleet)
    groups, others = list[tuple[str, int]](), asyncio.Event()

    def accept(*, application: Application, submissions: Iterable[AsyncSubmission], **rest: Any) -> Any:
        several = list(submissions)
        groups.append((application.tenant, len(several)))
        return async_requests_accept(application=application, submissions=several, **rest)

    async def in_thread(work: Any) -> Any:
        """The first group waits until all other requests do."""
        await others.wait()
        return await in_database(work)

    monkeypatch.setattr(group_intake, "async_requests_accept", accept)
    intake = GroupIntake(SETTINGS, in_thread)

    async def submit(number: int) -> str:
        submission = AsyncSubmission("/v1/chat/completions", BODY, idempotency_key=f"k-{min(number, 6)}")
        application = Application(tenant="b" if number == 7 else "a")
        try:
            return str((await intake.accept(application, submission))["id"])
        except ApplicationRefused as refusal:
            return refusal.code or ""

    tasks = [asyncio.create_task(submit(0))]
    await asyncio.sleep(0)  # it begins to write
    tasks += [asyncio.create_task(submit(number)) for number in range(1, REQUESTS)]
    await asyncio.sleep(0)
    others.set()
    ids = await asyncio.gather(*tasks)
    assert groups[0] == ("a", 1)
    assert sorted(groups[1:]) == [("a", 6), ("b", 1)]
    assert ids.count("too_many_open") == 1, "a seventh request of one tenant"
    rows = await in_database(lambda: dict(AsyncRequest.objects.values_list("id", "tenant")))
    assert sorted(rows.values()) == ["a"] * 6 + ["b"]
    assert set(ids) - {"too_many_open"} == rows.keys()


async def test_an_error_reaches_every_request_of_its_group_and_the_next_goes_on() -> None:
    await in_database(serving_fleet)
    submission, breaks = AsyncSubmission("/v1/chat/completions", BODY), True

    async def in_thread(work: Any) -> Any:
        if breaks:
            raise OperationalError("no database")
        return await in_database(work)

    intake = GroupIntake(SETTINGS, in_thread)
    with pytest.raises(OperationalError, match="no database"):
        await intake.accept(Application(), submission)
    breaks = False
    shown = await intake.accept(Application(), submission)
    assert await in_database(lambda: AsyncRequest.objects.get().id) == shown["id"]
