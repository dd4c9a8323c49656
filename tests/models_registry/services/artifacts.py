"""Artifacts in folders, and clocks, for tests of validation."""

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from engine_agent.engines.artifacts import describe_folder, write_manifest
from engine_agent.protocol.manifest import Manifest
from tests.fleet.rows import NOW

FILES = {"model.safetensors": b"weights " * 1000, "tokenizer/vocab.json": b"{}"}


def artifact(folder: Path, files: dict[str, bytes] | None = None) -> Manifest:
    for name, content in (FILES if files is None else files).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    manifest = describe_folder(folder, {"made": "here"})
    write_manifest(folder, manifest)
    return manifest


@dataclass
class Clock:
    """Every look at it moves it on by `step_s`."""

    step_s: float = 0.0
    at: datetime = field(default=NOW)

    def __call__(self) -> datetime:
        self.at += timedelta(seconds=self.step_s)
        return self.at
