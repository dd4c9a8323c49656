"""What a node owns of its machine: devices, CPUs and memory. The agent restricts itself and its engine to them, and
reports only their use and faults. A node without `NodeResources` owns its whole machine. Devices are identified by
their UUIDs, because the driver's numbers change when one fails; engines get the current numbers, because vLLM 0.10 to
0.20 do not accept UUIDs."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby

import msgspec

from engine_agent.engines.base import EngineUnavailable, Launch
from engine_agent.protocol.machine_messages import NodeResources
from engine_agent.protocol.messages import Accelerator, Fault
from engine_agent.protocol.signatures import FaultSignature

NVIDIA, NEURON, CPU = "nvidia", "neuron", "cpu"
DEVICES_VARIABLE = "SWITCHYARD_DEVICES"
"""The devices of an engine's node, for people and programs that read its environment: `nvidia 0,1`."""
_REPLACED = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES")
"""Variables that a plan must not set on a node that owns only some devices."""


def resources_from(text: str) -> NodeResources:
    """Reads the option of the node agent. Raises ValueError if it is not such an object."""
    try:
        found = msgspec.json.decode(text, type=NodeResources)
    except msgspec.DecodeError as error:
        raise ValueError(f"--owns is no JSON object with what a node owns: {error}") from error
    if not found.devices:
        raise ValueError("--owns names no devices")
    if found.uuids and len(found.uuids) != len(found.devices):
        raise ValueError(f"--owns has {len(found.uuids)} UUIDs for {len(found.devices)} devices")
    return found


def use_own_cpus(owns: NodeResources) -> None:
    """Restricts this process, and all that it starts, to the node's CPUs. Raises ValueError if none of them exists."""
    if not owns.cpus:
        return
    usable = os.sched_getaffinity(0)
    own = usable.intersection(owns.cpus)
    if not own:
        raise ValueError(f"CPUs {number_ranges(owns.cpus)} are not usable; there are {number_ranges(sorted(usable))}")
    os.sched_setaffinity(0, own)


def own_devices(owns: NodeResources | None, devices: Iterable[Accelerator]) -> tuple[Accelerator, ...]:
    """Returns the node's devices among those of the machine, in the order of its order."""
    if owns is None:
        return tuple(devices)
    alike = [device for device in devices if device.kind == owns.kind]
    by_uuid = {device.uuid: device for device in alike if device.uuid}
    by_index = {device.index: device for device in alike}
    uuids = owns.uuids or ("",) * len(owns.devices)
    found = (by_uuid.get(uuid) if uuid else by_index.get(n) for n, uuid in zip(owns.devices, uuids, strict=True))
    return tuple(device for device in found if device is not None)


def own_faults(
    owns: NodeResources | None, on_fault: Callable[[Fault], None], own: Callable[[], Sequence[Accelerator]]
) -> Callable[[Fault], None]:
    """Returns a function that passes on the faults of the node's devices, and those of no single device. `own`: the
    node's devices that their driver shows; before it has answered, the order's numbers count."""
    if owns is None:
        return on_fault

    def take(fault: Fault) -> None:
        found = own()
        of = fault.evidence.get("device", fault.evidence.get("nd_id"))
        indices = {device.index for device in found} or set(owns.devices)
        if of is not None and str(of) not in {str(index) for index in indices}:
            return
        if fault.signature == FaultSignature.ACCELERATOR_MISSING and len(found) == len(owns.devices):
            return
        on_fault(fault)

    return take


def visible_devices(owns: NodeResources | None, machine: Sequence[Accelerator]) -> dict[str, str]:
    """Returns the variables that show a process only its node's devices. `machine`: all that the driver shows; empty if
    it has not answered yet, and then the order's numbers count. Raises EngineUnavailable if some are missing."""
    if owns is None:
        return {}
    indices = _current_indices(owns, machine)
    shown = {DEVICES_VARIABLE: f"{owns.kind} {','.join(map(str, indices))}"}
    if owns.kind == NVIDIA:
        # Without the order, CUDA numbers the fastest device first and NVML by PCI address.
        return {**shown, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, indices))}
    if owns.kind == NEURON:
        cores = [n * owns.cores_per_device + core for n in indices for core in range(owns.cores_per_device)]
        return {**shown, "NEURON_RT_VISIBLE_CORES": number_ranges(cores)}
    return shown


def with_devices(launch: Launch, owns: NodeResources | None, machine: Sequence[Accelerator]) -> Launch:
    """Returns the launch of an engine that sees only its node's devices, whatever its plan sets."""
    if owns is None:
        return launch
    kept = {name: value for name, value in launch.env.items() if name not in _REPLACED}
    return replace(launch, env={**kept, **visible_devices(owns, machine)})


def _current_indices(owns: NodeResources, machine: Sequence[Accelerator]) -> tuple[int, ...]:
    if owns.kind == CPU or not any(device.kind == owns.kind for device in machine):
        return owns.devices
    found = own_devices(owns, machine)
    if len(found) < len(owns.devices):
        there = {device.uuid or device.index for device in found}
        lost = [str(name) for name in owns.uuids or owns.devices if name not in there]
        raise EngineUnavailable(f"{owns.kind} {', '.join(lost)} of this node are missing on its machine")
    return tuple(device.index for device in found)


def number_ranges(numbers: Iterable[int]) -> str:
    """Returns `0-3,8` for 0, 1, 2, 3 and 8, in the given order."""
    runs = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    spans = [[number for _, number in run] for _, run in runs]
    return ",".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans)
