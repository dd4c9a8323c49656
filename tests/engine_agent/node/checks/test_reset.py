"""Devices are reset by their vendors' commands, and only where that hits no other node."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from engine_agent.node.checks.reset import reset_devices
from engine_agent.protocol.machine_messages import instance_index
from engine_agent.protocol.telemetry_messages import Accelerator

GPUS = tuple(Accelerator(index, "nvidia", "H100", uuid=f"GPU-{index}") for index in range(4))
CHIPS = tuple(Accelerator(index, "neuron", "trainium") for index in range(2))


def reset(
    named: Sequence[str], own: Sequence[Accelerator], machine: Sequence[Accelerator] | None = None, error: str = ""
) -> tuple[bool | None, str, list[str]]:
    commands: list[str] = []

    async def run(argv: Sequence[str]) -> str:
        commands.append(" ".join(argv))
        return error

    result = asyncio.run(reset_devices(named, own, machine or own, run))
    assert result.check == "reset"
    return result.ok, result.found, commands


def test_a_named_gpu_is_reset_by_its_uuid_and_the_others_are_not() -> None:
    assert reset(["GPU-2"], GPUS) == (True, "reset nvidia 2", ["nvidia-smi --gpu-reset -i GPU-2"])
    assert reset(["nvidia 1"], GPUS)[2] == ["nvidia-smi --gpu-reset -i GPU-1"]
    assert len(reset([], GPUS[:2], GPUS)[2]) == 2, "all of the node"


def test_a_device_of_another_node_is_not_reset() -> None:
    assert reset(["GPU-3"], GPUS[:2], GPUS) == (False, "the node has no device GPU-3", [])
    assert reset([], ())[0] is False


def test_a_refusal_of_the_driver_is_reported() -> None:
    text = "GPU Reset couldn't run because the GPU is being used by another client"
    assert reset(["GPU-0"], GPUS, error=text)[:2] == (False, f"nvidia 0: {text}")


def test_a_mig_instance_is_never_reset() -> None:
    instance = Accelerator(instance_index(3, 1), "nvidia", "H100 MIG 1g.10gb", uuid="MIG-1")
    for named in ([], ["nvidia 3"], ["MIG-1"]):
        assert reset(named, [instance]) == (False, "a MIG instance cannot be reset without the others of its GPU", [])


def test_neuron_reloads_its_driver_unless_other_nodes_use_it() -> None:
    loads = ["modprobe --remove neuron", "modprobe neuron"]
    assert reset(["neuron 1"], CHIPS) == (True, "reloaded the driver of 2 devices", loads)
    ok, found, commands = reset(["neuron 1"], CHIPS[1:], CHIPS)
    assert (ok, commands) == (False, [])
    assert found == "the node owns 1 of 2 devices, and a reload of the driver resets all of them"
    assert reset([], CHIPS, error="FATAL: Module neuron is in use.")[2] == loads[:1]


@pytest.mark.parametrize(
    ("script", "found"),
    [("echo done", "reset nvidia 0"), ("echo busy; exit 3", "nvidia 0: busy"), ("exit 7", "nvidia 0: status 7")],
)
def test_the_real_program_is_run(script: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert asyncio.run(reset_devices([], GPUS[:1], GPUS[:1])).found == found
