"""Local folders are read within the allowed sources, including links."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from engine_agent.protocol.manifest import MANIFEST_NAME, BadArtifact
from engine_agent.protocol.messages import Artifact
from models_registry.artifacts.planner import ArtifactLimits, parse_place
from models_registry.artifacts.services.sources import OpenArtifact, artifact_open, file_sha256
from tests.models_registry.rows import artifact

LIMITS = ArtifactLimits()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "sources" / "toy"
    artifact(folder)
    return folder


def opened(folder: Path, limits: ArtifactLimits = LIMITS) -> OpenArtifact:
    sources = (parse_place((folder.parent).as_uri()),)
    return artifact_open(Artifact(folder.as_uri(), ""), sources, limits)


def test_a_folder_gives_its_manifest_and_its_files(folder: Path) -> None:
    found = opened(folder)
    assert found.sizes == {"model.safetensors": 8000, "tokenizer/vocab.json": 2}
    read: list[int] = []
    digests = {path: file_sha256(found, path, read.append) for path in found.sizes}
    assert digests == found.manifest.files
    assert read == [8000, 2]


def test_a_folder_that_is_not_here_says_where_it_was_looked_for(folder: Path) -> None:
    with pytest.raises(BadArtifact, match="is not a folder on the control plane's host"):
        opened(folder.parent / "other")


def test_links_within_a_source_are_followed(folder: Path) -> None:
    blob = folder.parent / "blob"
    (folder / "model.safetensors").rename(blob)
    (folder / "model.safetensors").symlink_to(blob)
    assert opened(folder).sizes["model.safetensors"] == 8000


@pytest.mark.parametrize("name", ["model.safetensors", MANIFEST_NAME])
def test_a_link_out_of_the_sources_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    secret = tmp_path / "secret"
    (folder / name).rename(secret)
    (folder / name).symlink_to(secret)
    with pytest.raises(BadArtifact, match=f"{name} links to {secret}, which is outside the allowed sources"):
        opened(folder)


def test_a_folder_that_is_a_link_out_of_the_sources_is_refused(folder: Path, tmp_path: Path) -> None:
    artifact(tmp_path / "elsewhere")
    link = folder.parent / "link"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadArtifact, match="outside the allowed sources"):
        opened(link)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (replace(LIMITS, files=1), "lists 2 files; at most 1 may be"),
        (replace(LIMITS, manifest_bytes=10), "is larger than 10 bytes"),
        (replace(LIMITS, artifact_bytes=8001), "the limit is"),
    ],
)
def test_limits_are_kept(folder: Path, limits: ArtifactLimits, message: str) -> None:
    with pytest.raises(BadArtifact, match=message):
        opened(folder, limits)


def test_a_folder_of_more_files_than_any_artifact_is_not_listed_to_its_end(folder: Path) -> None:
    for number in range(4):
        (folder / f"stray-{number}").touch()
    with pytest.raises(BadArtifact, match="has more than 3 files"):
        opened(folder, replace(LIMITS, files=3))


def test_a_file_that_grows_while_it_is_read_is_refused(folder: Path) -> None:
    found = opened(folder)
    with (folder / "tokenizer/vocab.json").open("ab") as file:
        file.write(b"more")
    with pytest.raises(BadArtifact, match="has grown beyond its 2 bytes"):
        file_sha256(found, "tokenizer/vocab.json", lambda _: None)


def test_a_file_that_vanishes_is_named(folder: Path) -> None:
    found = opened(folder)
    os.unlink(folder / "model.safetensors")
    with pytest.raises(BadArtifact, match=r"model.safetensors cannot be read: No such file"):
        file_sha256(found, "model.safetensors", lambda _: None)
