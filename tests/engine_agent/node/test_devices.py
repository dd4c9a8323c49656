"""A node uses, shows and reports only the devices and CPUs that it owns."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.engines.base import EngineUnavailable, Launch
from engine_agent.node.devices import (
    DeviceTurn,
    InstanceCheck,
    number_ranges,
    own_devices,
    own_faults,
    resources_from,
    use_own_cpus,
    visible_devices,
    with_device_share,
    with_devices,
)
from engine_agent.node.machine.facts import cpus_by_numa
from engine_agent.protocol.machine_messages import NodeResources
from engine_agent.protocol.messages import Fault
from engine_agent.protocol.signatures import FaultSignature
from engine_agent.protocol.telemetry_messages import Accelerator

GPUS = tuple(Accelerator(index, "nvidia", "H100", uuid=f"GPU-{index}") for index in range(4))
PAIR = NodeResources("nvidia", (2, 3), ("GPU-2", "GPU-3"))
CHIPS = NodeResources("neuron", (1, 2), cores_per_device=2)


def test_an_engine_sees_the_devices_of_its_node_whatever_its_plan_says() -> None:
    planned = Launch(("engine",), {"CUDA_VISIBLE_DEVICES": "0", "NEURON_RT_NUM_CORES": "32", "A": "b"})
    assert with_devices(planned, PAIR, GPUS).env == {
        "A": "b",
        "SWITCHYARD_DEVICES": "nvidia 2,3",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "2,3",
    }
    assert with_devices(planned, None, GPUS) is planned


def test_neuron_cores_are_counted_over_the_machine() -> None:
    assert visible_devices(CHIPS, ()) == {"SWITCHYARD_DEVICES": "neuron 1,2", "NEURON_RT_VISIBLE_CORES": "2-5"}


def test_devices_are_found_by_uuid_after_another_one_fell_off_the_bus() -> None:
    renumbered = tuple(Accelerator(index, "nvidia", "H100", uuid=f"GPU-{index + 1}") for index in range(3))
    assert visible_devices(PAIR, renumbered)["CUDA_VISIBLE_DEVICES"] == "1,2"
    assert [device.index for device in own_devices(PAIR, renumbered)] == [1, 2]


def test_a_node_without_one_of_its_devices_starts_no_engine() -> None:
    with pytest.raises(EngineUnavailable, match="nvidia GPU-3 of this node are missing on its machine"):
        visible_devices(PAIR, GPUS[:3])
    assert visible_devices(PAIR, ())["CUDA_VISIBLE_DEVICES"] == "2,3", "the driver has not answered yet"


@pytest.mark.parametrize(
    ("evidence", "signature", "passed"),
    [
        ({"device": 2}, FaultSignature.NVIDIA_XID_FATAL, True),
        ({"device": 1}, FaultSignature.NVIDIA_XID_FATAL, False),
        ({"device": None}, FaultSignature.NVIDIA_XID_FATAL, True),
        ({"nd_id": "3"}, FaultSignature.NEURON_HARDWARE_ERROR, True),
        ({"nd_id": "0"}, FaultSignature.NEURON_HARDWARE_ERROR, False),
        ({"expected": 8, "found": 7}, FaultSignature.ACCELERATOR_MISSING, False),
    ],
)
def test_faults_of_other_nodes_devices_are_not_reported(
    evidence: dict[str, object], signature: FaultSignature, passed: bool
) -> None:
    taken: list[Fault] = []
    own_faults(PAIR, taken.append, lambda: GPUS[2:])(Fault(signature, "text", evidence))
    assert bool(taken) == passed


def test_a_missing_device_of_the_node_is_reported() -> None:
    taken: list[Fault] = []
    own_faults(PAIR, taken.append, lambda: GPUS[2:3])(Fault(FaultSignature.ACCELERATOR_MISSING, "text", {"found": 3}))
    assert len(taken) == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "--owns is no JSON object"),
        ('{"kind": "nvidia", "devices": []}', "--owns names no devices"),
        ('{"kind": "nvidia", "devices": [1], "uuids": ["a", "b"]}', "--owns has 2 UUIDs for 1 devices"),
    ],
)
def test_what_a_node_owns_must_make_sense(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        resources_from(text)


def test_a_node_and_its_processes_run_on_its_cpus() -> None:
    cpu = max(os.sched_getaffinity(0))
    owns = json.dumps({"kind": "cpu", "devices": [0], "cpus": [cpu]})
    code = (
        "import os, subprocess, sys; from engine_agent.node.devices import *; "
        f"use_own_cpus(resources_from({owns!r})); "
        "print(subprocess.run([sys.executable, '-c', 'import os; print(os.sched_getaffinity(0))'], "
        "capture_output=True, text=True).stdout)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{{{cpu}}}"
    with pytest.raises(ValueError, match="CPUs 9999 are not usable; there are 0"):
        use_own_cpus(NodeResources("cpu", (0,), cpus=(9999,)))


def test_cpus_are_listed_by_numa_node_with_the_threads_of_a_core_together(tmp_path: Path) -> None:
    for node, cpus in ((0, "0-1,4-5"), (1, "2-3,6-7")):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
    for cpu in range(8):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    assert cpus_by_numa(range(8), tmp_path) == ((0, 4, 1, 5), (2, 6, 3, 7))
    assert cpus_by_numa({1, 3}, tmp_path) == ((1,), (3,))
    assert cpus_by_numa(range(2), tmp_path / "none") == ((0, 1),)


@given(st.sets(st.integers(0, 300)))
def test_ranges_name_every_number_once(numbers: set[int]) -> None:
    spans = [part.split("-") for part in number_ranges(sorted(numbers)).split(",") if part]
    named = [number for span in spans for number in range(int(span[0]), int(span[-1]) + 1)]
    assert named == sorted(numbers)


HALF = NodeResources("nvidia", (2,), ("GPU-2",), share=0.5)


@pytest.mark.parametrize(
    ("stated", "argv"),
    [
        ((), ("--gpu-memory-utilization", "0.4600")),
        (("--gpu-memory-utilization", "0.8", "--seed", "1"), ("--seed", "1", "--gpu-memory-utilization", "0.4000")),
        (("--gpu-memory-utilization=0.8",), ("--gpu-memory-utilization", "0.4000")),
    ],
)
def test_an_engine_takes_only_its_share_of_a_devices_memory(stated: tuple[str, ...], argv: tuple[str, ...]) -> None:
    assert with_device_share(Launch(stated, {}), HALF, "vllm", 1).argv == argv
    assert with_device_share(Launch(stated, {}), PAIR, "vllm", 2).argv == stated
    assert with_device_share(Launch(stated, {}), None, "vllm", 2).argv == stated
    assert with_device_share(Launch(stated, {}), HALF, "llama-cpp", 1).argv == stated


@pytest.mark.parametrize(
    ("engine", "argv", "nodes", "says"),
    [
        ("generic", (), 1, "engine generic cannot be limited to a share of a device"),
        ("vllm", (), 2, "two ranks cannot use one device"),
        ("vllm", ("--gpu-memory-utilization", "most"), 1, "is 'most'; it must be a number"),
    ],
)
def test_what_cannot_share_a_device_starts_nowhere(engine: str, argv: tuple[str, ...], nodes: int, says: str) -> None:
    with pytest.raises(EngineUnavailable, match=says):
        with_device_share(Launch(argv, {}), HALF, engine, nodes)


def test_engines_on_one_device_start_one_after_the_other(tmp_path: Path) -> None:
    first, second = DeviceTurn(tmp_path, HALF), DeviceTurn(tmp_path, HALF)
    elsewhere = DeviceTurn(tmp_path, NodeResources("nvidia", (3,), ("GPU-3",), share=0.5))
    whole = DeviceTurn(tmp_path, PAIR)
    assert [turn.take() for turn in (first, first, second, elsewhere, whole)] == [True, True, False, True, True]
    first.leave()
    assert [turn.take() for turn in (second, first)] == [True, False]
    second.leave()


TAKES_TURN = """
import sys
from pathlib import Path
from engine_agent.node.devices import DeviceTurn
from engine_agent.protocol.machine_messages import NodeResources
turn = DeviceTurn(Path(sys.argv[1]), NodeResources("nvidia", (2,), ("GPU-2",), share=0.5))
print(turn.take(), flush=True)
sys.stdin.read()
"""


def test_the_turn_of_an_agent_that_was_killed_is_free(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TAKES_TURN, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        assert not DeviceTurn(tmp_path, HALF).take()
        other.kill()
    assert DeviceTurn(tmp_path, HALF).take()


def test_a_cell_of_several_nodes_cannot_use_mig_instances() -> None:
    owns = NodeResources("nvidia", (1002,), ("MIG-02",))
    assert with_device_share(Launch(("engine",), {}), owns, "vllm", 1).argv == ("engine",)
    with pytest.raises(EngineUnavailable, match="MIG instances have no links to each other"):
        with_device_share(Launch(("engine",), {}), owns, "vllm", 2)


def instance(used_mib: int | None) -> Accelerator:
    used = None if used_mib is None else used_mib * 2**20
    return Accelerator(1002, "nvidia", "H100 MIG 1g.10gb", memory_used_bytes=used, uuid="MIG-02")


def test_an_engine_that_is_not_on_its_mig_instance_ends() -> None:
    check = InstanceCheck(NodeResources("nvidia", (1002,), ("MIG-02",)))
    before, idle = instance(3), instance(3)
    assert [check.trouble([one]) for one in (before, before, instance(None), instance(700))] == [""] * 4
    assert check.trouble([]) == "", "its driver does not answer"
    assert check.trouble([idle]).startswith(
        "the engine is not on its MIG instance MIG-02 (H100 MIG 1g.10gb), which has 3"
    )
    check.restart()
    assert check.trouble([idle]) == "", "read before the engine was ready"
    for whole in (None, HALF, PAIR):
        assert [InstanceCheck(whole).trouble(GPUS) for _ in range(2)] == ["", ""]
