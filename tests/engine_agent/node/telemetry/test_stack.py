"""Versions come from the places where drivers, SDKs and environments leave them.

The places and their contents are those of the Neuron and EFA installers: `libnrt.so.2.31.24.0` and
`libnccom.so.2.31.24` of SDK 2.31 in /opt/aws/neuron/lib, `/opt/amazon/efa_installed_packages` as
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-verify.html shows it.
"""

import os
from pathlib import Path

from engine_agent.node.telemetry.stack import read_environment_stack, read_machine_stack


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
