"""Memory of a version: validation reads its checkpoint and refuses what does not fit; the API and the page show the
arithmetic with proposals."""

import json
from pathlib import Path
from typing import Any

import pytest

from controlplane.dashboard.templatetags.switchyard import quantity
from lab.checkpoints import CONFIGS
from models_registry.instance_types.planner import INSTANCE_TYPES
from models_registry.versions.models import CheckpointRecord
from models_registry.versions.selectors import version_memory
from models_registry.versions.services.drafts import draft_change
from tests.controlplane.api.client import bearer
from tests.controlplane.dashboard.clients import fragment, signed_in
from tests.fleet.rows import NOW
from tests.models_registry.rows import artifact, draft, of_checkpoint, validated

pytestmark = [pytest.mark.django_db, pytest.mark.slow]


def test_validation_reads_the_checkpoint_once_and_checks_degrees_against_it(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    row = of_checkpoint(folder, parallelism={"p5.48xlarge": {"tp": 8}})
    failed = validated(row, folder)
    assert failed.state == "failed"
    assert "tp is 8; it must divide 12 attention heads: use one of 1, 2, 4" in failed.reason
    stored = CheckpointRecord.objects.get()
    assert (stored.facts["shape"]["layers"], stored.problem) == (12, "")
    draft_change(version_id=row.pk, columns={"parallelism": {"p5.48xlarge": {"tp": 4}}}, actor="ada", now=NOW)
    assert validated(row, folder).state == "passed"
    assert CheckpointRecord.objects.get() == stored


def test_what_does_not_fit_is_refused_with_its_arithmetic(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    row = of_checkpoint(folder, context_length=8192, engine_options={"gpu_memory_utilization": 0.001})
    failed = validated(row, folder)
    assert failed.state == "failed"
    assert "device of p5.48xlarge has 0.08 GiB (80.00 GiB x gpu_memory_utilization 0.001)" in failed.reason
    assert "its weights need" in failed.reason or "do not fit with tp = 4" in failed.reason
    found = version_memory(row, INSTANCE_TYPES)
    assert found.cells[0].problem in failed.reason


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"weights.gguf": b"GGUF"}, "it has no config.json"),
        ({"config.json": b"{}"}, "config.json has no num_hidden_layers"),
        ({"config.json": b"[" * 99}, "config.json is not valid JSON"),
        ({"config.json": b"{}", "model.safetensors": b"\xff" * 8}, "config.json has no num_hidden_layers"),
        (
            {"config.json": json.dumps(CONFIGS["gqa"]).encode(), "model.safetensors": b"\xff" * 9},
            "model.safetensors: its header has 18446744073709551615 bytes; the limit is",
        ),
        ({"config.json": b" " * (1024**2 + 1)}, "config.json may have"),
    ],
)
def test_an_unreadable_checkpoint_is_validated_without_arithmetic(
    tmp_path: Path, files: dict[str, bytes], problem: str
) -> None:
    folder = tmp_path / "model"
    artifact(folder, files)
    columns: dict[str, Any] = {"engine": "vllm", "engine_options": {}, "parallelism": {"p5.48xlarge": {"tp": 8}}}
    row = draft(artifact_uri=folder.as_uri(), **columns)
    assert version_memory(row, INSTANCE_TYPES).problem == "validation has not read its artifact yet"
    assert validated(row, folder).state == "passed"
    found = version_memory(row, INSTANCE_TYPES)
    assert found.problem.startswith(problem)
    assert (found.checkpoint, found.cells, found.proposals) == (None, (), ())


def test_facts_of_a_corrupt_file_are_forgotten(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    row = of_checkpoint(folder)
    config = folder / "config.json"
    right = config.read_text()
    config.write_text(right.replace('"num_hidden_layers": 12', '"num_hidden_layers": 99'))
    failed = validated(row, folder)
    assert "config.json is corrupt" in failed.reason
    assert not CheckpointRecord.objects.exists()
    config.write_text(right)
    assert validated(row, folder).state == "passed"
    assert CheckpointRecord.objects.get().facts["shape"]["layers"] == 12


def test_a_version_without_an_artifact_says_so() -> None:
    assert version_memory(draft(), INSTANCE_TYPES).problem == "it names no artifact"


def test_a_digest_selects_its_own_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    row = of_checkpoint(folder)
    assert validated(row, folder).state == "passed"
    row.refresh_from_db()
    assert version_memory(row, INSTANCE_TYPES).checkpoint is not None
    row.artifact_digest = "sha256:" + "0" * 64
    assert version_memory(row, INSTANCE_TYPES).checkpoint is None


def test_the_api_and_the_page_show_it(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    parallelism = {"p5.48xlarge": {"tp": 4}, "local.cpu": {}, "moon.base": {}}
    options = {"gpu_memory_utilization": 0.004}
    row = of_checkpoint(
        folder, parallelism=parallelism, by_type={"local.cpu": {"engine": "sim"}}, engine_options=options
    )
    assert validated(row, folder).state == "passed"
    document = bearer().get("/api/v1/model-versions/toy@1/memory").json()
    assert document["checkpoint"]["shape"]["attention"] == "grouped-query"
    cells = {each["instance_type"]: each for each in document["cells"]}
    assert cells["p5.48xlarge"]["memory"]["kv_bytes_per_token"] == 12 * 1 * 2 * 64 * 2
    assert cells["local.cpu"]["problem"] == "engine sim has no arithmetic"
    assert cells["moon.base"]["problem"] == "unknown instance type 'moon.base'"
    assert {each["source"] for each in cells["p5.48xlarge"]["memory"]["lines"]} >= {"read", "rated", "estimated"}
    cheapest = document["proposals"][0]
    assert cheapest["price"] > 0

    text = fragment(signed_in(), "/models/toy@1/", "version-memory")
    assert "grouped-query attention" in text
    assert "12 layers x max(1, 4 KV heads / tp 4) = 1 x 2 x head size 64 x 2 bytes" in text
    shown = f'<td class="number">{quantity(cheapest["price"])}</td>'
    assert shown in text
    impossible = next(each for each in document["proposals"] if each["problem"])
    assert text.index(cheapest["instance_type"]) < text.index("on which it does not fit")
    assert text.index("on which it does not fit") < text.index(impossible["instance_type"])
