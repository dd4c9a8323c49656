"""Pages of batches: a file uploaded for a tenant, errors by line, downloads, and who may."""

from html import unescape
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import User
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client

from kernel.access import Role
from kernel.models import Event
from tests.controlplane.access.callers import make_user
from tests.controlplane.dashboard.clients import fragment
from tests.fleet.rows import NOW
from tests.traffic.rows import ENDPOINT, MODEL, begun, jsonl, line, serving_fleet, stored
from traffic.batches.models import Batch, StoredFile
from traffic.files.planner import FilePurpose
from traffic.keys.models import ApplicationKey

pytestmark = [pytest.mark.django_db, pytest.mark.slow]
LINES = jsonl(line(1), line(2))


@pytest.fixture(autouse=True)
def _fleet(settings: Any, tmp_path: Path) -> None:
    settings.FILES = str(tmp_path / "files")
    serving_fleet()
    ApplicationKey.objects.create(
        prefix="0a1b2c3d", digest="d", name="search", tenant="acme", created_by="ada", created_at=NOW
    )


def _client(user: User) -> Client:
    client = Client()
    client.force_login(user)
    return client


async def _body(response: Any) -> bytes:
    return b"".join([piece async for piece in response.streaming_content])


def _oscar() -> Client:
    return _client(make_user("oscar", Role.OPERATOR))


def _post(client: Client, content: bytes, name: str = "in.jsonl", **form: str) -> Any:
    file = SimpleUploadedFile(name, content)
    return client.post("/batches/new/", {"file": file, "key": "0a1b2c3d", "endpoint": ENDPOINT, **form})


def test_an_operator_uploads_a_file_for_a_key_and_the_tenant_owns_it() -> None:
    assert 'value="0a1b2c3d">search, tenant acme' in _oscar().get("/batches/new/").text
    response = _post(_oscar(), LINES, window="4h", priority="7")
    batch = Batch.objects.get()
    assert response.headers["Location"] == f"/batches/{batch.id}/"
    assert (batch.tenant, batch.key, batch.model, batch.lines, batch.window, batch.priority) == (
        "acme", "0a1b2c3d", MODEL, 2, "4h", 7,
    )  # fmt: skip
    assert StoredFile.objects.get(id=batch.input_file_id).tenant == "acme"
    event = Event.objects.get(kind="batch.created")
    assert (event.actor, event.detail["tenant"]) == ("oscar", "acme")


def test_errors_name_their_lines_and_nothing_is_stored() -> None:
    wrong = jsonl(line(1), b"{", line(3, method="GET"), line(1), line(5, url="/<b>"))
    response = _post(_oscar(), wrong, window="4h")
    alert = unescape(response.text.partition('role="alert">')[2].partition("</p>")[0])
    assert response.status_code == 409
    assert "The file has 4 errors." in alert
    for number in (2, 3, 4, 5):
        assert f"Line {number}: " in alert
    assert "/<b>" not in response.text
    assert 'value="4h"' in response.text
    assert not StoredFile.objects.exists()


@pytest.mark.parametrize(
    ("content", "form", "said"),
    [
        (b"", {}, "no lines"),
        (LINES, {"name": "in.csv"}, "must end in .jsonl"),
        (LINES, {"key": "ffffffff"}, "There is no key 'ffffffff'"),
        (LINES, {"endpoint": "/v1/all"}, "`endpoint` must be one of"),
        (LINES, {"window": "1m"}, "from 10m to 7d"),
        (LINES, {"priority": "10"}, "a whole number from 0 to 9"),
        (LINES, {"priority": "high"}, "a whole number from 0 to 9"),
        (jsonl(line(1, body={"model": "other", "messages": []})), {}, "The model `other` does not exist"),
        (b" " * 4_000_001, {}, "use switchyard batch submit"),
    ],
)
def test_what_is_wrong_is_named(content: bytes, form: dict[str, str], said: str) -> None:
    response = _post(_oscar(), content, **form)
    assert response.status_code == 409
    assert said in unescape(response.text.partition('role="alert">')[2].partition("</p>")[0])
    assert not Batch.objects.exists()


def test_a_revoked_key_and_a_key_without_the_model_are_refused() -> None:
    ApplicationKey.objects.update(deployments=["another"])
    assert "does not include the model" in _post(_oscar(), LINES).text
    ApplicationKey.objects.update(revoked_at=NOW)
    assert "was revoked" in _post(_oscar(), LINES).text
    assert "0a1b2c3d</option>" not in _oscar().get("/batches/new/").text
    assert not StoredFile.objects.exists()


def test_only_operators_upload_and_download_and_downloads_are_recorded() -> None:
    batch, out = begun(LINES, "acme"), stored(b'{"answer": 1}\n', "acme", purpose=FilePurpose.BATCH_OUTPUT)
    other = stored(b"secret\n", "globex", purpose=FilePurpose.BATCH_OUTPUT)
    Batch.objects.filter(id=batch.id).update(state="completed", output_file_id=out.id, error_file_id=other.id)
    viewer, page = _client(make_user("vera")), f"/batches/{batch.id}/"
    assert _post(viewer, LINES).status_code == 403
    assert viewer.get(f"{page}results.jsonl").status_code == 403
    assert "A download needs the operator role." in fragment(viewer, page, "batch")
    assert not Event.objects.filter(kind="batch.downloaded").exists()
    assert f'href="{page}results.jsonl"' in fragment(_oscar(), page, "batch")
    response = _oscar().get(f"{page}results.jsonl")
    assert async_to_sync(_body)(response) == b'{"answer": 1}\n'
    assert response.headers["Content-Disposition"] == f'attachment; filename="{batch.id}-results.jsonl"'
    assert Event.objects.get(kind="batch.downloaded").actor == "oscar"
    for name in ("errors", "input"):
        assert _oscar().get(f"{page}{name}.jsonl").status_code == 404
