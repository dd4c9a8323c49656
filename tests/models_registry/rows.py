"""Rows for tests: versions in every state, calibrations with step costs, artifacts in folders, and clocks."""

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from engine_agent.engines.artifacts import describe_folder, write_manifest
from engine_agent.protocol.manifest import Manifest
from lab.checkpoints import CONFIGS, write_checkpoint
from models_registry.artifacts.planner import ArtifactLimits, parse_place
from models_registry.versions.models import Model, ModelVersion, Validation
from models_registry.versions.services.drafts import draft_create
from models_registry.versions.services.validation import Slice, validation_start, validations_advance
from tests.fleet.rows import NOW

SIM: dict[str, Any] = {
    "engine": "sim",
    "parallelism": {"local.cpu": {"nodes": 2}},
    "engine_options": {"decode_step_ms": 14},
    "golden_prompts": [{"prompt": "2 + 2 =", "expect": "4"}],
}


def draft(version: str = "1", *, based_on: str = "", **columns: Any) -> ModelVersion:
    """A valid draft of `toy` without an artifact."""
    Model.objects.get_or_create(name="toy", defaults={"created_at": NOW})
    values = columns if based_on else {**SIM, **columns}
    return draft_create(model="toy", version=version, based_on=based_on, columns=values, actor="ada", now=NOW)


def stored(state: str, version: str = "1", **columns: Any) -> ModelVersion:
    row = draft(version)
    ModelVersion.objects.filter(pk=row.pk).update(state=state, **columns)
    row.refresh_from_db()
    return row


DIGEST = "sha256:" + "ab" * 32
DOCUMENT: dict[str, Any] = {
    "format": 1,
    "model": DIGEST,
    "heads_sha256": "cd" * 32,
    "heads": 2,
    "tasks": [
        {"name": "plan", "answers": ["00" * 9 + "--", "00" * 8 + "0-" + "--"]},
        {"name": "chat", "answers": ["1-" * 9 + "--", "0-" + "--" * 9]},
    ],
}
STEP_COST: dict[str, Any] = {
    "instance_type": "local.cpu",
    "source": "measured",
    "hardware": "x86_64",
    "software": "vLLM 0.32",
    "steps": [
        {"batch": batch, "verified": verified, "seconds": seconds * verified**0.3}
        for batch, seconds in ((1, 0.1), (8, 0.3))
        for verified in (1, 3)
    ],
}


def with_heads(**speculation: Any) -> ModelVersion:
    """A released version on vLLM with heads."""
    stated = {
        "method": "medusa", "tokens": 2, "draft_uri": "file:///heads", "draft_digest": DIGEST, **speculation
    }  # fmt: skip
    return stored("released", engine="vllm", artifact_uri="file:///model", artifact_digest=DIGEST, speculation=stated)


FILES = {"model.safetensors": b"weights " * 1000, "tokenizer/vocab.json": b"{}"}


def artifact(folder: Path, files: dict[str, bytes] | None = None) -> Manifest:
    for name, content in (FILES if files is None else files).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    manifest = describe_folder(folder, {"made": "here"})
    write_manifest(folder, manifest)
    return manifest


def of_checkpoint(folder: Path, **columns: Any) -> ModelVersion:
    """A draft on vLLM whose artifact is a checkpoint of 12 heads and 4 KV heads, without the weights themselves."""
    write_checkpoint(folder, CONFIGS["gqa"], weights=False)
    artifact(folder, {})
    plain = {"engine": "vllm", "engine_options": {}, "parallelism": {"p5.48xlarge": {"tp": 4}}}
    return draft(artifact_uri=folder.as_uri(), **{**plain, **columns})


def validated(row: ModelVersion, folder: Path) -> Validation:
    """The validation of a draft, after one slice over artifacts next to this folder."""
    validation_start(version_id=row.pk, actor="ada", now=NOW)
    validations_advance(Slice((parse_place(folder.parent.as_uri()),), ArtifactLimits(), Clock()))
    return Validation.objects.latest("id")


@dataclass
class Clock:
    """Every read advances it by `step_s`."""

    step_s: float = 0.0
    at: datetime = field(default=NOW)

    def __call__(self) -> datetime:
        self.at += timedelta(seconds=self.step_s)
        return self.at
