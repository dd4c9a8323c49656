"""What a node owns of its machine: devices, CPUs and memory. The agent restricts itself and its engine to them, and
reports only their use and faults. A node without `NodeResources` owns its whole machine. Devices are identified by
their UUIDs, because the driver's numbers change when one fails; engines get the current numbers, because vLLM 0.10 to
0.20 do not accept UUIDs.

Nodes that share a device take a part of its memory each, and their engines start one after the other, because vLLM
measures the free memory during its start."""

import fcntl
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import msgspec

from engine_agent.engines.base import EngineUnavailable, Launch
from engine_agent.protocol.machine_messages import INSTANCES_FROM, NodeResources, gpu_index
from engine_agent.protocol.messages import Fault
from engine_agent.protocol.signatures import FaultSignature
from engine_agent.protocol.telemetry_messages import Accelerator

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
        indices |= {gpu_index(index) for index in indices if owns.kind == NVIDIA}  # a fault of a GPU hits its instances
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
    if is_instance(owns):
        return {**shown, "CUDA_VISIBLE_DEVICES": owns.uuids[0]}  # instances have no other name
    if owns.kind == NVIDIA:
        # Without the order, CUDA numbers the fastest device first and NVML by PCI address.
        return {**shown, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, indices))}
    if owns.kind == NEURON:
        cores = [n * owns.cores_per_device + core for n in indices for core in range(owns.cores_per_device)]
        return {**shown, "NEURON_RT_VISIBLE_CORES": number_ranges(cores)}
    return shown


def is_instance(owns: NodeResources) -> bool:
    """Whether a node owns a MIG instance."""
    return owns.kind == NVIDIA and owns.devices[0] >= INSTANCES_FROM


def with_devices(launch: Launch, owns: NodeResources | None, machine: Sequence[Accelerator]) -> Launch:
    """Returns the launch of an engine that sees only its node's devices, whatever its plan sets."""
    if owns is None:
        return launch
    kept = {name: value for name, value in launch.env.items() if name not in _REPLACED}
    return replace(launch, env={**kept, **visible_devices(owns, machine)})


MEMORY_OPTION = "--gpu-memory-utilization"
USUAL_MEMORY_SHARE = 0.92
"""vLLM's default of that option."""
SHARES_AS_IT_IS = frozenset({"llama-cpp", "sim"})
"""Engines whose memory follows from their model and context, whatever is free."""


def with_device_share(launch: Launch, owns: NodeResources | None, engine: str, nodes: int) -> Launch:
    """Returns the launch of an engine that takes only its node's share of a device's memory. `nodes`: of its cell.
    Raises EngineUnavailable if the engine cannot be limited, or the cell has several nodes."""
    if owns is not None and is_instance(owns) and nodes > 1:
        raise EngineUnavailable("a cell of several nodes needs whole GPUs: MIG instances have no links to each other")
    if owns is None or owns.share >= 1.0 or (engine in SHARES_AS_IT_IS and nodes == 1):
        return launch
    if nodes > 1:
        raise EngineUnavailable("a cell of several nodes needs whole devices: two ranks cannot use one device")
    if engine != "vllm":
        raise EngineUnavailable(f"engine {engine} cannot be limited to a share of a device; use a node of whole ones")
    argv, stated = _without_option(launch.argv, MEMORY_OPTION)
    try:
        share = float(stated or USUAL_MEMORY_SHARE) * owns.share
    except ValueError:
        raise EngineUnavailable(f"{MEMORY_OPTION} is {stated!r}; it must be a number") from None
    return replace(launch, argv=(*argv, MEMORY_OPTION, f"{share:.4f}"))


def _without_option(argv: Sequence[str], name: str) -> tuple[list[str], str]:
    """The arguments without an option, and its last value, or ""."""
    left, value = [], ""
    words = iter(argv)
    for word in words:
        if word == name:
            value = next(words, "")
        elif word.startswith(f"{name}="):
            value = word.partition("=")[2]
        else:
            left.append(word)
    return left, value


class DeviceTurn:
    """The right to start an engine on a shared device, one node of a machine at a time. It ends with `leave`, or with
    this process. `folder`: common to the nodes of the machine."""

    def __init__(self, folder: Path, owns: NodeResources | None) -> None:
        shared = owns if owns is not None and owns.share < 1.0 else None
        named = (shared.uuids or shared.devices)[0] if shared else ""
        self._path = folder / f"{shared.kind}-{named}.lock" if shared else None
        self._lock: int | None = None

    def take(self) -> bool:
        """Whether this node may start its engine now. Raises OSError if the folder cannot be used."""
        if self._path is None or self._lock is not None:
            return True
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        self._lock = lock
        return True

    def leave(self) -> None:
        """Lets the next one start: the engine is ready, or has ended."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


INSTANCE_USED_LEAST = 96 * 2**20
"""Bytes of a MIG instance with an engine: the context of CUDA alone takes more, and an idle instance a few MiB."""


class InstanceCheck:
    """Whether an engine that is ready uses the MIG instance of its node. vLLM takes the number of an instance for that
    of a GPU, so it could run elsewhere without an error."""

    def __init__(self, owns: NodeResources | None) -> None:
        self._owns = owns if owns is not None and is_instance(owns) else None
        self._read_before: Accelerator | None = None

    def restart(self) -> None:
        """Call at each start of an engine."""
        self._read_before = None

    def trouble(self, machine: Sequence[Accelerator]) -> str:
        """Why the engine must end, or "". `machine`: all devices as last read; only a reading after the first call, at
        which the engine was ready, is evidence."""
        found = own_devices(self._owns, machine) if self._owns is not None else ()
        if not found:
            return ""
        (instance,) = found
        self._read_before = self._read_before or instance
        if instance is self._read_before or instance.memory_used_bytes is None:
            return ""
        if instance.memory_used_bytes >= INSTANCE_USED_LEAST:
            return ""
        used = f"{instance.memory_used_bytes / 2**20:.0f} MiB"
        return f"the engine is not on its MIG instance {instance.uuid} ({instance.name}), which has {used} in use"


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
