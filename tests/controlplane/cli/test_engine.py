"""The doctor on the command line: the agent's own, with its exit status."""

import json
import sys
from pathlib import Path

import pytest

from controlplane.cli.commands import engine
from controlplane.cli.main import main

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


def test_it_is_the_agents_own_of_this_python() -> None:
    assert (engine.ROOT / "engine_agent/node/checks/doctor.py").is_file()
    assert sys.executable
