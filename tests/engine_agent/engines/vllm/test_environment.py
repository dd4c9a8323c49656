"""An environment is installed whole, once, or not at all with one sentence about why."""

import os
import sys
from pathlib import Path

import pytest

from engine_agent.engines.vllm.environment import CUDA_LIBRARIES, ENVIRONMENT, REQUIREMENTS, installed_python, main

pytestmark = pytest.mark.processes


def test_a_suitable_machine_has_no_reason_against_it() -> None:
    assert ENVIRONMENT.unsuitable("Linux", "x86_64", frozenset({"avx2"})) is None


def test_other_machines_are_told_what_vllm_needs() -> None:
    assert ENVIRONMENT.unsuitable("Darwin", "arm64", frozenset()) == (
        "vLLM 0.32 for CPU is built for Linux on x86-64, and this is Darwin on arm64"
    )
    assert ENVIRONMENT.unsuitable("Linux", "x86_64", frozenset({"avx"})) == (
        "vLLM 0.32 for CPU needs a processor with AVX2, and this one has none"
    )


@pytest.mark.parametrize("path", [REQUIREMENTS, CUDA_LIBRARIES], ids=lambda path: path.name)
def test_every_requirement_is_pinned(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert lines
    assert [line for line in lines if line.count("==") != 1] == []


def test_an_unfinished_environment_is_not_an_installed_one(tmp_path: Path) -> None:
    python = ENVIRONMENT.folder(tmp_path) / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    assert installed_python(tmp_path) is None


def test_an_environment_of_another_list_is_not_an_installed_one(tmp_path: Path) -> None:
    python = ENVIRONMENT.folder(tmp_path) / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (ENVIRONMENT.folder(tmp_path) / "installed").write_text("digest of an older list")
    assert installed_python(tmp_path) is None


@pytest.fixture
def no_packages_to_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor any from a folder or an index of this machine's: looking through a large one takes uv seconds."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))


@pytest.mark.usefixtures("no_packages_to_be_had")
def test_a_failed_installation_leaves_nothing_and_ends_with_one_sentence_about_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half_made = ENVIRONMENT.folder(tmp_path) / "lib"
    half_made.mkdir(parents=True)
    assert main(["install", "--cache", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert said.out.startswith(f"removing an older or unfinished {ENVIRONMENT.folder(tmp_path)}\n")
    assert said.err.startswith("cannot install vLLM 0.32 for CPU: ")
    assert "unsatisfiable" in said.err
    assert said.err.count("\n") == 1
    assert not ENVIRONMENT.folder(tmp_path).exists()
