"""The real sender with a stand-in for the ingress: races, cancellation, and death between steps."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler
from time import monotonic, sleep
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.conf import settings as django_settings
from django.db import connection
from django.utils import timezone

from tests.fleet.webhooks.receiver import Answer, Receiver
from tests.traffic.rows import ANSWER, BODY, accepted, answering_json, serving_fleet, standin_ingress
from traffic.async_requests.models import AsyncRequest
from traffic.async_requests.planner import AsyncSettings
from traffic.async_requests.services.requests import async_request_cancel
from traffic.async_requests.services.sender import AsyncSender
from traffic.keys.planner import sender_key_text
from traffic.routing.models import Ingress
from traffic.tenants.selectors import Application

pytestmark = [pytest.mark.processes, pytest.mark.django_db(transaction=True)]

QUICK = AsyncSettings(poll_s=0.01, renew_every_s=0.02, first_retry_s=0.01, longest_retry_s=0.02)
DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def _plain_links(settings: Any) -> None:
    settings.PLAIN_LINKS = True


@pytest.fixture
def ingress() -> Iterator[Receiver]:
    with standin_ingress() as standin:
        serving_fleet(standin.port)
        yield standin


def send_until(condition: Callable[[], bool], *, senders: int = 1, settings: AsyncSettings = QUICK) -> None:
    """Runs senders until `condition` holds."""

    async def run() -> None:
        stopping = asyncio.Event()
        running = [asyncio.create_task(AsyncSender(settings).run(stopping)) for _ in range(senders)]
        try:
            await asyncio.to_thread(_wait_beside, condition)
        finally:
            stopping.set()
            await asyncio.gather(*running)

    asyncio.run(run())


def _wait_beside(condition: Callable[[], bool]) -> None:
    try:
        wait_until(condition, "what the senders are to do is done")
    finally:
        connection.close()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    ends_at = monotonic() + DEADLINE_S
    while not condition():
        assert monotonic() < ends_at, f"not after {DEADLINE_S:g} s: {what}"
        sleep(0.02)


def all_ended() -> bool:
    return not AsyncRequest.objects.filter(ended_at=None).exists()


def now_accepted(tenant: str = "", limit_ms: str | None = None, key: str = "") -> AsyncRequest:
    return accepted(tenant, key=key, now=timezone.now(), limit_ms=limit_ms)


def test_a_request_is_sent_by_its_own_key_at_its_class_within_its_time(ingress: Receiver) -> None:
    request = now_accepted("acme", limit_ms="60000", key="ab12cd34")
    send_until(all_ended)
    ((path, headers, body),) = ingress.heard
    assert (path, body) == ("/v1/chat/completions", BODY)
    assert headers["X-Switchyard-Class"] == "near_realtime"
    assert headers["Authorization"] == f"Bearer {sender_key_text('ab12cd34', django_settings.SECRET_KEY)}"
    assert 0 < int(headers["X-Switchyard-Deadline-Ms"]) <= 60000
    row = AsyncRequest.objects.get(id=request.id)
    assert (row.state, row.status, bytes(row.answer or b""), bytes(row.body)) == ("done", 200, ANSWER, b"")


def test_two_senders_send_each_request_once(ingress: Receiver) -> None:
    for number in range(30):
        now_accepted(f"tenant-{number % 4}")
    send_until(all_ended, senders=2)
    assert len(ingress.heard) == 30
    assert set(AsyncRequest.objects.values_list("state", "attempts")) == {("done", 1)}


def test_what_fails_is_sent_again_until_it_is_answered(ingress: Receiver) -> None:
    left = iter([answering_json(503, b"{}"), answering_json(500, b"{}"), _break_off])

    def answer(handler: BaseHTTPRequestHandler) -> None:
        next(left, answering_json())(handler)

    ingress.answer = answer
    request = now_accepted()
    send_until(all_ended)
    row = AsyncRequest.objects.get(id=request.id)
    assert (row.state, row.attempts, row.failures) == ("done", 4, 2)


def _break_off(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"half":')
    handler.close_connection = True


def test_a_request_that_is_never_answered_expires_with_its_reason(ingress: Receiver) -> None:
    ingress.answer = answering_json(503, b'{"error":{"message":"the cell is full"}}')
    request = now_accepted(limit_ms="300")
    send_until(all_ended)
    row = AsyncRequest.objects.get(id=request.id)
    assert row.state == "expired"
    assert "deadline passed" in row.reason


def waiting_for(hung_up: threading.Event) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.connection.recv(1)  # returns when the sender closes
        hung_up.set()
        handler.close_connection = True

    return answer


def test_a_cancelled_request_is_cut_off_so_that_its_engine_stops(ingress: Receiver) -> None:
    hung_up = threading.Event()
    ingress.answer = waiting_for(hung_up)
    request = now_accepted()

    def cancelled() -> bool:
        if ingress.heard:
            async_request_cancel(application=Application(), request_id=request.id, now=timezone.now())
        return hung_up.is_set()

    send_until(cancelled)
    assert AsyncRequest.objects.get(id=request.id).state == "cancelled"


def test_a_sender_that_stops_gives_back_what_it_has(ingress: Receiver) -> None:
    ingress.answer = waiting_for(threading.Event())
    request = now_accepted()
    send_until(lambda: bool(ingress.heard))
    row = AsyncRequest.objects.get(id=request.id)
    assert (row.state, row.attempts, row.leased_until) == ("queued", 1, None)


def test_a_request_waits_for_an_ingress_that_is_away(ingress: Receiver) -> None:
    Ingress.objects.update(port=9)
    request = now_accepted()

    def tried_and_repaired() -> bool:
        if AsyncRequest.objects.filter(id=request.id, reason__contains="cannot be reached").exists():
            Ingress.objects.update(port=ingress.port)
        return all_ended()

    send_until(tried_and_repaired)
    row = AsyncRequest.objects.get(id=request.id)
    assert (row.state, row.failures) == ("done", 0)


def sender_process() -> "subprocess.Popen[bytes]":
    url = urlsplit(os.environ["DATABASE_URL"])._replace(path=f"/{connection.settings_dict['NAME']}").geturl()
    return subprocess.Popen(
        [sys.executable, "manage.py", "jobs"],
        env={
            **os.environ,
            "DATABASE_URL": url,
            "SWITCHYARD_SECRET_KEY": django_settings.SECRET_KEY,
            "SWITCHYARD_PLAIN_LINKS": "1",
        },
        cwd=django_settings.BASE_DIR,
    )


def test_a_sender_killed_in_the_middle_loses_nothing_and_the_next_ends_it_once(ingress: Receiver) -> None:
    ingress.answer = waiting_for(threading.Event())
    request = now_accepted("acme")
    process = sender_process()
    try:
        wait_until(lambda: bool(ingress.heard), "the first sender has sent it")
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    ingress.answer = answering_json()
    row = AsyncRequest.objects.get(id=request.id)
    assert (row.state, row.attempts) == ("sending", 1)
    AsyncRequest.objects.filter(id=request.id).update(leased_until=timezone.now() - timedelta(seconds=1))
    send_until(all_ended)
    row = AsyncRequest.objects.get(id=request.id)
    assert (row.state, row.attempts, len(ingress.heard)) == ("done", 2, 2)
