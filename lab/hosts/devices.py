"""Neuron devices of an instance in the cloud of tests: files in /dev and the tools that list them, so that a machine's
agent finds what its type states. Nothing computes on them. GPUs are not imitated: their library is no program."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from models_registry.instance_types.planner import INSTANCE_TYPES, NEURON

TOOLS = "/opt/aws/neuron/bin"
MIB = 1024**2
MONITOR_PERIOD_S = 5


@dataclass(frozen=True, slots=True)
class Devices:
    """`names`: of files in /dev. `files`, `environment`: see `TemporaryHost`."""

    names: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


def neuron_devices(instance_type: str) -> Devices:
    """The devices of a type; none for types without Neuron devices. Deep checks are off: the machine has no driver."""
    shape = INSTANCE_TYPES.get(instance_type)
    if shape is None or shape.vendor != NEURON:
        return Devices()
    cores, memory = shape.cores // shape.chips, int(shape.memory_gib / shape.chips * 1024) * MIB
    listed = [
        {"neuron_device": index, "instance_type": instance_type, "nc_count": cores, "memory_size": memory}
        for index in range(shape.chips)
    ]
    hardware = {
        "neuron_device_type": shape.accelerator, "neuron_device_count": shape.chips,
        "neuroncore_per_device_count": cores, "neuron_device_memory_size": memory,
    }  # fmt: skip
    report = {"neuron_runtime_data": [], "system_data": {}, "neuron_hardware_info": hardware}
    said = f"echo '{json.dumps(report)}'"
    return Devices(
        names=tuple(f"neuron{index}" for index in range(shape.chips)),
        files={
            f"{TOOLS}/neuron-ls": f"#!/bin/sh\necho '{json.dumps(listed)}'\n",
            f"{TOOLS}/neuron-monitor": f"#!/bin/sh\nwhile {said}; do sleep {MONITOR_PERIOD_S}; done\n",
        },
        environment={"SWITCHYARD_DEEP_CHECKS": "off"},
    )
