"""I14: however a batch process is killed, every line of every batch has one outcome."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.conf import settings as django_settings
from django.db import connection
from django.db.models import Q
from django.utils import timezone

from controlplane.embedded.configuration import CHECKOUT
from lab.cloud.server import World
from lab.cloud.world import Fault
from tests.fleet.webhooks.receiver import Receiver
from tests.traffic.bucket_store import FILES, cloud_of_files, lost_answer, torn_body
from tests.traffic.rows import (
    ANSWER,
    answering_json,
    begun,
    has_open_batches,
    jsonl,
    line,
    results,
    serving_fleet,
    standin_ingress,
)
from traffic.batches.models import Batch, BatchRange
from traffic.batches.planning.batch import BatchSettings

pytestmark = [pytest.mark.processes, pytest.mark.django_db(transaction=True)]
LINES, KILLS, KILLS_IN_LONG_RUN = 400, 2, 4
LIMIT_S = 240.0


@pytest.fixture
def ingress() -> Iterator[Receiver]:
    with standin_ingress() as standin:
        serving_fleet(standin.port)
        yield standin


@pytest.fixture(params=["folder", pytest.param("bucket", marks=pytest.mark.long)])
def world(request: Any, settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World | None]:
    """The file store: a folder, or a bucket that sometimes fails."""
    settings.FILES = str(tmp_path / "files")
    if request.param == "folder":
        yield None
        return
    settings.FILES = FILES
    with cloud_of_files(monkeypatch) as world:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", world.endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", world.access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", world.secret)
        yield world


def disturbed(world: World | None, chance: random.Random) -> None:
    if world is not None:
        world.faults += [
            lost_answer("PutObject"),
            torn_body(),
            Fault(chance.choice(["PutObject", "GetObject", "ListObjectsV2"]), "InternalError", times=2),
            Fault("PutObject", delay_s=chance.random()),
        ]


@contextlib.contextmanager
def batch_process() -> Iterator[subprocess.Popen[bytes]]:
    url = urlsplit(os.environ["DATABASE_URL"])._replace(path=f"/{connection.settings_dict['NAME']}").geturl()
    process = subprocess.Popen(
        [sys.executable, "manage.py", "jobs"],
        cwd=CHECKOUT,
        env={
            **os.environ,
            "DATABASE_URL": url,
            "SWITCHYARD_FILES": django_settings.FILES,
            "SWITCHYARD_PLAIN_LINKS": "1",
            "SWITCHYARD_SECRET_KEY": django_settings.SECRET_KEY,
        },
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def end_leases() -> None:
    """Ends leases as fifteen seconds would."""
    past, held = timezone.now() - timedelta(seconds=1), Q(leased_until__isnull=False)
    Batch.objects.filter(held).update(leased_until=past)
    BatchRange.objects.filter(held).update(leased_until=past)


def test_a_process_killed_at_any_moment_leaves_each_line_with_one_outcome(
    ingress: Receiver, world: World | None, thorough: bool
) -> None:
    kills = KILLS_IN_LONG_RUN if thorough else KILLS
    seed = random.randrange(10**6)
    chance = random.Random(seed)
    heard, enough = 0, threading.Condition()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        nonlocal heard
        with enough:
            heard += 1
            enough.notify_all()
        answering_json()(handler)

    ingress.answer = answer
    batch = begun(jsonl(*(line(number) for number in range(LINES))), now=timezone.now(), settings=BatchSettings())
    for _ in range(kills):
        disturbed(world, chance)
        with enough:
            target = heard + chance.randrange(0, LINES // kills)
        with batch_process() as process, enough:
            while heard < target and process.poll() is None:
                assert enough.wait(LIMIT_S), f"seed {seed}"
            assert process.poll() is None, f"seed {seed}"
        end_leases()
    with batch_process():
        done, waiting = threading.Event(), timezone.now() + timedelta(seconds=LIMIT_S)
        while has_open_batches() and timezone.now() < waiting:
            done.wait(0.1)
    if world is not None:
        world.faults.clear()
    batch.refresh_from_db()
    assert batch.state == "completed", f"seed {seed}"
    lines = results(batch.output_file_id)
    assert Counter(each["custom_id"] for each in lines) == Counter(f"id-{number}" for number in range(LINES))
    assert (batch.completed, batch.failed) == (len(lines), 0), f"seed {seed}"
    assert batch.output_tokens == LINES * json.loads(ANSWER)["usage"]["completion_tokens"]
    assert len(ingress.heard) >= LINES, "some were sent twice, and none counts twice"
