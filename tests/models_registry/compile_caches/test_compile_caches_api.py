"""Compile caches over HTTP: uploaded in parts by a node that serves, handed out to nodes of the same place, never
replaced, and deleted by admins."""

import hashlib
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import transaction
from django.test import Client
from pytest_django.live_server_helper import LiveServer
from rest_framework.test import APIClient

from audit.models import AuditRecord
from engine_agent.protocol.compile_caches import DIGEST_HEADER, PART_BYTES, UNPACKED_HEADER
from fleet.agents.services.enrolment import credential_issue
from fleet.cells.models import Cell
from fleet.nodes.models import Node
from fleet.reconcile.planning.states import CellState, NodeState
from kernel import clock
from kernel.access import Role
from kernel.models import Event
from models_registry.artifacts.services import bucket as artifacts
from models_registry.compile_caches import services
from models_registry.compile_caches.models import CompileCache
from tests.controlplane.access.callers import calls, make_user
from tests.engine_agent.engines.s3_server import BUCKET, empty_bucket, s3_server
from tests.engine_agent.node.test_compile_caches import KEY, Caches, compile_into
from tests.fleet import rows
from tests.models_registry.builds.test_builds_api import content_of

pytestmark = [pytest.mark.slow, pytest.mark.django_db]

CONTENT = b"archive"
OTHER_KEY = hashlib.sha256(b"other").hexdigest()


@pytest.fixture(autouse=True)
def store(tmp_path: Path, settings: Any) -> Path:
    settings.COMPILE_CACHES = str(tmp_path / "caches")
    settings.COMPILE_CACHE_STORE_GIB = 1
    return tmp_path / "caches"


def member(name: str = "n-00000001", cell: str = "sim-70b-us-east-1-1", **columns: Any) -> str:
    """Makes a node that serves in a cell alone; returns its credential."""
    rows.cell(cell, rows.node(name), **columns)
    with transaction.atomic():
        return credential_issue(kind="node", subject=name, region="us-east-1", now=clock.now())


def put(credential: str, content: bytes = CONTENT, *, key: str = KEY, at: int = 0, **stated: Any) -> Any:
    """Uploads one part, and ends the upload after the last one; without other statements it is the whole archive."""
    total = stated.get("total", len(content))
    path = f"/agents/caches/{key}"
    headers = {
        "Authorization": f"Bearer {credential}",
        "Content-Range": stated.get("range", f"bytes {at}-{at + len(content) - 1}/{total}"),
        DIGEST_HEADER: stated.get("digest", hashlib.sha256(content).hexdigest()),
        UNPACKED_HEADER: "4096",
    }
    if not content:
        headers.pop("Content-Range")
    answer = Client().put(path, content, "application/octet-stream", headers=headers)
    if not content or answer.status_code != 200 or answer.json()["next"] < total:
        return answer
    return Client().put(path, b"", headers={**headers, "Content-Range": f"bytes */{total}"})


def facts(credential: str, key: str = KEY) -> Any:
    return Client().get(f"/agents/caches/{key}", headers={"Authorization": f"Bearer {credential}"})


def fetch(credential: str, key: str = KEY) -> Any:
    """The archive. Its facts have the same status, except that they do not depend on the archive's file."""
    return Client().get(f"/agents/caches/{key}/archive", headers={"Authorization": f"Bearer {credential}"})


def test_a_cache_is_uploaded_once_and_fetched_by_the_same_rank_of_other_cells(
    store: Path, django_capture_on_commit_callbacks: Any
) -> None:
    first, second = member(), member("n-00000002", "sim-70b-us-east-1-2")
    assert fetch(second).status_code == 404
    assert put(first, b"").json() == {"next": 0}
    assert put(first).json() == {"next": len(CONTENT)}
    row = CompileCache.objects.get()
    assert (row.node, row.cell, row.rank, row.packed_bytes) == ("n-00000001", "sim-70b-us-east-1-1", 0, 7)
    digest = row.digest.removeprefix("sha256:")
    assert facts(second).json() == {"digest": digest, "packed_bytes": 7, "unpacked_bytes": 4096}
    answer = fetch(second)
    assert (answer.status_code, content_of(answer)) == (200, CONTENT)
    row.refresh_from_db()
    assert row.uses == 1
    assert Event.objects.get(kind="compile_cache.added").detail["node"] == "n-00000001"
    record = AuditRecord.objects.get()
    assert (record.actor, record.action, record.object) == (
        "n-00000001",
        "compile-cache.create",
        "agent/n-00000001",
    )
    for wanted in (put(second), put(second, b"poison"), put(second, b"")):
        assert (wanted.status_code, wanted.json()) == (409, {"error": "this fleet has a compile cache for it already"})
    assert fetch(second, OTHER_KEY).status_code == 404
    assert [path.name for path in store.iterdir() if path.is_file()] == [digest]


def test_it_comes_in_parts_and_a_repeated_one_changes_nothing(store: Path) -> None:
    node, content = member(), os.urandom(PART_BYTES + 100)
    whole: dict[str, Any] = {"total": len(content), "digest": hashlib.sha256(content).hexdigest()}
    assert put(node, content[:PART_BYTES], **whole).json() == {"next": PART_BYTES}
    assert put(node, content[:10], at=10, **whole).json() == {"next": PART_BYTES}
    assert put(node, content[PART_BYTES:], at=PART_BYTES, **whole).json() == {"next": len(content)}
    assert content_of(fetch(node)) == content
    assert AuditRecord.objects.count() == 1
    assert list((store / ".parts").iterdir()) == []


def test_an_upload_cannot_end_before_it_is_complete_or_grow(store: Path) -> None:
    node, other, content = member(), member("n-00000002", "sim-70b-us-east-1-2"), os.urandom(100)
    headers = {
        "Authorization": f"Bearer {node}",
        DIGEST_HEADER: hashlib.sha256(content).hexdigest(),
        UNPACKED_HEADER: "4096",
    }

    def end(total: int, credential: str = node) -> Any:
        sent = {**headers, "Authorization": f"Bearer {credential}", "Content-Range": f"bytes */{total}"}
        return Client().put(f"/agents/caches/{KEY}", b"", headers=sent)

    assert (end(100).json(), end(0).status_code) == ({"next": 0}, 400)
    assert put(node, content[:60], total=100, digest=headers[DIGEST_HEADER]).json() == {"next": 60}
    assert (end(100).json(), end(50).json(), end(100, other).json()) == ({"next": 60}, {"next": 0}, {"next": 0})
    large = 2**30 // 4 + 1
    assert put(node, content[60:], at=60, total=large, digest=headers[DIGEST_HEADER]).status_code == 413
    assert put(node, content[60:], at=60, total=100, digest=headers[DIGEST_HEADER]).json() == {"next": 100}
    assert CompileCache.objects.get().packed_bytes == 100


@pytest.mark.parametrize(
    ("stated", "status"),
    [
        ({"digest": "0" * 64}, 400),
        ({"digest": "../../etc/passwd"}, 400),
        ({"range": ""}, 400),
        ({"range": "bytes 0-3/7"}, 400),
        ({"range": "bytes */7"}, 400),
        ({"range": f"bytes 0-6/{2**30 // 4 + 1}"}, 413),
        ({"key": "0" * 63}, 403),
        ({"content": bytes(PART_BYTES + 1)}, 400),
    ],
)
def test_what_is_no_cache_is_refused_and_leaves_nothing(stated: dict[str, Any], status: int, store: Path) -> None:
    assert put(member(), **stated).status_code == status
    assert not CompileCache.objects.exists()
    assert [path for path in store.rglob("*") if path.is_file() and path.stat().st_size] == []


def test_files_that_failed_uploads_left_are_deleted(store: Path) -> None:
    put(member())
    [known] = (path for path in store.iterdir() if path.is_file())
    left = [store / ("0" * 64), store / ".parts" / "unfinished"]
    for path in (known, *left):
        path.write_bytes(path.read_bytes() if path == known else b"left")
        os.utime(path, (0, 0))
    put(member("n-00000002", "sim-70b-us-east-1-2"), b"other", key=OTHER_KEY)
    assert [path.exists() for path in left] == [False, False]
    assert known.exists()


def test_only_a_node_of_a_cell_that_serves_may_upload() -> None:
    node = member()
    Cell.objects.update(state=CellState.STARTING.value)
    assert (put(node).status_code, put(node, b"").status_code) == (425, 425)
    Cell.objects.update(state=CellState.READY.value)
    Node.objects.update(state=NodeState.SUSPECT.value)
    assert put(node).status_code == 425
    rows.node("n-00000009")
    spare = credential_issue(kind="node", subject="n-00000009", region="us-east-1", now=clock.now())
    machine = credential_issue(kind="machine", subject="m-1", region="us-east-1", now=clock.now())
    for credential in (spare, machine, "sw_00000000000000_nobody", ""):
        answers = (put(credential), facts(credential), fetch(credential))
        assert [answer.status_code for answer in answers] == [403, 403, 403]
    assert not CompileCache.objects.exists()


def test_a_node_cannot_add_a_cache_for_another_version_or_rank() -> None:
    other = rows.version("2")
    second = member("n-00000002", "sim-70b-us-east-1-2", model_version=other)
    leader, follower = rows.node("n-00000003"), rows.node("n-00000004")
    rows.cell("sim-70b-us-east-1-3", leader, follower)
    assert put(member()).status_code == 200
    assert (facts(second).status_code, fetch(second).status_code) == (404, 404)
    assert fetch(credential_issue(kind="node", subject=follower.id, region="r", now=clock.now())).status_code == 404
    content_of(fetch(credential_issue(kind="node", subject=leader.id, region="r", now=clock.now())))


def test_a_cache_of_a_node_under_suspicion_is_not_handed_out() -> None:
    first, second = member(), member("n-00000002", "sim-70b-us-east-1-2")
    put(first)
    Node.objects.filter(id="n-00000001").update(state=NodeState.FAULTY.value)
    assert (facts(second).status_code, fetch(second).status_code) == (404, 404)
    Node.objects.filter(id="n-00000001").update(state=NodeState.READY.value)
    content_of(fetch(second))


def test_without_room_nothing_is_shared(settings: Any) -> None:
    node = member()
    settings.COMPILE_CACHE_STORE_GIB = 0
    assert (put(node).status_code, facts(node).status_code, fetch(node).status_code) == (403, 403, 403)


def test_a_node_uploads_one_cache_at_a_time() -> None:
    node = member()
    assert put(node).status_code == 200
    again = put(node, b"other", key=OTHER_KEY)
    assert (again.status_code, again.json()["error"]) == (425, "this node uploaded another compile cache a moment ago")


def test_new_caches_replace_the_least_recently_used(
    store: Path, monkeypatch: pytest.MonkeyPatch, django_capture_on_commit_callbacks: Any
) -> None:
    monkeypatch.setattr("models_registry.compile_caches.services.cache_room_bytes", lambda: 40)
    monkeypatch.setattr(services, "ONE_OF_A_NODE_EVERY", timedelta(0))
    node = member()
    for number in range(6):
        with django_capture_on_commit_callbacks(execute=True):
            assert put(node, b"content %d" % number, key=hashlib.sha256(bytes([number])).hexdigest()).status_code == 200
    left = CompileCache.objects.order_by("id")
    assert [row.packed_bytes for row in left] == [9, 9, 9, 9]
    assert {path.name for path in store.iterdir() if path.is_file()} == {row.digest[7:] for row in left}
    assert Event.objects.filter(kind="compile_cache.deleted").count() == 2


def test_admins_delete_caches_and_operators_only_see_them(store: Path, django_capture_on_commit_callbacks: Any) -> None:
    put(member())
    oscar, ada = calls(make_user("oscar", Role.OPERATOR)), calls(make_user("ada", Role.ADMIN))
    [row] = listed(oscar)
    assert (row["version"], row["instance_type"], row["node"]) == ("sim-70b@1", "local.cpu", "n-00000001")
    assert oscar.delete(f"/api/v1/compile-caches/{row['id']}").status_code == 403
    with django_capture_on_commit_callbacks(execute=True):
        assert ada.delete(f"/api/v1/compile-caches/{row['id']}").status_code == 200
    assert listed(ada) == []
    assert [path for path in store.iterdir() if path.is_file()] == []
    assert Event.objects.get(kind="compile_cache.deleted").actor == "ada"


def test_the_page_of_a_version_says_where_they_are(settings: Any) -> None:
    put(member())
    vera = Client()
    vera.force_login(make_user("vera", Role.VIEWER))

    def page() -> str:
        return vera.get("/models/sim-70b@1/").content.decode()

    assert f"Stored in {settings.COMPILE_CACHES} on the control plane&#x27;s hosts" in page()
    settings.COMPILE_CACHES = "s3://fleet/caches"
    assert "Stored in s3://fleet/caches; the caches of all versions take 7 B of 1.1 GB." in page()
    settings.COMPILE_CACHE_STORE_GIB = 0
    assert "SWITCHYARD_COMPILE_CACHE_STORE_GIB is 0" in page()


def test_the_page_of_a_version_lists_them_and_lets_admins_delete_one() -> None:
    put(member())
    row = CompileCache.objects.get()
    oscar, ada = Client(), Client()
    oscar.force_login(make_user("oscar", Role.OPERATOR))
    ada.force_login(make_user("ada", Role.ADMIN))
    delete = f"/compile-caches/{row.pk}/delete/"
    assert "n-00000001 of sim-70b-us-east-1-1" in (seen := oscar.get("/models/sim-70b@1/").content.decode())
    assert delete not in seen
    assert oscar.post(delete).status_code == 403
    assert delete in ada.get("/models/sim-70b@1/").content.decode()
    assert ada.post(delete).headers["Location"] == "/models/sim-70b@1/"
    assert "Engine sim has no compile cache." in ada.get("/models/sim-70b@1/").content.decode()
    assert ada.post(delete).status_code == 404


def listed(client: APIClient) -> Any:
    assert client.get("/api/v1/compile-caches?model=unknown").json()["results"] == []
    return client.get("/api/v1/compile-caches?model=sim-70b&version=1").json()["results"]


@pytest.fixture
def bucket(tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with s3_server() as url:
        client = empty_bucket(url, monkeypatch)
        settings.SWITCHYARD_HOME, settings.COMPILE_CACHES = tmp_path, f"s3://{BUCKET}/fleet/compile-caches"
        yield client


def keys(bucket: Any) -> list[str]:
    return [item["Key"] for item in bucket.list_objects_v2(Bucket=BUCKET).get("Contents", ())]


def test_in_a_bucket_they_are_stored_fetched_and_deleted_alike(
    tmp_path: Path, bucket: Any, monkeypatch: pytest.MonkeyPatch, django_capture_on_commit_callbacks: Any
) -> None:
    first, second, content = member(), member("n-00000002", "sim-70b-us-east-1-2"), os.urandom(300_000)
    assert put(first, content).json() == {"next": len(content)}
    row = CompileCache.objects.get()
    assert keys(bucket) == [f"fleet/compile-caches/{row.digest[7:]}"]
    assert [path for path in (tmp_path / "compile-caches").rglob("*") if path.is_file()] == []
    assert content_of(fetch(second)) == content
    assert AuditRecord.objects.count() == 1
    assert put(second, content).status_code == 409
    left = "fleet/compile-caches/" + "0" * 64
    for key in (left, "fleet/compile-caches/other/manifest.json", "fleet/compile-caches/notes"):
        bucket.put_object(Bucket=BUCKET, Key=key, Body=b"left")
    monkeypatch.setattr(services, "STALE_S", -1.0)
    assert put(second, b"other", key=OTHER_KEY).status_code == 200
    assert left not in keys(bucket)
    assert len(keys(bucket)) == 4
    with django_capture_on_commit_callbacks(execute=True):
        assert calls(make_user("ada", Role.ADMIN)).delete(f"/api/v1/compile-caches/{row.pk}").status_code == 200
    assert f"fleet/compile-caches/{row.digest[7:]}" not in keys(bucket)
    assert fetch(second).status_code == 404
    row = CompileCache.objects.get()
    bucket.delete_object(Bucket=BUCKET, Key=f"fleet/compile-caches/{row.digest[7:]}")
    assert fetch(second, OTHER_KEY).status_code == 404


@pytest.mark.long
def test_a_bucket_that_refuses_or_does_not_answer_is_named(
    bucket: Any, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = member()
    put(node)
    monkeypatch.setattr(artifacts, "PUSH_ATTEMPTS", 1)
    monkeypatch.setattr(services, "ONE_OF_A_NODE_EVERY", timedelta(0))
    settings.COMPILE_CACHES = "s3://gone/caches"
    refused = put(node, b"other", key=OTHER_KEY)
    assert (refused.status_code, refused.json()["error"]) == (409, "it cannot be stored: bucket gone does not exist")
    assert (fetch(node).status_code, fetch(node).json()) == (503, {"error": "bucket gone does not exist"})
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert put(node, b"other", key=OTHER_KEY).status_code == 425
    assert CompileCache.objects.count() == 1


@pytest.mark.filterwarnings("ignore:StreamingHttpResponse must consume")  # web itself is ASGI
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("where", ["folder", pytest.param("bucket", marks=pytest.mark.long)])
def test_what_one_node_compiled_another_one_starts_with(
    where: str, live_server: LiveServer, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if where == "bucket":
        request.getfixturevalue("bucket")
    first, second = Caches(live_server.url, tmp_path / "a"), Caches(live_server.url, tmp_path / "b", "n-2")
    for caches, credential in ((first, member("n-1")), (second, member("n-2", "sim-70b-us-east-1-2"))):
        caches.enrolment.store_credential(credential)
    held = first.start()
    code = os.urandom(PART_BYTES + 1000)
    compile_into(held, code)
    first.become_ready()
    os.close(held.lock)
    assert first.state == "uploaded to the fleet"
    held = second.start()
    assert (held.folder / "triton" / "kernel").read_bytes() == code
    assert second.state == "fetched from the fleet"
    os.close(held.lock)
