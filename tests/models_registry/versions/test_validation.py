"""A draft is validated only by evidence, in slices that survive a crash."""

import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from engine_agent.protocol.manifest import MANIFEST_NAME
from kernel.leases import lease_take
from kernel.models import Event
from kernel.refusals import Conflict
from models_registry.artifacts.planner import ArtifactLimits, parse_place
from models_registry.artifacts.services.sources import FolderSource, SourceTrouble, file_sha256
from models_registry.versions.models import ModelVersion, Validation
from models_registry.versions.services import validation as service
from models_registry.versions.services.drafts import draft_change, draft_delete
from models_registry.versions.services.validation import LEASE, Slice, validation_start, validations_advance
from tests.fleet.rows import NOW
from tests.models_registry.rows import FILES, Clock, artifact, draft

pytestmark = [pytest.mark.django_db, pytest.mark.slow]

LIMITS = ArtifactLimits()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "sources" / "toy"
    artifact(folder)
    return folder


def of_folder(folder: Path, version: str = "1", **columns: Any) -> ModelVersion:
    plain = {"engine": "vllm", "parallelism": {"local.cpu": {}}, "engine_options": {}, "artifact_uri": folder.as_uri()}
    return draft(version, **{**plain, **columns})


def start(row: ModelVersion) -> Validation:
    return validation_start(version_id=row.pk, actor="ada", now=NOW)


def advance(folder: Path, clock: Clock | None = None, limits: ArtifactLimits = LIMITS, **slice_: Any) -> Validation:
    """Runs one slice over artifacts next to this folder and returns the newest validation."""
    sources = (parse_place(folder.parent.as_uri()),)
    validations_advance(Slice(sources, limits, clock or Clock(), **slice_))
    return Validation.objects.latest("id")


def state(row: ModelVersion) -> str:
    row.refresh_from_db()
    return row.state


def test_a_draft_whose_artifact_is_whole_is_validated_with_its_evidence(folder: Path) -> None:
    row = of_folder(folder)
    assert start(row).state == "running"
    found = advance(folder)
    digest = artifact(folder).digest
    assert (found.state, found.reason) == ("passed", "2 files, 8.0 kB, match their digests")
    assert found.evidence == {
        "artifacts": [{"uri": folder.as_uri(), "digest": digest, "files": 2, "bytes": 8002}],
        "instance_types": [{"instance_type": "local.cpu", "engine": "vllm", "problem": ""}],
        "golden_prompts": 1,
        "golden_waiver": "",
    }
    assert state(row) == "validated"
    assert (row.artifact_digest, row.revision) == (digest, 2)
    assert row.reason == ("validated for ada: 2 files, 8.0 kB, match their digests; a cell is possible on local.cpu")
    kinds = list(Event.objects.order_by("id").values_list("kind", flat=True))
    assert kinds == ["version.drafted", "version.validation_started", "version.validated"]


def test_the_artifacts_of_every_instance_type_are_read_and_their_digests_noted(folder: Path) -> None:
    gguf = folder.with_name("gguf")
    digest = artifact(gguf, {"weights.gguf": b"GGUF"}).digest
    on_p5 = {"engine": "llama-cpp", "artifact_uri": gguf.as_uri(), "engine_options": {"threads": 4}}
    row = of_folder(folder, parallelism={"local.cpu": {}, "p5.48xlarge": {}}, by_type={"p5.48xlarge": on_p5})
    start(row)
    found = advance(folder)
    assert [one["uri"] for one in found.evidence["artifacts"]] == [folder.as_uri(), gguf.as_uri()]
    assert {one["instance_type"]: one["engine"] for one in found.evidence["instance_types"]} == {
        "local.cpu": "vllm", "p5.48xlarge": "llama-cpp"
    }  # fmt: skip
    assert state(row) == "validated"
    assert row.reason.startswith("validated for ada: 3 files")
    assert row.by_type == {"p5.48xlarge": {**on_p5, "artifact_digest": digest}}


def test_an_engine_without_weights_needs_no_artifact(folder: Path) -> None:
    row = draft()
    start(row)
    assert advance(folder).reason == "it names no artifact"
    assert state(row) == "validated"


def test_a_draft_model_is_read_too(folder: Path, tmp_path: Path) -> None:
    small = artifact(tmp_path / "sources" / "small", {"model.safetensors": b"small"})
    uri = (tmp_path / "sources" / "small").as_uri()
    speculation = {"method": "draft_model", "tokens": 3, "draft_uri": uri, "draft_digest": small.digest}
    row = of_folder(folder, speculation=speculation)
    start(row)
    assert [each["uri"] for each in advance(folder).evidence["artifacts"]] == [folder.as_uri(), uri]


def test_adapters_are_read_too_and_a_digest_that_was_left_out_is_filled_in(folder: Path, tmp_path: Path) -> None:
    made = {name: artifact(tmp_path / "sources" / name, {"adapter_config.json": name.encode()}) for name in "ab"}
    adapters: list[dict[str, Any]] = [
        {"name": name, "artifact_uri": (tmp_path / "sources" / name).as_uri(), "artifact_digest": "", "rank": 8}
        for name in made
    ]
    row = of_folder(folder, adapters=adapters)
    start(row)
    found = advance(folder)
    assert [each["uri"] for each in found.evidence["artifacts"][1:]] == [each["artifact_uri"] for each in adapters]
    assert state(row) == "validated"
    assert row.adapters == [{**each, "artifact_digest": made[each["name"]].digest} for each in adapters]


def test_an_adapter_that_is_another_than_its_digest_says_is_not_validated(folder: Path, tmp_path: Path) -> None:
    artifact(tmp_path / "sources" / "a", {"adapter_config.json": b"{}"})
    uri = (tmp_path / "sources" / "a").as_uri()
    row = of_folder(folder, adapters=[{"name": "a", "artifact_uri": uri, "artifact_digest": f"sha256:{'0' * 64}"}])
    start(row)
    found = advance(folder)
    assert (found.state, state(row)) == ("failed", "draft")
    assert f"but the version expects sha256:{'0' * 64}" in found.reason


def test_what_is_wrong_with_a_draft_is_said_before_anything_is_read(folder: Path) -> None:
    row = of_folder(folder / "not-there", golden_prompts=[])
    start(row)
    found = advance(folder)
    assert (found.state, state(row)) == ("failed", "draft")
    assert found.reason == "it has no golden prompts; add some, or state the reason in golden_waiver"
    event = Event.objects.latest("id")
    assert (event.kind, event.tone) == ("version.validation_failed", "bad")
    assert event.message == f"toy@1 is not validated: {found.reason}"


def test_a_waiver_stands_for_golden_prompts(folder: Path) -> None:
    row = of_folder(folder, golden_prompts=[], golden_waiver="random weights answer nothing")
    start(row)
    assert advance(folder).evidence["golden_waiver"] == "random weights answer nothing"
    assert state(row) == "validated"


def spoil(folder: Path, name: str, content: bytes | None) -> None:
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("name", "content", "objection"),
    [
        ("model.safetensors", b"spoiled " * 1000, "model.safetensors is corrupt: its sha256 is .*, the manifest has"),
        ("tokenizer/vocab.json", None, "tokenizer/vocab.json is missing; 1 files of"),
        ("code.py", b"", "code.py is not in manifest.json"),
        (MANIFEST_NAME, None, "has no manifest.json: write it with"),
        (MANIFEST_NAME, b"{}", "manifest.json is not a manifest"),
    ],
)
def test_an_artifact_that_is_not_whole_is_refused_by_its_file(
    folder: Path, name: str, content: bytes | None, objection: str
) -> None:
    row = of_folder(folder)
    start(row)
    spoil(folder, name, content)
    found = advance(folder)
    assert found.state == "failed"
    assert re.search(objection, found.reason)
    assert state(row) == "draft"


def test_another_artifact_than_the_stated_one_is_refused(folder: Path) -> None:
    start(of_folder(folder, artifact_digest="sha256:" + "0" * 64))
    assert "but the version expects sha256:0000" in advance(folder).reason


def test_an_artifact_from_elsewhere_is_not_even_looked_at(folder: Path, tmp_path: Path) -> None:
    artifact(tmp_path / "elsewhere")
    start(of_folder(tmp_path / "elsewhere"))
    assert "elsewhere is outside the allowed sources" in advance(folder).reason


def test_a_slice_ends_and_the_next_reads_what_is_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    chunks = FolderSource.chunks

    def note_and_read(self: FolderSource, path: str) -> Iterator[bytes]:
        read.append(path)
        return chunks(self, path)

    monkeypatch.setattr(FolderSource, "chunks", note_and_read)
    row = of_folder(folder)
    start(row)
    half = advance(folder, Clock(step_s=1), slice_s=4)
    assert (half.state, half.files_done, half.files_total, half.bytes_done) == ("running", 1, 2, 8000)
    assert half.percent == pytest.approx(99.975)
    assert advance(folder).state == "passed"
    assert read == list(FILES)


def test_progress_is_noted_within_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models_registry.artifacts.services.sources.CHUNK_BYTES", 1000)
    seen: list[int] = []
    note = service._store_progress

    def watch(validation: Validation, *rest: Any) -> None:
        note(validation, *rest)
        seen.append(Validation.objects.get().bytes_done)

    monkeypatch.setattr(service, "_store_progress", watch)
    start(of_folder(folder))
    advance(folder, Clock(step_s=0.5))
    assert seen[:3] == sorted(seen[:3])
    assert 0 < seen[0] < 8000


def test_a_file_that_takes_for_ever_is_given_up(folder: Path) -> None:
    start(of_folder(folder))
    found = advance(folder, Clock(step_s=1), replace(LIMITS, file_s=0.5))
    assert found.reason.endswith("model.safetensors was not read within 0.5 s; split it")


def test_a_validation_that_takes_for_ever_is_given_up(folder: Path) -> None:
    start(of_folder(folder))
    late = Clock(at=NOW + timedelta(hours=5))
    assert advance(folder, late).reason == "not done after 4 h (SWITCHYARD_ARTIFACT_LIMIT_S)"


def test_a_source_that_does_not_answer_is_tried_again_and_then_given_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(self: FolderSource) -> bytes:
        raise SourceTrouble("the disk is away")

    start(of_folder(folder))
    with monkeypatch.context() as patch:
        patch.setattr(FolderSource, "manifest", away)
        found = advance(folder)
        assert (found.state, found.reason, found.troubles) == ("running", "the disk is away; trying again", 1)
        assert advance(folder, limits=replace(LIMITS, troubles=2)).reason == "the disk is away; given up after 2 tries"


def test_a_source_that_answers_again_is_no_trouble(folder: Path) -> None:
    start(of_folder(folder))
    Validation.objects.update(troubles=4, reason="the disk is away; trying again")
    assert advance(folder).state == "passed"


def test_a_draft_that_was_changed_meanwhile_is_not_validated(folder: Path) -> None:
    row = of_folder(folder)
    start(row)
    draft_change(version_id=row.pk, columns={"context_length": 512}, actor="bob", now=NOW)
    found = advance(folder)
    assert (found.state, found.reason) == ("failed", "the draft was changed meanwhile; validate it again")
    assert state(row) == "draft"


def test_a_change_at_the_last_moment_wins(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = of_folder(folder)
    start(row)
    evidence = service._evidence

    def change_first(*arguments: Any) -> dict[str, Any]:
        draft_change(version_id=row.pk, columns={"context_length": 512}, actor="bob", now=NOW)
        return evidence(*arguments)

    monkeypatch.setattr(service, "_evidence", change_first)
    found = advance(folder)
    assert (found.state, found.evidence) == ("failed", {})


def test_a_draft_that_was_deleted_meanwhile_ends_the_work(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = of_folder(folder)
    start(row)

    def delete_first(*arguments: Any) -> str:
        if ModelVersion.objects.exists():
            draft_delete(version_id=row.pk, actor="bob", now=NOW)
        return file_sha256(*arguments)

    monkeypatch.setattr(service, "file_sha256", delete_first)
    validations_advance(Slice((parse_place(folder.parent.as_uri()),), LIMITS, Clock()))
    assert not Validation.objects.exists()


def test_one_validation_of_a_draft_runs_at_a_time(folder: Path) -> None:
    row = of_folder(folder)
    start(row)
    with pytest.raises(Conflict, match="is already being validated"):
        start(row)
    advance(folder)
    assert state(row) == "validated"


def test_after_a_failure_it_can_be_tried_again(folder: Path) -> None:
    row = draft(golden_prompts=[])
    start(row)
    advance(folder)
    draft_change(version_id=row.pk, columns={"golden_waiver": "a toy"}, actor="ada", now=NOW)
    start(row)
    assert advance(folder).state == "passed"


def test_while_somebody_else_validates_nothing_is_done(folder: Path) -> None:
    start(of_folder(folder))
    lease_take(name=LEASE, holder="other", ttl_s=60, now=NOW)
    assert advance(folder).state == "running"


def test_of_several_each_gets_its_turn(folder: Path) -> None:
    first, second = of_folder(folder), of_folder(folder, "2")
    for row in (first, second):
        start(row)
    advance(folder, Clock(step_s=1), slice_s=3)
    advance(folder)
    assert (state(first), state(second)) == ("draft", "validated")


def test_nothing_to_validate_is_nothing_to_do(folder: Path) -> None:
    validations_advance(Slice((parse_place(folder.parent.as_uri()),), LIMITS, Clock()))
