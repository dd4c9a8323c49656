"""Processes that accept and send are killed at random: each idempotency key has one request with one whole outcome."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.conf import settings as django_settings
from django.db import connection

from tests.fleet.webhooks.receiver import Receiver
from tests.traffic.async_requests.test_sender import sender_process, wait_until
from tests.traffic.rows import answering_json, serving_fleet, standin_ingress
from traffic.async_requests.models import AsyncRequest
from traffic.async_requests.services.body_groups import body_read

pytestmark = [pytest.mark.processes, pytest.mark.long, pytest.mark.django_db(transaction=True)]
KEYS = 1500
KILLS = 12
ANSWER = json.dumps({"choices": [{"message": {"content": "because " * 600}}]}).encode()
INTAKE = """
from django.utils import timezone
from traffic.async_requests.planner import AsyncSettings
from traffic.async_requests.services.intake import AsyncSubmission, async_requests_accept
from traffic.tenants.selectors import Application
BODY = '{"model":"sim-70b","messages":[{"role":"user","content":"%s"}]}'
for first in range(0, KEYS, 25):
    submissions = [
        AsyncSubmission("/v1/chat/completions", (BODY % ("why? " * (number % 2 * 800 + 1))).encode(),
                        idempotency_key=f"order-{number}")
        for number in range(first, first + 25)
    ]
    async_requests_accept(application=Application(tenant="acme"), submissions=submissions, now=timezone.now(),
                          settings=AsyncSettings())
""".replace("KEYS", str(KEYS))


@pytest.fixture
def ingress(settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    settings.PLAIN_LINKS, settings.FILES = True, str(tmp_path)
    monkeypatch.setenv("SWITCHYARD_FILES", str(tmp_path))
    with standin_ingress() as standin:
        standin.answer = answering_json(200, ANSWER)
        serving_fleet(standin.port)
        yield standin


def intake_process() -> "subprocess.Popen[bytes]":
    url = urlsplit(os.environ["DATABASE_URL"])._replace(path=f"/{connection.settings_dict['NAME']}").geturl()
    variables = {"DATABASE_URL": url, "SWITCHYARD_SECRET_KEY": django_settings.SECRET_KEY}
    words = [sys.executable, "manage.py", "shell", "-c", INTAKE]
    return subprocess.Popen(words, env={**os.environ, **variables}, cwd=django_settings.BASE_DIR)


def _progress() -> tuple[int, int]:
    return AsyncRequest.objects.count(), AsyncRequest.objects.filter(state="done").count()


def _is_past(before: tuple[int, int]) -> bool:
    return _progress() not in {before} - {(KEYS, KEYS)}


@pytest.mark.usefixtures("ingress")
def test_each_key_has_one_request_and_one_whole_outcome_through_kills() -> None:
    chance = random.Random(7)
    processes = {"intake": intake_process(), "sender-1": sender_process(), "sender-2": sender_process()}
    try:
        for _ in range(KILLS):
            before = _progress()
            wait_until(partial(_is_past, before), "there is progress")
            name = chance.choice(sorted(processes))
            processes[name].send_signal(signal.SIGKILL)
            processes[name].wait()
            processes[name] = intake_process() if name == "intake" else sender_process()
        wait_until(lambda: processes["intake"].poll() is not None, "all keys are accepted")
        assert processes["intake"].returncode == 0
        wait_until(lambda: _progress() == (KEYS, KEYS), "all requests are done")
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    keys = list(AsyncRequest.objects.values_list("idempotency_key", flat=True))
    assert sorted(keys) == sorted(f"order-{number}" for number in range(KEYS))
    rows = AsyncRequest.objects.only("answer", "answer_at")
    assert {body_read(bytes(row.answer or b""), row.answer_at) for row in rows} == {ANSWER}
    assert not AsyncRequest.objects.filter(answer_at="").exists()
