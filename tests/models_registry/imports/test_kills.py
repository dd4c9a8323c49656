"""A process `jobs` that is killed in the middle of a file, and the one that continues."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.db import connection
from django.utils import timezone

from controlplane.embedded.configuration import CHECKOUT
from engine_agent.engines.artifacts import verify_folder
from models_registry.imports.models import ModelImport
from models_registry.imports.services.imports import import_start
from tests.controlplane.embedded.processes import eventually
from tests.models_registry.imports.hub import FILES
from tests.models_registry.imports.jobs import configured_hub

pytestmark = [pytest.mark.processes, pytest.mark.long, pytest.mark.django_db(transaction=True)]
LIMIT_S = 60.0


@contextmanager
def jobs(settings: Any) -> Iterator[subprocess.Popen[bytes]]:
    url = urlsplit(os.environ["DATABASE_URL"])._replace(path=f"/{connection.settings_dict['NAME']}").geturl()
    own = {
        "DATABASE_URL": url,
        "SWITCHYARD_HF_ENDPOINT": settings.HF_ENDPOINT,
        "SWITCHYARD_ARTIFACT_SOURCES": settings.IMPORT_STORE,
        "SWITCHYARD_PLAIN_LINKS": "1",
        "SWITCHYARD_SECRET_KEY": settings.SECRET_KEY,
    }
    process = subprocess.Popen([sys.executable, "manage.py", "jobs"], cwd=CHECKOUT, env={**os.environ, **own})
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def test_a_killed_process_loses_no_byte_on_disk(settings: Any, tmp_path: Path) -> None:
    middle, end = threading.Event(), threading.Event()

    def pause(path: str) -> None:
        if path == "model.safetensors" and not middle.is_set():
            middle.set()
            end.wait(LIMIT_S)

    with configured_hub(settings, tmp_path) as hub:
        hub.at_bytes = pause
        row = import_start(source="hf://org/model@main", actor="ada", now=timezone.now())
        with jobs(settings):
            assert middle.wait(LIMIT_S)
            part = tmp_path / "models" / ".imports" / str(row.pk) / "parts"
            half = len(FILES["model.safetensors"]) // 2
            assert eventually(lambda: any(file.stat().st_size >= half - 2**16 for file in part.iterdir()))
        end.set()
        hub.asked.clear()
        ModelImport.objects.update(due_at=timezone.now() - timedelta(seconds=1))  # as fifteen seconds would
        with jobs(settings):
            assert eventually(lambda: ModelImport.objects.get().state == "done")
        resumed = hub.requests_for("model.safetensors")
    row.refresh_from_db()
    verify_folder(Path(row.artifact_uri.removeprefix("file://")), row.artifact_digest)
    assert len(resumed) == 1
    assert int(resumed[0].removeprefix("bytes=").removesuffix("-")) >= half - 2**16
    assert row.fence == 2
