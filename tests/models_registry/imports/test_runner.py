"""Imports from a hub on this machine through the real job: what arrives, what is resumed, what is refused."""

import asyncio
import hashlib
import json
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from engine_agent.engines.artifacts import verify_folder
from engine_agent.protocol.manifest import MANIFEST_NAME, BadArtifact
from engine_agent.protocol.messages import Artifact
from kernel.lease_loop import in_thread
from kernel.models import Event as EventRow
from kernel.refusals import Conflict, InvalidInput
from models_registry.artifacts.planner import ArtifactLimits, parse_place
from models_registry.artifacts.services.sources import artifact_open
from models_registry.imports.models import ModelImport
from models_registry.imports.planner import CannotImport, ImportState
from models_registry.imports.services import download, hub, imports, runner, store
from models_registry.imports.services.imports import (
    import_cancel,
    import_claim,
    import_draft,
    import_retry,
)
from models_registry.imports.services.runner import ImportWork, ModelImporter
from models_registry.versions.models import ModelVersion
from tests.engine_agent.engines.s3_server import BUCKET, empty_bucket, s3_server
from tests.fleet.rows import NOW
from tests.models_registry.imports.hub import COMMIT, CONFIG, FILES, TOKEN, LocalHub, listed, local_hub
from tests.models_registry.imports.jobs import configured_hub, run, start

pytestmark = [pytest.mark.slow, pytest.mark.django_db]
WANTED = {"config.json", "tokenizer.json", "model.safetensors"}


@pytest.fixture
def server(tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    monkeypatch.setattr(download, "PAUSES_S", (0.0, 0.0, 0.0))
    with configured_hub(settings, tmp_path) as served:
        yield served


def complete(row: ModelImport) -> set[str]:
    """Files whose bytes are all on disk, whether noted or not."""
    staging = store.staging_of(row, imports.import_store())
    known = {path for path in WANTED if (staging.files / path).exists()}
    return known | {path for path in WANTED if staging.part_bytes(path) == len(FILES[path])}


def folder(row: ModelImport) -> Path:
    return Path(row.artifact_uri.removeprefix("file://"))


def test_a_model_arrives_verified_at_one_commit_and_is_drafted(server: LocalHub, tmp_path: Path) -> None:
    row = run(start(draft="smol@1"))
    assert (row.state, row.revision, row.license) == ("done", COMMIT, "apache-2.0")
    assert row.artifact_uri == f"file://{tmp_path}/models/hf/org/model/{COMMIT}"
    assert row.configuration == {
        "model_type": "llama", "attention_heads": 9, "kv_heads": 3, "layers": 30, "context_length": 8192,
    }  # fmt: skip
    manifest = verify_folder(folder(row), row.artifact_digest)
    assert manifest.files.keys() == WANTED
    assert manifest.source == {"repository": "hf://org/model@main", "revision": COMMIT, "license": "apache-2.0"}
    assert (row.files_done, row.files_total, row.bytes_done) == (3, 3, row.bytes_total)
    draft = ModelVersion.objects.get(model_id="smol", version="1")
    assert (draft.state, draft.artifact_digest, draft.engine) == ("draft", row.artifact_digest, "vllm")
    assert (draft.attention_heads, draft.kv_heads, draft.layers, draft.context_length) == (9, 3, 30, 8192)
    limits, place = ArtifactLimits(), parse_place(f"file://{tmp_path}/models")
    assert artifact_open(Artifact(draft.artifact_uri, draft.artifact_digest), (place,), limits).sizes.keys() == WANTED
    assert not (tmp_path / "models" / store.UNFINISHED / str(row.pk)).exists()
    assert {path.stat().st_mode & 0o777 for path in folder(row).iterdir()} == {0o644}
    kinds = EventRow.objects.filter(kind__startswith="import.").order_by("id").values_list("kind", flat=True)
    assert list(kinds) == ["import.queued", "import.running", "import.done"]
    assert not any("modeling_custom" in path or "README" in path for path, _, _ in server.asked)


@pytest.mark.parametrize("config", [b"{}", b"[]", b"{", b'{"num_hidden_layers": -1}', b"[" * 200_000])
def test_a_configuration_that_cannot_be_read_leaves_the_draft_without_numbers(server: LocalHub, config: bytes) -> None:
    server.files["config.json"] = config
    row = run(start(draft="smol@1"))
    assert (row.state, row.configuration) == ("done", {})
    assert ModelVersion.objects.get().layers is None


def test_a_model_with_a_vision_tower_is_drafted_for_images(server: LocalHub) -> None:
    server.files["config.json"] = json.dumps({**CONFIG, "vision_config": {"depth": 2}}).encode()
    row = run(start(draft="smol@1"))
    assert row.configuration["modalities"] == ["image"]
    assert ModelVersion.objects.get().modalities == ["image"]


def test_modelscope_answers_by_the_same_seam(server: LocalHub, settings: Any) -> None:
    settings.MODELSCOPE_TOKEN = TOKEN
    row = run(start("modelscope://org/model"))
    assert (row.state, row.license, row.tags) == ("done", "Apache License 2.0", ["text"])
    assert verify_folder(folder(row), row.artifact_digest).files.keys() == WANTED
    assert {credentials for _, _, credentials in server.asked} == {f"m_session_id={TOKEN}"}


@pytest.mark.parametrize("fault", ["broken", "500", "429", "whole", "other range"])
def test_an_interrupted_download_continues(server: LocalHub, fault: str) -> None:
    server.faults["model.safetensors"] = ["broken", fault]
    row = run(start())
    assert row.state == "done", row.reason
    verify_folder(folder(row), row.artifact_digest)
    asked = server.requests_for("model.safetensors")
    half = len(FILES["model.safetensors"]) // 2
    assert asked[:2] == ["", f"bytes={half}-"]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("wrong", "model.safetensors has the SHA-256 .* but the hub lists .*: the hub's content is damaged"),
        ("longer", "model.safetensors is longer than the 1024000 bytes that the hub lists"),
        ("gzip", "model.safetensors: the hub compresses it"),
    ],
)
def test_bytes_other_than_the_listed_ones_are_never_stored(server: LocalHub, fault: str, said: str) -> None:
    server.faults["model.safetensors"] = [fault, fault]
    row = run(start())
    assert row.state == "failed"
    assert re.search(said, row.reason), row.reason
    assert not row.artifact_uri
    server.faults.clear()
    assert run(import_retry(import_id=row.pk, actor="bob", now=NOW)).state == "done"


def test_wrong_bytes_of_the_right_size_are_fetched_once_more(server: LocalHub) -> None:
    server.faults["model.safetensors"] = ["wrong"]
    server.faults["config.json"] = ["wrong"]
    row = run(start())
    assert row.state == "done"
    assert verify_folder(folder(row)).files["config.json"] == hashlib.sha256(FILES["config.json"]).hexdigest()


def test_the_token_stays_with_the_hub_and_out_of_sight(
    server: LocalHub, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings.HF_TOKEN, server.gated = TOKEN, True
    with local_hub() as cdn:
        server.elsewhere = cdn.url.replace("127.0.0.1", "localhost") + "/cdn/{path}?signature=secret"
        row = run(start())
    assert row.state == "done", row.reason
    assert {credentials for _, _, credentials in server.asked} == {f"Bearer {TOKEN}"}
    assert [(path, credentials) for path, _, credentials in cdn.asked] == [("/cdn/model.safetensors", "")]
    server.faults["model.safetensors"], server.elsewhere = ["broken"] * 9, "http://127.0.0.1:1/{path}?signature=secret"
    again = run(start("hf://org/model@v1.0"))
    assert again.state == "done"  # the same commit is stored already
    shown = [caplog.text, *(json.dumps(row.__dict__, default=str) for row in ModelImport.objects.all())]
    assert not any(TOKEN in text or "signature" in text for text in shown)


def test_an_unreachable_host_behind_a_redirect_is_named_without_its_signature(server: LocalHub) -> None:
    server.elsewhere = "http://127.0.0.1:1/{path}?signature=secret"
    row = run(start())
    assert (row.state, row.troubles) == ("running", 1)
    assert row.reason == "model.safetensors: the hub cannot be reached (127.0.0.1); next try in 5 s"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gated": True}, "the repository is gated: request access on its page, and set SWITCHYARD_HF_TOKEN"),
        ({"known": False}, "the repository does not exist, or is private"),
        ({"revisions": ()}, "no such revision: name a branch, tag or commit"),
        ({"files": {"README.md": b""}}, "no safetensors and no GGUF"),
        ({"tree": [listed("../x.safetensors", b"x")]}, "'../x.safetensors', which is outside of the artifact"),
        ({"tree": [listed("config.json", b"x")] * 2}, "lists 'config.json' twice"),
        ({"tree": [listed(f"{n}.txt", b"") for n in range(10_001)]}, "more than 10000 files"),
        ({"elsewhere": "ftp://elsewhere/{path}"}, "redirects to something other than HTTPS"),
        ({"elsewhere": "/org/model/resolve/" + COMMIT + "/{path}"}, "more than 5 redirects"),
    ],
)
def test_what_can_never_arrive_fails_with_what_to_do(server: LocalHub, change: dict[str, Any], said: str) -> None:
    for name, value in change.items():
        setattr(server, name, value)
    row = run(start())
    assert row.state == "failed"
    assert said in row.reason
    assert not row.artifact_uri


@pytest.mark.parametrize("tree", [{"error": "x"}, [{"type": "file", "path": 3}], [3], "text"])
def test_a_listing_that_cannot_be_read_is_asked_for_again(server: LocalHub, tree: Any) -> None:
    server.tree = tree
    row = run(start())
    assert (row.state, row.troubles) == ("running", 1)
    assert "list of files cannot be read" in row.reason


def test_a_long_listing_is_read_page_by_page(server: LocalHub) -> None:
    server.page = 2
    assert run(start()).state == "done"
    assert sum("/tree/" in path for path, _, _ in server.asked) == 3


def test_a_hub_that_stays_away_is_given_up_with_its_parts_kept(server: LocalHub) -> None:
    server.faults["model.safetensors"] = ["broken"] + ["503"] * 100
    row = start()
    reasons = [run(row).reason]
    while row.state == ImportState.RUNNING:
        reasons.append(run(row).reason)
    assert row.state == "failed"
    assert "next try in 5 s" in reasons[0]
    assert 6 <= len(reasons) <= 8  # another file that arrives is progress
    assert row.reason == "model.safetensors: the hub answered 503; gave up after 6 tries. Retry to continue"
    server.faults.clear()
    server.asked.clear()
    assert run(import_retry(import_id=row.pk, actor="ada", now=NOW)).state == "done"
    assert server.requests_for("model.safetensors") == [f"bytes={len(FILES['model.safetensors']) // 2}-"]
    assert server.requests_for("config.json") == []


class Killed(BaseException):
    """SIGKILL, as far as a thread can have one."""


STEPS: tuple[tuple[Any, str], ...] = (
    (runner, "choose_files"), (runner, "import_pin"), (runner, "import_file_stored"), (runner, "import_finish"),
    (store.FolderStore, "put"), (store.FolderStore, "finish"), (store.Staging, "check_room"),
    (store.Staging, "remove"), (imports, "import_draft"),
)  # fmt: skip


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize(("place", "name"), STEPS, ids=[name for _, name in STEPS])
def test_a_kill_at_any_step_loses_nothing(
    server: LocalHub, monkeypatch: pytest.MonkeyPatch, place: Any, name: str, is_before: bool
) -> None:
    real: Callable[..., Any] = getattr(place, name)

    def killed(*arguments: Any, **named: Any) -> Any:
        if not is_before:
            real(*arguments, **named)
        raise Killed

    row = start(draft="smol@1")
    with monkeypatch.context() as patched:
        patched.setattr(place, name, killed)
        with pytest.raises(Killed):
            run(row)
    row.refresh_from_db()
    known = complete(row)
    server.asked.clear()
    row = row if row.state == ImportState.DONE else run(row)
    assert row.state == "done", row.reason
    verify_folder(folder(row), row.artifact_digest)
    assert not any(server.requests_for(path) for path in known)
    if name not in ("import_draft", "import_finish", "remove"):
        assert ModelVersion.objects.filter(model_id="smol", version="1").count() == 1


def test_a_kill_in_the_middle_of_a_file_costs_what_was_not_written(server: LocalHub) -> None:
    halt, half = Event(), len(FILES["model.safetensors"]) // 2
    server.faults["model.safetensors"] = ["broken", "broken"]
    server.at_bytes = lambda path: halt.set() if len(server.requests_for("model.safetensors")) == 2 else None
    row = run(start(), halt=halt)
    assert row.state == "running"
    server.at_bytes = lambda path: None
    server.asked.clear()
    known = complete(row)
    assert run(row).state == "done"
    assert int(server.requests_for("model.safetensors")[0].removeprefix("bytes=").removesuffix("-")) >= half
    assert not any(server.requests_for(path) for path in known)


def test_a_cancelled_import_stops_and_leaves_nothing(server: LocalHub, tmp_path: Path) -> None:
    row = start()

    def cancel(path: str) -> None:
        halt.set()

    halt = Event()
    server.at_bytes = cancel
    run(row, halt=halt)
    assert import_cancel(import_id=row.pk, actor="ada", now=NOW).state == "cancelled"
    with pytest.raises(Conflict, match="has ended"):
        import_cancel(import_id=row.pk, actor="ada", now=NOW)
    unfinished = tmp_path / "models" / store.UNFINISHED / str(row.pk)
    assert unfinished.exists()
    importer = ModelImporter(now=lambda: NOW)
    assert importer.is_open(NOW)
    assert importer.claim(NOW) == []
    assert not unfinished.exists()
    assert not importer.is_open(NOW)
    server.at_bytes = lambda path: None
    assert run(import_retry(import_id=row.pk, actor="ada", now=NOW)).state == "done"


def test_a_job_that_lost_its_lease_writes_nothing(server: LocalHub) -> None:
    row = start()
    stale = import_claim(now=NOW)
    assert stale is not None
    assert import_claim(now=NOW) is None
    assert run(row).state == "done"
    asked = len(server.asked)
    ImportWork(stale, Event(), lambda: NOW).run()
    row.refresh_from_db()
    assert (row.state, row.fence) == ("done", 2)
    assert len(server.asked) <= asked + 2


def test_a_paused_job_keeps_others_out_of_its_files(server: LocalHub) -> None:
    row = start()
    place = store.staging_of(row, parse_place(f"file://{Path(imports.import_store().path)}"))
    with place.held() as is_held:
        assert is_held
        assert run(row).state == "running"
        assert server.asked == []
    assert run(row).state == "done"


def test_a_full_disk_is_named_before_the_first_byte(server: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=store.RESERVE_BYTES + 1_000_000))
    row = run(start())
    assert row.state == "failed"
    assert "has 1.1 GB free, but the import needs 1.0 MB and a reserve of 1.1 GB: free space and retry" in row.reason
    assert server.requests_for("model.safetensors") == []


def test_another_artifact_in_its_place_is_never_overwritten(server: LocalHub) -> None:
    row = run(start())
    (folder(row) / "config.json").write_text("other")
    listed_files = json.loads((folder(row) / MANIFEST_NAME).read_text())
    assert run(start()).state == "done"  # the manifest decides; validation reads the files
    del listed_files["files"]["tokenizer.json"]
    (folder(row) / MANIFEST_NAME).write_text(json.dumps(listed_files))
    again = run(start())
    assert again.state == "failed"
    (folder(row) / MANIFEST_NAME).unlink()
    assert "has no manifest.json" in run(start()).reason
    with pytest.raises(BadArtifact):
        verify_folder(folder(row))


def test_a_bucket_holds_the_artifact_and_no_disk_does(
    server: LocalHub, tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_server() as url:
        empty_bucket(url, monkeypatch)
        settings.IMPORT_STORE = f"s3://{BUCKET}/imports"
        settings.ARTIFACT_SOURCES = [settings.IMPORT_STORE]
        row = start()
        with monkeypatch.context() as patched:
            patched.setattr(store.BucketStore, "finish", _kill)
            with pytest.raises(Killed):
                run(row)
        server.asked.clear()
        row = run(row)
        assert row.state == "done", row.reason
        assert server.asked == []
        assert row.artifact_uri == f"s3://{BUCKET}/imports/hf/org/model/{COMMIT}"
        place = parse_place(f"s3://{BUCKET}/imports")
        opened = artifact_open(Artifact(row.artifact_uri, row.artifact_digest), (place,), ArtifactLimits())
        assert opened.manifest.files.keys() == WANTED
        assert row.configuration["layers"] == CONFIG["num_hidden_layers"]
        assert run(start()).state == "done"
    assert not (tmp_path / "home" / store.UNFINISHED / str(row.pk)).exists()


def _kill(*_: Any) -> None:
    raise Killed


@pytest.mark.django_db(transaction=True)
@pytest.mark.asyncio
async def test_the_loop_of_process_jobs_imports(server: LocalHub) -> None:
    importer = ModelImporter()
    row = await in_thread(start)
    assert await importer.step() == 1
    await asyncio.wait_for(importer.idle(), 30)
    await in_thread(row.refresh_from_db)
    assert row.state == "done", row.reason
    assert await importer.step() == 0
    await importer.stop()


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({"source": "llama"}, "source", "it must be hf://ORG/NAME@REVISION"),
        ({"draft": "llama"}, "draft", "it must be MODEL@VERSION"),
        ({"draft": "a/b@1"}, "draft", "it must be MODEL@VERSION"),
        ({"engine": "vlm"}, "engine", "engine is 'vlm'"),
    ],
)
def test_bad_requests_are_refused_by_field(server: LocalHub, fields: dict[str, str], field: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said) as refused:
        start(**fields)
    assert refused.value.field == field


def test_nothing_leaves_unless_a_hub_is_configured(server: LocalHub, settings: Any) -> None:
    settings.HF_ENDPOINT = ""
    with pytest.raises(InvalidInput, match=r"set SWITCHYARD_HF_ENDPOINT to https://huggingface\.co or a mirror"):
        start()
    for wrong in ("ftp://hub", "hub.example", "https://user:secret@hub.example"):
        settings.HF_ENDPOINT = wrong
        with pytest.raises(InvalidInput, match="the endpoint of hf:// must be https://HOST") as refused:
            start()
        assert "secret" not in str(refused.value)
    settings.HF_ENDPOINT, settings.ARTIFACT_SOURCES = server.url, ["s3://other"]
    with pytest.raises(InvalidInput, match=r"SWITCHYARD_IMPORT_STORE: .* is outside the allowed sources"):
        start()
    assert ModelImport.objects.count() == 0
    assert server.asked == []


def test_the_same_import_runs_once_and_few_wait(server: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    start("hf://org/model")
    with pytest.raises(Conflict, match="is queued already"):
        start("hf://org/model@main")
    monkeypatch.setattr(imports, "MOST_OPEN", 1)
    with pytest.raises(Conflict, match="1 imports are waiting"):
        start("hf://org/other")


def test_a_draft_that_exists_does_not_fail_the_import(server: LocalHub) -> None:
    first = run(start(draft="smol@1"))
    second = run(start(draft="smol@1"))
    assert (first.state, second.state) == ("done", "done")
    assert "smol@1 was not drafted: smol already has a version '1'" in second.reason
    assert import_draft(import_id=second.pk, draft="smol@2", engine="", actor="ada", now=NOW) == "smol@2"
    queued = start("hf://org/model@v1.0")
    with pytest.raises(Conflict, match="can be drafted once it is done"):
        import_draft(import_id=queued.pk, draft="smol@3", engine="", actor="ada", now=NOW)


def test_a_public_hub_cannot_lead_to_private_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {"hub.example": "93.184.216.34", "cdn.example": "93.184.216.35", "inside.example": "10.0.0.7"}
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: [(2, 1, 6, "", (addresses.get(host, host), 0))])
    api = hub.HuggingFace(None, hub.HubAccess("https://hub.example"))  # type: ignore[arg-type]
    assert api._followed("https://hub.example/a", "https://cdn.example/b", "a") == "https://cdn.example/b"
    assert api._followed("https://hub.example/a", "/b", "a") == "https://hub.example/b"
    with pytest.raises(CannotImport, match="something other than HTTPS"):
        api._followed("https://hub.example/a", "https://cdn.example:99999/", "a")
    for location in (
        "https://inside.example/",
        "https://169.254.169.254/",
        "https://127.0.0.1/",
        "http://cdn.example/",
    ):
        with pytest.raises(CannotImport, match="not followed"):
            api._followed("https://hub.example/a", location, "a")
    mirror = hub.HuggingFace(None, hub.HubAccess("https://inside.example"))  # type: ignore[arg-type]
    assert mirror._followed("https://inside.example/a", "https://10.0.0.8/b", "a") == "https://10.0.0.8/b"
    with pytest.raises(CannotImport, match="private address"):
        mirror._followed("https://inside.example/a", "https://169.254.169.254/", "a")
