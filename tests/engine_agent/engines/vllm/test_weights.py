"""The cache holds a whole conversion or makes one; it never gives out a damaged one."""

import os
import stat
import sys
from pathlib import Path

import pytest

from engine_agent.engines.artifacts import verify_folder
from engine_agent.engines.vllm.weights import NAME, build, shipped_gguf
from engine_agent.protocol.manifest import BadArtifact


class Conversion:
    """Stands for the conversion of real weights, which needs the engine's Python; counts its runs."""

    def __init__(self, content: bytes = b"weights") -> None:
        self.runs = 0
        self.content = content

    def __call__(self, gguf: Path, folder: Path) -> None:
        self.runs += 1
        (folder / "model.safetensors").write_bytes(self.content + gguf.read_bytes())


class BrokenConversion(Conversion):
    def __call__(self, gguf: Path, folder: Path) -> None:
        super().__call__(gguf, folder)
        raise BadArtifact("unknown tensor x")


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"1")
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_a_conversion_is_named_by_its_digest_and_is_whole(cache: Path, gguf: Path) -> None:
    folder, manifest = build(cache, gguf, Conversion(), print)
    assert folder == cache / "artifacts" / f"{NAME}-{manifest.digest.removeprefix('sha256:')[:12]}"
    assert verify_folder(folder, manifest.digest) == manifest


def test_the_second_build_converts_nothing(cache: Path, gguf: Path) -> None:
    conversion = Conversion()
    first = build(cache, gguf, conversion, print)
    assert build(cache, gguf, conversion, print) == first
    assert conversion.runs == 1


def test_engines_of_other_accounts_can_read_it_whatever_the_umask(cache: Path, gguf: Path) -> None:
    before = os.umask(0o077)
    try:
        folder, _ = build(cache, gguf, Conversion(), print)
    finally:
        os.umask(before)
    assert modes(folder) == {0o755, 0o644}
    for path in (*folder.iterdir(), folder):
        path.chmod(0o700 if path == folder else 0o600)  # as an earlier release left it
    build(cache, gguf, Conversion(), print)
    assert modes(folder) == {0o755, 0o644}


def modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())}


def test_a_damaged_conversion_is_named_and_made_again(cache: Path, gguf: Path) -> None:
    conversion, said = Conversion(), list[str]()
    folder, manifest = build(cache, gguf, conversion, print)
    (folder / "model.safetensors").write_bytes(b"other")
    assert build(cache, gguf, conversion, said.append) == (folder, manifest)
    verify_folder(folder, manifest.digest)
    assert "model.safetensors is corrupt" in said[0]
    assert said[0].endswith("building it again")


def test_another_source_gets_a_folder_of_its_own(cache: Path, gguf: Path) -> None:
    first, _ = build(cache, gguf, Conversion(), print)
    gguf.write_bytes(b"2")
    second, _ = build(cache, gguf, Conversion(), print)
    assert first != second
    verify_folder(first)


def test_another_source_with_the_same_result_takes_the_folder_over(cache: Path, gguf: Path) -> None:
    first, _ = build(cache, gguf, Conversion(b""), print)
    same = gguf.with_name("renamed.gguf")
    same.write_bytes(gguf.read_bytes())
    second, manifest = build(cache, same, Conversion(b""), print)
    assert first == second
    assert manifest.source["file"] == "renamed.gguf"


def test_a_failed_conversion_leaves_nothing(cache: Path, gguf: Path) -> None:
    with pytest.raises(BadArtifact, match="unknown tensor x"):
        build(cache, gguf, BrokenConversion(), print)
    assert [path.name for path in (cache / "artifacts").iterdir() if path.is_dir()] == []


def test_what_a_killed_build_left_is_removed(cache: Path, gguf: Path) -> None:
    left = cache / "artifacts" / f".unfinished-{NAME}"
    left.mkdir(parents=True)
    (left / "half").write_bytes(b"")
    folder, _ = build(cache, gguf, Conversion(), print)
    assert not left.exists()
    assert not (folder / "half").exists()


def test_a_python_without_the_weights_is_named() -> None:
    with pytest.raises(BadArtifact, match=sys.executable):
        shipped_gguf()
