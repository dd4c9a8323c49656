"""An artifact is whole, or it is refused by the name of the file that is wrong."""

import hashlib
import json
from pathlib import Path

import pytest

from engine_agent.engines.artifacts import describe_folder, read_manifest, verify_folder, write_manifest
from engine_agent.protocol.manifest import MANIFEST_NAME, BadArtifact, Manifest

SOURCE = {"file": "model.gguf"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "weights").write_bytes(b"1234")
    (tmp_path / "sub" / "tokens").write_bytes(b"abc")
    write_manifest(tmp_path, describe_folder(tmp_path, SOURCE))
    return tmp_path


def test_the_digest_is_that_of_sha256sums_lines() -> None:
    lines = "aa  x\nbb  a\n"
    assert Manifest({"a": "bb", "x": "aa"}, {}).digest == "sha256:" + hashlib.sha256(lines.encode()).hexdigest()


def test_a_whole_folder_gives_its_manifest(folder: Path) -> None:
    manifest = verify_folder(folder)
    assert set(manifest.files) == {"weights", "sub/tokens"}
    assert manifest.source == SOURCE
    assert verify_folder(folder, manifest.digest) == manifest


def test_the_same_files_have_the_same_digest_whatever_they_were_made_from(folder: Path) -> None:
    assert describe_folder(folder, {"file": "other"}).digest == read_manifest(folder).digest


def test_a_changed_file_is_named(folder: Path) -> None:
    (folder / "weights").write_bytes(b"1235")
    with pytest.raises(BadArtifact, match="weights is corrupt"):
        verify_folder(folder)


def test_a_missing_file_is_named(folder: Path) -> None:
    (folder / "sub" / "tokens").unlink()
    with pytest.raises(BadArtifact, match="sub/tokens is missing"):
        verify_folder(folder)


def test_a_file_that_nobody_listed_is_named(folder: Path) -> None:
    (folder / "code.py").write_text("")
    with pytest.raises(BadArtifact, match=r"code\.py is not in manifest\.json"):
        verify_folder(folder)


def test_another_artifact_than_the_one_asked_for_is_refused(folder: Path) -> None:
    with pytest.raises(BadArtifact, match="sha256:00 was requested"):
        verify_folder(folder, "sha256:00")


def test_a_folder_without_a_manifest_is_no_artifact(tmp_path: Path) -> None:
    with pytest.raises(BadArtifact, match="not an artifact"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", '{"files": {"a": 1}, "source": {}, "digest": "x"}', '{"files": {}}'])
def test_what_is_not_a_manifest_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST_NAME).write_text(text)
    with pytest.raises(BadArtifact, match="is not a manifest"):
        read_manifest(tmp_path)


def test_a_manifest_that_names_another_digest_than_its_own_is_refused(folder: Path) -> None:
    path = folder / MANIFEST_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | {"digest": "sha256:00"}))
    with pytest.raises(BadArtifact, match="but names sha256:00"):
        read_manifest(folder)
