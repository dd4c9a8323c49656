"""Batches on the command line, with web in place of an ingress."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from django.core.asgi import get_asgi_application
from django.db import connections

from controlplane.web import server_config
from fleet.regions.models import Region
from tests.controlplane.cli.conftest import Switchyard
from tests.fleet.rows import NOW
from tests.traffic.rows import has_open_batches, jsonl, line, serving_fleet, worked_until
from traffic.batches.models import Batch
from traffic.keys.services import key_create
from traffic.routing.models import Ingress

pytestmark = [pytest.mark.processes, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Port of web's HTTP application, as ASGI in a thread."""
    monkeypatch.setitem(connections.settings["default"], "CONN_MAX_AGE", 0)
    server = uvicorn.Server(server_config(get_asgi_application(), host="127.0.0.1", port=0))
    began = threading.Event()
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        began.wait(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def key(settings: Any, tmp_path: Path, web: int) -> str:
    """An application key for a fleet whose ingress is web itself, which serves the same paths."""
    settings.FILES = str(tmp_path / "store")
    serving_fleet(web)
    Region.objects.update(ingress_url=f"http://127.0.0.1:{web}")
    return key_create(name="app", tenant="acme", actor="root", now=NOW).text


def submitted(switchyard: Switchyard, key: str, content: bytes, folder: Path) -> dict[str, Any]:
    path = folder / "in.jsonl"
    path.write_bytes(content)
    made = switchyard("batch", "submit", str(path), "--window", "4h", "--priority", "7", "--key", key, "-o", "json")
    assert made.code == 0, made.err
    found: dict[str, Any] = json.loads(made.out)
    return found


def test_one_is_submitted_shown_and_cancelled(switchyard: Switchyard, key: str, tmp_path: Path) -> None:
    made = submitted(switchyard, key, jsonl(line(1)), tmp_path)
    row = Batch.objects.get()
    assert (made["id"], row.tenant, row.priority, row.window) == (row.id, "acme", 7, "4h")
    shown = switchyard("batch", "status", row.id, "--key", key)
    assert shown.out.splitlines()[:2] == [row.id, "validating"]
    refused = switchyard("batch", "results", row.id, "--key", key)
    assert "is validating, and none of its lines was answered" in refused.err
    assert switchyard("batch", "cancel", row.id, "--yes", "--key", key).code == 0
    assert Batch.objects.get().state == "cancelling"


def test_what_failed_is_said_by_line(switchyard: Switchyard, key: str, tmp_path: Path) -> None:
    made = submitted(switchyard, key, jsonl(line(1), line(1)), tmp_path)
    asyncio.run(worked_until(lambda: not has_open_batches()))
    shown = switchyard("batch", "status", made["id"], "--key", key).out
    assert "line 2: The custom_id 'id-1' occurs twice" in shown


def test_results_are_fetched_into_a_new_file(switchyard: Switchyard, key: str, tmp_path: Path, settings: Any) -> None:
    settings.PLAIN_LINKS = True
    made = submitted(switchyard, key, jsonl(line(1), line(2)), tmp_path)
    Ingress.objects.update(port=9)  # nothing answers there, so batches wait
    asyncio.run(worked_until(lambda: Batch.objects.get().state == "in_progress"))
    Batch.objects.update(expires_at=NOW)
    asyncio.run(worked_until(lambda: not has_open_batches()))
    path = tmp_path / "errors.jsonl"
    for code in (0, 6):
        ended = switchyard("batch", "results", made["id"], "--errors", "--to", str(path), "--key", key)
        assert ended.code == code, ended.err
    lines = [json.loads(each) for each in path.read_text().splitlines()]
    assert {each["custom_id"]: each["error"]["code"] for each in lines} == dict.fromkeys(
        ("id-1", "id-2"), "batch_expired"
    )
