"""Builds are uploaded in verified parts: who may, what continues, what is refused, and that nothing stays behind."""

import json
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from rest_framework.test import APIClient

from audit.models import AuditRecord
from engine_agent.engines.artifacts import read_manifest, verify_folder
from engine_agent.protocol.engine_builds import BUILD_FILE, part_names
from kernel import clock
from kernel.access import Role
from kernel.models import Event
from kernel.refusals import Conflict
from models_registry.artifacts.planner import parse_place
from models_registry.builds.models import EngineBuild, EngineBuildUpload
from models_registry.builds.selectors import build_file
from models_registry.builds.services import store as store_places
from models_registry.builds.services import uploads
from models_registry.builds.services.uploads import upload_part_store, uploads_trim
from tests.controlplane.access.callers import calls, make_user
from tests.controlplane.api.client import rules
from tests.engine_agent.engines.builds.packed import facts, folder_of, small_build, tar_of
from tests.engine_agent.engines.s3_server import BUCKET, empty_bucket, s3_server

pytestmark = pytest.mark.django_db

UPLOADS = "/api/v1/engine-build-uploads"
Commits = Callable[..., Any]


@pytest.fixture
def ada() -> APIClient:
    return calls(make_user("ada", Role.ADMIN))


@pytest.fixture
def store(tmp_path: Path, settings: Any) -> Path:
    settings.SWITCHYARD_HOME = tmp_path / "home"
    settings.ARTIFACT_SOURCES = [(tmp_path / "store").as_uri()]
    settings.IMPORT_STORE = (tmp_path / "store").as_uri()
    return tmp_path / "store"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return small_build(tmp_path / "small")


def digests(folder: Path) -> list[str]:
    listed = read_manifest(folder).files
    return [listed[name] for name in sorted(listed) if name != BUILD_FILE]


def begin(client: APIClient, folder: Path, name: str = "llama-1", **changes: Any) -> Any:
    body = {"name": name, "facts": (folder / BUILD_FILE).read_text(), "digests": digests(folder), **changes}
    return client.post(UPLOADS, body, format="json")


def send(client: APIClient, folder: Path, number: int, content: bytes | None = None) -> Any:
    part = (folder / f"part-{number:04d}").read_bytes() if content is None else content
    kind = "application/octet-stream"
    return client.generic("PUT", f"{UPLOADS}/llama-1/part?number={number}", part, content_type=kind)  # type: ignore[arg-type] # it takes bytes


def files_of(store: Path) -> list[Path]:
    return [path for path in store.rglob("*") if path.is_file()]


def test_an_admin_uploads_a_build_part_by_part(ada: APIClient, folder: Path, store: Path) -> None:
    started = begin(ada, folder)
    assert started.status_code == 200, started.json()
    assert (started.json()["parts"], started.json()["parts_done"]) == (4, 0)
    for number in range(4):
        stored = send(ada, folder, number)
        assert (stored.status_code, stored.json().get("parts_done")) == (200, number + 1), stored.json()
    done = ada.post(f"{UPLOADS}/llama-1/finish")
    assert (done.status_code, done.json()["digest"]) == (200, read_manifest(folder).digest)
    row = EngineBuild.objects.get(name="llama-1")
    placed = Path(row.uri.removeprefix("file://"))
    assert placed.is_relative_to(store)
    assert verify_folder(placed, row.digest).files == read_manifest(folder).files
    assert {path.stat().st_mode & 0o777 for path in placed.iterdir()} == {0o644}
    assert placed.stat().st_mode & 0o777 == 0o755
    hex_digest = row.digest.partition(":")[2]
    assert build_file(hex_digest, "part-0003", [parse_place(store.as_uri())]) == placed / "part-0003"
    assert not EngineBuildUpload.objects.exists()
    assert len(files_of(store)) == 6
    recorded = AuditRecord.objects.order_by("number").values_list("action", "object")
    assert list(recorded) == [
        ("engine-build-upload.create", "engine-build-upload/llama-1"),
        ("engine-build-upload.finish", "engine-build-upload/llama-1"),
    ]
    kinds = Event.objects.order_by("id").values_list("kind", flat=True)
    assert list(kinds) == ["engine_build.upload_started", "engine_build.added"]


def test_an_interrupted_upload_continues_and_a_repeated_part_is_ignored(
    ada: APIClient, folder: Path, store: Path
) -> None:
    begin(ada, folder)
    send(ada, folder, 0)
    assert send(ada, folder, 2).status_code == 409
    wrong = send(ada, folder, 1, b"half a part")
    assert rules(wrong) == {"part": "digest"}
    assert send(ada, folder, 0, b"not read again").json()["parts_done"] == 1
    assert ada.post(f"{UPLOADS}/llama-1/finish").status_code == 409
    again = begin(ada, folder)
    assert (again.status_code, again.json()["parts_done"]) == (200, 1)
    for number in range(1, 4):
        send(ada, folder, number)
    assert send(ada, folder, 4, b"").status_code == 409
    assert ada.post(f"{UPLOADS}/llama-1/finish").status_code == 200
    assert begin(ada, folder).status_code == 409, "the name is taken"
    known = begin(ada, folder, "llama-2")
    assert known.json()["parts_done"] == 4, "the store has these bytes"
    assert ada.post(f"{UPLOADS}/llama-2/finish").status_code == 200
    assert len(set(EngineBuild.objects.values_list("uri", flat=True))) == 1


def test_only_admins_upload_and_nothing_is_stored_for_others(ada: APIClient, folder: Path, store: Path) -> None:
    oscar = calls(make_user("oscar", Role.OPERATOR))
    assert begin(oscar, folder).status_code == 403
    begin(ada, folder)
    assert send(oscar, folder, 0).status_code == 403
    assert send(calls(None), folder, 0).status_code == 401
    assert oscar.post(f"{UPLOADS}/llama-1/finish").status_code == 403
    assert oscar.delete(f"{UPLOADS}/llama-1").status_code == 403
    assert files_of(store) == []
    assert oscar.get(f"{UPLOADS}/llama-1").json()["parts_done"] == 0


def test_a_hostile_archive_is_refused_at_its_part_and_leaves_nothing(
    ada: APIClient, store: Path, tmp_path: Path, django_capture_on_commit_callbacks: Commits
) -> None:
    archive = tar_of(("big", b"x" * 2000), ("lib", "../../etc"), ("lib/cron", b"x"))
    folder = folder_of(tmp_path / "hostile", archive, 4, unpacked_bytes=5000)
    begin(ada, folder)
    with django_capture_on_commit_callbacks(execute=True):
        answers = [send(ada, folder, number) for number in range(2)]
    assert [answer.status_code for answer in answers] == [200, 400]
    assert rules(answers[1]) == {"part": "build"}
    assert "'lib' in the archive links to '../../etc'" in answers[1].content.decode()
    assert (files_of(store), EngineBuildUpload.objects.count()) == ([], 0)
    assert Event.objects.get(kind="engine_build.upload_refused").detail["parts_done"] == 1


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"digests": []}, {"digests": "build"}),
        ({"digests": ["0" * 64] * 3}, {"digests": "build"}),
        ({"digests": ["../" + "0" * 61] * 4}, {"digests.0": "invalid"}),
        ({"facts": "{}"}, {"facts": "build"}),
        ({"name": "../up"}, {"name": "invalid"}),
    ],
)
def test_what_no_build_states_is_refused_before_a_byte_is_sent(
    ada: APIClient, folder: Path, store: Path, changes: dict[str, Any], refused: dict[str, str]
) -> None:
    found = rules(begin(ada, folder, **changes))
    assert refused.items() <= found.items()
    assert not EngineBuildUpload.objects.exists()


def test_size_room_and_number_of_uploads_have_limits(
    ada: APIClient, folder: Path, store: Path, tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stated = json.loads((folder / BUILD_FILE).read_text())
    beyond = json.dumps({**stated, "packed_bytes": 5 * 65 * 1024**2})
    assert rules(begin(ada, folder, facts=beyond)) == {"facts": "size"}
    settings.ARTIFACT_MAX_GIB = 0
    assert rules(begin(ada, folder)) == {"facts": "size"}
    settings.ARTIFACT_MAX_GIB = 1
    monkeypatch.setattr(store_places, "RESERVE_BYTES", 2**60)
    full = begin(ada, folder)
    assert (full.status_code, "has room for 0 B: free space" in full.content.decode()) == (409, True)
    monkeypatch.undo()
    assert begin(ada, folder).status_code == 200
    assert "this content is being uploaded under another name" in begin(ada, folder, "llama-2").content.decode()
    other = small_build(tmp_path / "other", version="2")
    assert "another build is being uploaded as llama-1" in begin(ada, other).content.decode()
    monkeypatch.setattr(uploads, "MOST_OPEN", 1)
    assert "1 uploads are open" in begin(ada, other, "llama-2").content.decode()
    settings.IMPORT_STORE = ""
    assert "SWITCHYARD_ARTIFACT_SOURCES is empty" in begin(ada, other, "llama-2").content.decode()


def test_abandoned_and_deleted_uploads_leave_nothing(
    ada: APIClient, folder: Path, store: Path, django_capture_on_commit_callbacks: Commits
) -> None:
    begin(ada, folder)
    send(ada, folder, 0)
    assert uploads_trim(now=clock.now() + timedelta(hours=23)) == 0
    with django_capture_on_commit_callbacks(execute=True):
        assert uploads_trim(now=clock.now() + timedelta(hours=25)) == 1
    assert (files_of(store), EngineBuildUpload.objects.count()) == ([], 0)
    begin(ada, folder)
    send(ada, folder, 0)
    with django_capture_on_commit_callbacks(execute=True):
        assert ada.delete(f"{UPLOADS}/llama-1").status_code == 200
    assert files_of(store) == []
    kinds = Event.objects.filter(kind__startswith="engine_build").order_by("id").values_list("kind", flat=True)
    assert [kind.partition("upload_")[2] for kind in kinds] == ["started", "abandoned", "started", "deleted"]


def test_an_upload_that_continues_while_it_is_trimmed_is_kept(
    ada: APIClient, folder: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(ada, folder)
    remove = uploads._remove

    def later(*arguments: Any, **seen: Any) -> bool:
        send(ada, folder, 0)
        return remove(*arguments, **seen)

    monkeypatch.setattr(uploads, "_remove", later)
    assert uploads_trim(now=clock.now() + timedelta(hours=25)) == 0
    assert EngineBuildUpload.objects.get().parts_done == 1


def test_files_that_no_upload_knows_are_deleted_after_a_day(ada: APIClient, folder: Path, store: Path) -> None:
    begin(ada, folder)
    send(ada, folder, 0)
    begun = next((store / ".uploads").iterdir())
    for name in ("0" * 64, "1" * 64, "mine"):
        (store / ".uploads" / name).mkdir()
    for name in (".arriving-old", ".arriving-new"):
        (store / ".uploads" / name).touch()
    for old in (begun, *(store / ".uploads" / name for name in ("0" * 64, "mine", ".arriving-old"))):
        os.utime(old, (1, 1))
    assert uploads_trim(now=clock.now()) == 1
    left = {path.name for path in (store / ".uploads").iterdir()}
    assert left == {begun.name, "1" * 64, "mine", ".arriving-new"}


def test_a_part_of_an_upload_that_was_deleted_meanwhile_is_not_kept(ada: APIClient, folder: Path, store: Path) -> None:
    begin(ada, folder)

    def chunks() -> Any:
        EngineBuildUpload.objects.all().delete()
        yield (folder / "part-0000").read_bytes()

    with pytest.raises(Conflict, match="was completed or deleted meanwhile"):
        upload_part_store(name="llama-1", number=0, chunks=chunks(), now=clock.now())
    assert files_of(store) == []


def test_a_late_part_of_a_deleted_upload_does_not_disturb_the_next_one(
    ada: APIClient, folder: Path, store: Path
) -> None:
    begin(ada, folder)

    def chunks() -> Any:
        EngineBuildUpload.objects.all().delete()
        begin(ada, folder)
        assert send(ada, folder, 0).json()["parts_done"] == 1
        yield (folder / "part-0000").read_bytes()

    with pytest.raises(Conflict, match="was completed or deleted meanwhile"):
        upload_part_store(name="llama-1", number=0, chunks=chunks(), now=clock.now())
    for number in range(1, 4):
        send(ada, folder, number)
    assert ada.post(f"{UPLOADS}/llama-1/finish").status_code == 200


def test_a_part_that_still_arrives_when_the_build_is_completed_does_not_become_a_file_of_it(
    ada: APIClient, folder: Path, store: Path
) -> None:
    begin(ada, folder)
    for number in range(3):
        send(ada, folder, number)

    def chunks() -> Any:
        assert send(ada, folder, 3).json()["parts_done"] == 4
        assert ada.post(f"{UPLOADS}/llama-1/finish").status_code == 200
        yield (folder / "part-0003").read_bytes()

    with pytest.raises(Conflict, match="was completed or deleted meanwhile"):
        upload_part_store(name="llama-1", number=3, chunks=chunks(), now=clock.now())
    assert len(files_of(store)) == 6
    verify_folder(Path(EngineBuild.objects.get().uri.removeprefix("file://")))


def test_a_process_killed_before_the_build_is_added_leaves_an_upload_that_can_be_finished(
    ada: APIClient, folder: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(ada, folder)
    for number in range(4):
        send(ada, folder, number)
    with monkeypatch.context() as killed:
        killed.setattr(uploads, "build_read", lambda *_: pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception):
            uploads.upload_finish(name="llama-1", actor="ada", now=clock.now())
    assert begin(ada, folder).json()["parts_done"] == 4
    assert ada.post(f"{UPLOADS}/llama-1/finish").status_code == 200
    assert not EngineBuildUpload.objects.exists()


def test_a_build_with_a_missing_part_is_never_complete(ada: APIClient, folder: Path, store: Path) -> None:
    begin(ada, folder)
    for number in range(4):
        send(ada, folder, number)
    next(store.rglob("part-0002")).unlink()
    done = ada.post(f"{UPLOADS}/llama-1/finish")
    assert (done.status_code, "part-0002 is missing; try again, or delete it" in done.content.decode()) == (409, True)
    assert list(store.rglob("manifest.json")) == []


def test_files_of_a_build_are_deleted_with_the_last_name_of_it(
    ada: APIClient, folder: Path, store: Path, settings: Any, django_capture_on_commit_callbacks: Commits
) -> None:
    def upload(name: str) -> None:
        begin(ada, folder, name)
        for number in range(4):
            ada.generic(
                "PUT", f"{UPLOADS}/{name}/part?number={number}", (folder / f"part-000{number}").read_bytes(),  # type: ignore[arg-type] # it takes bytes
                content_type="application/octet-stream",
            )  # fmt: skip
        assert ada.post(f"{UPLOADS}/{name}/finish").status_code == 200

    def delete(path: str) -> None:
        with django_capture_on_commit_callbacks(execute=True):
            assert ada.delete(f"/api/v1/{path}").status_code == 200

    settings.ARTIFACT_SOURCES = [*settings.ARTIFACT_SOURCES, folder.parent.as_uri()]
    upload("llama-1")
    upload("llama-2")
    ada.post("/api/v1/engine-builds", {"name": "mine", "uri": folder.as_uri()}, format="json")
    begin(ada, folder, "llama-3")
    for name in ("mine", "llama-1", "llama-2"):
        delete(f"engine-builds/{name}")
    assert len(files_of(store)) == 6, "the upload of llama-3 needs them"
    verify_folder(folder)
    delete("engine-build-uploads/llama-3")
    assert files_of(store) == []
    upload("llama-1")
    assert len(files_of(store)) == 6


def test_a_name_that_was_taken_meanwhile_ends_no_upload_and_its_files_can_be_deleted(
    ada: APIClient, folder: Path, store: Path, settings: Any, django_capture_on_commit_callbacks: Commits
) -> None:
    settings.ARTIFACT_SOURCES = [*settings.ARTIFACT_SOURCES, folder.parent.as_uri()]
    begin(ada, folder)
    for number in range(4):
        send(ada, folder, number)
    ada.post("/api/v1/engine-builds", {"name": "llama-1", "uri": folder.as_uri()}, format="json")
    assert "llama-1 exists already" in ada.post(f"{UPLOADS}/llama-1/finish").content.decode()
    assert EngineBuildUpload.objects.count() == 1
    with django_capture_on_commit_callbacks(execute=True):
        ada.delete(f"{UPLOADS}/llama-1")
    assert files_of(store) == []


@pytest.mark.long
def test_a_bucket_holds_the_parts_and_no_disk_does(
    ada: APIClient, folder: Path, store: Path, settings: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    django_capture_on_commit_callbacks: Commits,
) -> None:  # fmt: skip
    with s3_server() as url:
        client = empty_bucket(url, monkeypatch)
        settings.IMPORT_STORE, settings.ARTIFACT_SOURCES = f"s3://{BUCKET}/store", [f"s3://{BUCKET}"]

        def whole() -> list[str]:
            return [item["Key"] for item in client.list_objects_v2(Bucket=BUCKET).get("Contents", ())]

        def keys() -> list[str]:
            return [key.rpartition("/")[2] for key in whole()]

        begin(ada, folder)
        send(ada, folder, 0)
        with django_capture_on_commit_callbacks(execute=True):
            ada.delete(f"{UPLOADS}/llama-1")
        assert keys() == []
        begin(ada, folder)
        for number in range(4):
            assert send(ada, folder, number).status_code == 200
        part = next(key for key in whole() if key.endswith("part-0002"))
        content = client.get_object(Bucket=BUCKET, Key=part)["Body"].read()
        client.delete_object(Bucket=BUCKET, Key=part)
        assert "part-0002 is missing" in ada.post(f"{UPLOADS}/llama-1/finish").content.decode()
        assert "manifest.json" not in keys()
        client.put_object(Bucket=BUCKET, Key=part, Body=content)
        done = ada.post(f"{UPLOADS}/llama-1/finish")
        assert done.status_code == 200, done.json()
        assert sorted(keys()) == sorted(["build.json", "manifest.json", *part_names(facts(parts=4))])
        assert files_of(tmp_path / "home") == []
        assert EngineBuild.objects.get().ordered().uri.startswith(f"s3://{BUCKET}/store/builds/")
        orphan = {"Bucket": BUCKET, "Key": f"store/builds/{'0' * 64}/part-0000"}
        client.put_object(**orphan, Body=b"x")
        monkeypatch.setattr(store_places, "ORPHAN_S", -1.0)
        assert uploads_trim(now=clock.now()) == 1
        assert len(keys()) == 6
        with django_capture_on_commit_callbacks(execute=True):
            assert ada.delete("/api/v1/engine-builds/llama-1").status_code == 200
        assert keys() == []
