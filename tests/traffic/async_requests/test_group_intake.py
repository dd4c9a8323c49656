"""Threads of one process that accept requests at the same time."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
from django.db import connections

from tests.fleet.rows import NOW
from tests.traffic.rows import BODY, serving_fleet
from traffic.async_requests.models import AsyncRequest
from traffic.async_requests.planner import AsyncSettings
from traffic.async_requests.services import group_intake
from traffic.async_requests.services.group_intake import GroupIntake
from traffic.async_requests.services.intake import AsyncSubmission, async_requests_accept
from traffic.tenants.planner import ApplicationRefused
from traffic.tenants.selectors import Application

pytestmark = [pytest.mark.processes, pytest.mark.django_db(transaction=True)]
SETTINGS = AsyncSettings(max_open_per_tenant=6)
THREADS = 8


def test_requests_that_come_while_a_group_is_written_are_the_next_group(monkeypatch: pytest.MonkeyPatch) -> None:
    serving_fleet()
    intake, all_wait, groups = GroupIntake(), Event(), list[tuple[str, int]]()

    def accept(*, application: Application, submissions: Iterable[AsyncSubmission], **rest: Any) -> Any:
        """Lets the first group wait until all other requests do."""
        several = list(submissions)
        groups.append((application.tenant, len(several)))
        if len(groups) == 1:
            assert all_wait.wait(60)
        return async_requests_accept(application=application, submissions=several, **rest)

    monkeypatch.setattr(group_intake, "async_requests_accept", accept)

    def submit(number: int) -> str:
        submission = AsyncSubmission("/v1/chat/completions", BODY, idempotency_key=f"k-{min(number, 6)}")
        try:
            application = Application(tenant="b" if number == 7 else "a")
            return intake.accept(application, submission, now=NOW, settings=SETTINGS)[0].id
        except ApplicationRefused as refusal:
            return refusal.code or ""
        finally:
            connections.close_all()

    with ThreadPoolExecutor(THREADS) as threads:
        first = threads.submit(submit, 0)
        while not groups:
            pass
        others = [threads.submit(submit, number) for number in range(1, THREADS)]
        while len(intake._waiting) < THREADS - 1:
            pass
        all_wait.set()
        ids = [each.result(60) for each in (first, *others)]
    assert groups[0] == ("a", 1)
    assert sorted(groups[1:]) == [("a", 6), ("b", 1)]
    assert ids.count("too_many_open") == 1, "a seventh request of one tenant"
    assert AsyncRequest.objects.filter(tenant="a").count() == 6
    assert AsyncRequest.objects.get(tenant="b").id in ids


def test_an_error_reaches_every_request_of_its_group_and_the_next_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    serving_fleet()
    intake, submission = GroupIntake(), AsyncSubmission("/v1/chat/completions", BODY)

    def fails(**_: object) -> None:
        raise OSError("no database")

    with monkeypatch.context() as broken:
        broken.setattr(group_intake, "async_requests_accept", fails)
        with pytest.raises(OSError, match="no database"):
            intake.accept(Application(), submission, now=NOW, settings=SETTINGS)
    request, is_new = intake.accept(Application(), submission, now=NOW, settings=SETTINGS)
    assert (is_new, AsyncRequest.objects.get().id) == (True, request.id)
