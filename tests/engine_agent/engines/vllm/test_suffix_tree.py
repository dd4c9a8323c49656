"""The suffix trees are built beside the engine's environment, or not at all with one sentence about why."""

import os
from pathlib import Path

import pytest

from engine_agent.engines.install_command import CannotInstall
from engine_agent.engines.vllm.packages_beside import install_beside
from engine_agent.engines.vllm.suffix_tree import main, unable


def test_without_the_engines_environment_it_says_what_comes_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["install", "--cache", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.endswith("run python -m engine_agent.engines.vllm.environment install first\n")
    assert said.count("\n") == 1


def test_a_machine_that_cannot_compile_is_told_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert unable(tmp_path) == (
        "there is no C++ compiler here (g++ or clang++), and the trees are published as source alone"
    )
    (tmp_path / "g++").touch(0o755)
    assert unable(tmp_path) == f"{tmp_path} has no Python.h; install the headers of this Python (python3-dev)"
    (tmp_path / "Python.h").touch()
    assert unable(tmp_path) is None


def test_packages_are_there_whole_and_once_or_not_at_all(tmp_path: Path) -> None:
    made: list[Path] = []

    def fill(folder: Path) -> None:
        folder.mkdir()
        made.append(folder)

    def half(folder: Path) -> None:
        fill(folder)
        raise CannotInstall("out of room")

    for _ in range(2):
        assert install_beside(tmp_path, "some", "1", fill, print) == tmp_path / "engines" / "some"
    assert len(made) == 1
    with pytest.raises(CannotInstall, match="out of room"):
        install_beside(tmp_path, "some", "2", half, print)
    assert not (tmp_path / "engines" / "some").exists()
    assert os.listdir(tmp_path / "engines") == ["some.lock"]
