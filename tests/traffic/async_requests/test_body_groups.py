"""Long bodies and answers outside PostgreSQL: shared files, retries while the store is away, and what is deleted."""

import asyncio
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import transaction

from tests.fleet.rows import NOW
from tests.traffic.rows import ANSWER, BODY, accepted, serving_fleet
from traffic.async_requests.models import AsyncRequest
from traffic.async_requests.planner import AsyncSettings, AttemptResponse
from traffic.async_requests.selectors import async_request_json
from traffic.async_requests.services.body_groups import FOLDER, answer_load, body_groups_trim, body_read
from traffic.async_requests.services.intake import AsyncSubmission, async_requests_accept
from traffic.async_requests.services.requests import (
    LeasedRequest,
    async_attempts_settle,
    async_request_cancel,
    async_requests_claim,
    async_requests_trim,
)
from traffic.async_requests.services.sender import AsyncSender
from traffic.tenants.selectors import Application

pytestmark = pytest.mark.django_db
SETTINGS = AsyncSettings()
LONG = json.dumps({"model": "sim-70b", "messages": [{"role": "user", "content": "why? " * 1000}]}).encode()
LONG_ANSWER = json.dumps({"choices": [{"message": {"content": "because " * 1000}}]}).encode()


@pytest.fixture(autouse=True)
def store(settings: Any, tmp_path: Path) -> Path:
    serving_fleet()
    settings.FILES = str(tmp_path)
    return tmp_path / FOLDER


def claim() -> list[LeasedRequest]:
    return async_requests_claim(count=10, rooms={}, now=NOW, settings=SETTINGS)


def settle(*attempts: tuple[LeasedRequest, AttemptResponse]) -> list[str | None]:
    verdicts = async_attempts_settle(attempts=attempts, now=NOW, settings=SETTINGS)
    return [each.state.value if each else None for each in verdicts]


def test_long_bodies_of_a_group_share_a_file_and_short_ones_stay_in_their_rows(store: Path) -> None:
    bodies = [LONG, BODY, LONG.replace(b"why", b"how")]
    submissions = [AsyncSubmission("/v1/chat/completions", body) for body in bodies]
    async_requests_accept(application=Application(), submissions=submissions, now=NOW, settings=SETTINGS)
    assert len(list(store.glob("*/*"))) == 1
    leased = claim()
    assert sorted(bool(each.body_at) for each in leased) == [False, True, True]
    found = {json.dumps(json.loads(body_read(each.body, each.body_at))) for each in leased}
    assert found == {json.dumps(json.loads(body)) for body in bodies}


def test_long_answers_share_a_file_and_are_shown_whole(store: Path) -> None:
    accepted(), accepted(), accepted(callback_url=None)
    first, second, third = claim()
    responses = [AttemptResponse(200, LONG_ANSWER), AttemptResponse(200, ANSWER), AttemptResponse(503, LONG_ANSWER)]
    assert settle(*zip((first, second, third), responses, strict=True)) == ["done", "done", "queued"]
    assert len(list(store.glob("*/*"))) == 1
    rows = [AsyncRequest.objects.get(id=each.id) for each in (first, second, third)]
    assert [bool(row.answer_at) for row in rows] == [True, False, False]
    shown = [async_request_json(answer_load(row), SETTINGS)["response"] for row in rows]
    assert [each and each["body"] for each in shown] == [json.loads(LONG_ANSWER), json.loads(ANSWER), None]


def test_an_answer_of_a_lost_lease_changes_nothing() -> None:
    request = accepted(body=LONG)
    (leased,) = claim()
    async_request_cancel(application=Application(), request_id=request.id, now=NOW)
    assert settle((leased, AttemptResponse(200, LONG_ANSWER))) == [None]
    row = AsyncRequest.objects.get(id=request.id)
    assert (row.state, row.body_at, row.answer_at) == ("cancelled", "", "")


def test_bodies_stay_in_their_rows_inside_a_transaction_and_while_the_store_is_away(store: Path) -> None:
    with transaction.atomic():
        accepted(body=LONG)
    assert not store.exists()
    store.write_text("a file in place of the folder")
    accepted(body=LONG)
    assert [len(each.body) > SETTINGS.inline_bytes for each in claim()] == [True, True]


@pytest.mark.parametrize("is_changed", [True, False])
def test_a_request_whose_body_is_lost_or_changed_is_not_sent(store: Path, is_changed: bool) -> None:
    accepted(body=LONG)
    (leased,) = claim()
    (file,) = store.glob("*/*")
    file.write_bytes(LONG.replace(b"why", b"who")) if is_changed else file.unlink()
    received = asyncio.run(AsyncSender(SETTINGS)._send_attempt(leased))
    assert (received.status, received.sent) == (None, False)
    assert ("have changed" if is_changed else "has no async/") in received.reason


def test_files_are_deleted_once_no_row_can_refer_to_them(store: Path) -> None:
    accepted(body=LONG)
    (leased,) = claim()
    settle((leased, AttemptResponse(200, LONG_ANSWER)))
    later = NOW + timedelta(seconds=SETTINGS.longest_limit_s + 7200)
    assert body_groups_trim(now=later, settings=SETTINGS) == 0
    async_requests_trim(now=later)
    assert body_groups_trim(now=NOW + timedelta(hours=2), settings=SETTINGS) == 0
    assert body_groups_trim(now=later, settings=SETTINGS) == 1
    assert not list(store.iterdir())
