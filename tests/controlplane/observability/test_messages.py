"""What travels with the messages of Celery, so that a task knows of which request it is, and how long it waited."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis
from django.conf import settings as configured

from kernel import metrics, wake_ups
from kernel.control_standing import HOUSEKEEPING
from kernel.loop_passes import control_standing
from kernel.models import LoopPass
from kernel.tasks import SENT_AT, heartbeat
from kernel.tracing import bind_request_id
from tests.kernel.servers_away import use_fresh_connections

ROOT = Path(__file__).resolve().parents[3]
QUEUE = "switchyard:celery"


@pytest.mark.django_db(transaction=True)
def test_a_message_says_when_it_was_sent_and_of_which_request(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fresh_connections(monkeypatch)
    client = redis.Redis.from_url(configured.REDIS_URL)
    client.delete(QUEUE)
    with bind_request_id("r-9"):
        wake_ups.send("traffic.count_usage")
    (message,) = client.lrange(QUEUE, 0, -1)
    headers: dict[str, Any] = json.loads(message)["headers"]
    assert headers["switchyard_request_id"] == "r-9"
    assert float(headers[SENT_AT]) > 0


@pytest.mark.slow
def test_every_process_of_django_counts_its_tasks_into_the_folder_of_its_host(tmp_path: Path) -> None:
    """A worker has no URLs, views or tests that would import what counts."""
    looked = (
        "import sys; sys.argv = ['celery', 'worker']; import django; django.setup(); from celery import signals; "
        "from prometheus_client import values; "
        "print(len(signals.task_prerun.receivers), values.ValueClass.__name__)"
    )
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "controlplane.settings", "SWITCHYARD_HOME": str(tmp_path)}
    environment.pop("PROMETHEUS_MULTIPROC_DIR", None)
    ended = subprocess.run(
        [sys.executable, "-c", looked], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    receivers, values = ended.stdout.split()[-2:]
    assert int(receivers) >= 1
    assert values == "MmapedValue"


@pytest.mark.parametrize("program", [["uvicorn"], ["manage.py", "jobs"], ["celery", "worker"]])
def test_processes_of_one_host_count_into_one_folder(
    program: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    settings.SWITCHYARD_HOME = tmp_path
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "")
    monkeypatch.setattr(sys, "argv", program)
    assert metrics._shared_folder() == tmp_path / "metrics"
    assert os.environ["PROMETHEUS_MULTIPROC_DIR"] == str(tmp_path / "metrics")


@pytest.mark.django_db
def test_the_heartbeat_of_housekeeping_says_how_long_its_message_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernel.tasks.time", lambda: 1060.0)
    heartbeat.apply(headers={SENT_AT: "1000.0"})
    assert LoopPass.objects.get(loop=HOUSEKEEPING).waited_s == 60.0
    queue_s = control_standing().queue_s
    assert queue_s is not None
    assert queue_s >= 60.0
