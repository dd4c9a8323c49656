"""Layouts of machines: which devices, CPUs and memory each node owns, and how many devices a node of an instance type
needs. Pure."""

import re
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, groupby

from msgspec.structs import replace

from engine_agent.protocol.machine_messages import Device, MachineFacts, NodeResources, mig_profile
from engine_agent.protocol.ports import PORTS_PER_NODE, first_ports
from engine_agent.protocol.states import AgentKind
from fleet.machines.planner import why_unfit
from models_registry.instance_types.planner import CPU, NEURON, NO_ACCELERATOR, NVIDIA, InstanceShape

MOST_NODES = 64
"""Of one machine, and the most devices of one node."""
MOST_SHARING = 8
"""Nodes of one device: each needs gigabytes of memory for the context of its engine alone."""
_LAYOUT_PART = re.compile(r"([1-9][0-9]{0,2})x([1-9][0-9]{0,2})(?:/([1-9][0-9]{0,2}))?", re.ASCII)
_PROFILES_PART = re.compile(r"([1-9][0-9]{0,2})x([1-7]g\.[1-9][0-9]{0,2}gb)", re.ASCII)


class InvalidLayout(ValueError):
    """Not a layout, or not one for this machine; the text says why and what is possible."""


def profiles_of(layout: str) -> tuple[str, ...]:
    """Returns the MIG profile of each node for a layout of profiles, as `7x1g.10gb` or `1x3g.40gb+4x1g.10gb`; ()
    for a layout of devices."""
    parts = [_PROFILES_PART.fullmatch(part) for part in layout[:200].split("+")]
    if not all(parts):
        return ()
    return tuple(part[2] for part in parts if part is not None for _ in range(int(part[1])))


def parse_layout(text: str) -> tuple[Fraction, ...]:
    """Returns the devices of each node: `4x2` is four nodes of two devices, `2x2+4x1` two of two and four of one,
    `16x1/2` sixteen of half a device each, and `7x1g.10gb` seven of one MIG instance. Raises InvalidLayout for another
    form, or more nodes than a machine can have."""
    if profiles := profiles_of(text):
        return (
            parse_layout(f"{len(profiles)}x1") if len(profiles) <= MOST_NODES else parse_layout(f"{MOST_NODES + 1}x1")
        )
    parts = [_LAYOUT_PART.fullmatch(part) for part in text[:200].split("+")]
    if len(text) > 200 or not all(parts):
        raise InvalidLayout(
            f"layout {text[:40]!r} must be NODESxDEVICES, such as 8x1, 4x2, 1x8+2x4, 16x1/2 or 7x1g.10gb"
        )
    counts = [(int(part[1]), int(part[2]), int(part[3] or 1)) for part in parts if part is not None]
    for _, devices, sharing in counts:
        if sharing > MOST_SHARING or (sharing > 1 and devices != 1):
            shares = f"{devices}/{sharing} of a device"
            raise InvalidLayout(f"layout {text!r} has {shares}; possible are 1/2 to 1/{MOST_SHARING} and whole devices")
    sizes = tuple(Fraction(devices, sharing) for nodes, devices, sharing in counts for _ in range(nodes))
    if len(sizes) > MOST_NODES or max(sizes) > MOST_NODES:
        raise InvalidLayout(f"layout {text!r} has too many nodes or devices; at most {MOST_NODES} of each are possible")
    return sizes


def layout_text(sizes: Iterable[Fraction | int]) -> str:
    """`1x4+4x1` for a node of four devices and four of one."""
    return "+".join(f"{len(list(alike))}x{size}" for size, alike in groupby(sizes))


def plan_layout(text: str, facts: MachineFacts) -> tuple[NodeResources, ...]:
    """Returns what each node of a machine owns under a layout. Every device belongs to at most one node, or is shared
    by several, and CPUs and memory are divided in proportion to devices. On a machine without accelerators a device is
    an equal share of its CPUs, and shares of a CPU overlap if there are more shares than CPUs. Raises InvalidLayout."""
    sizes = parse_layout(text)
    if not facts.cpus:
        raise InvalidLayout("its agent is too old for layouts; upgrade it to a newer release")
    last = facts.port_base + PORTS_PER_NODE * (len(sizes) - 1)
    if last not in first_ports(AgentKind.NODE):
        ports = f"{len(sizes) * PORTS_PER_NODE} ports from {facts.port_base}"
        raise InvalidLayout(f"layout {text} needs {ports}, beyond the last port; join the host with a lower --port")
    places = _places(sizes)
    needed = max(place[-1] for place in places) + 1
    if not facts.devices:
        every = [Device(CPU, "share", index=index) for index in range(needed)]
    else:
        every = sorted(facts.devices, key=lambda device: device.index or 0)
        every = _of_profiles(text, every) if profiles_of(text) else every
        _check_devices(text, places, every)
    if any(size < 1 for size in sizes) and (every[0].kind != NVIDIA or mig_profile(every[0].name)):
        whose = "shares of CPUs" if every[0].kind == CPU else f"devices of {every[0].name}"
        raise InvalidLayout(f"layout {text} divides devices, and {whose} cannot be divided further; use whole ones")
    parts = [[every[at] for at in place] for place in places]
    cpus = _divide_cpus(parts, sizes, facts.cpus)
    return tuple(
        NodeResources(
            kind=part[0].kind,
            devices=tuple(device.index or 0 for device in part),
            uuids=tuple(device.uuid for device in part),
            cores_per_device=(part[0].cores or 0) if part[0].kind == NEURON else 0,
            cpus=own,
            memory_bytes=int(facts.memory_bytes * size // len(every)),
            share=float(min(size, Fraction(1))),
        )
        for part, size, own in zip(parts, sizes, cpus, strict=True)
    )


def _places(sizes: Sequence[Fraction]) -> list[range]:
    """Positions of each node's devices, in order. Consecutive parts of a device fill it before the next one."""
    places, following, left = [], 0, Fraction(0)
    for size in sizes:
        if size <= left:
            left -= size
            places.append(range(following - 1, following))
            continue
        whole = max(1, int(size))
        places.append(range(following, following + whole))
        following, left = following + whole, whole - size
    return places


def _of_profiles(text: str, devices: Sequence[Device]) -> list[Device]:
    """The MIG instances for the nodes of a layout of profiles, in order."""
    free: dict[str, list[Device]] = {}
    for device in devices:
        free.setdefault(mig_profile(device.name), []).append(device)
    wanted = profiles_of(text)
    for profile in dict.fromkeys(wanted):
        if wanted.count(profile) > len(free.get(profile, ())):
            there = [f"{len(found)} of {name}" for name, found in sorted(free.items()) if name]
            raise InvalidLayout(
                f"layout {text} needs {wanted.count(profile)} MIG instances of {profile}, and the machine has "
                f"{', '.join(there) or 'none'}; create them with nvidia-smi, which its agent then reports"
            )
    return [free[profile].pop(0) for profile in wanted]


def _check_devices(text: str, parts: Sequence[range], devices: Sequence[Device]) -> None:
    needed = max(part[-1] for part in parts) + 1
    if len({device.kind for device in devices}) > 1 or any(device.index is None for device in devices):
        raise InvalidLayout("its devices are of several makes or without numbers, so no layout can name them")
    if needed > len(devices):
        largest = f"1x{len(devices)}"
        raise InvalidLayout(
            f"layout {text} needs {needed} devices, and the machine has {len(devices)} of {devices[0].name}; "
            f"{largest} or {len(devices)}x1 would fit"
        )
    if any(len(part) > 1 for part in parts) and any(mig_profile(device.name) for device in devices):
        raise InvalidLayout(
            f"layout {text} joins MIG instances, which have no links to each other; use one for each node"
        )
    if devices[0].kind == NEURON and not all(device.cores for device in devices):
        raise InvalidLayout("its driver does not report the cores of its devices, so no layout can name them")


def _divide_cpus(
    parts: Sequence[Sequence[Device]], sizes: Sequence[Fraction], cpus: Sequence[Sequence[int]]
) -> list[tuple[int, ...]]:
    """By NUMA node if each part's devices are attached to one, else over all CPUs in order."""
    places = [{device.numa for device in part} for part in parts]
    numbers = [next(iter(place)) if len(place) == 1 else None for place in places]
    if any(number is None or number >= len(cpus) or not cpus[number] for number in numbers):
        return _cut(sizes, [cpu for group in cpus for cpu in group])
    found: list[tuple[int, ...]] = [()] * len(parts)
    for number in set(numbers):
        own = [at for at, other in enumerate(numbers) if other == number]
        for at, group in zip(own, _cut([sizes[at] for at in own], cpus[number or 0]), strict=True):
            found[at] = group
    return found


def _cut(sizes: Sequence[Fraction], cpus: Sequence[int]) -> list[tuple[int, ...]]:
    """Cuts CPUs in proportion to sizes; every part has at least one."""
    total = sum(sizes)
    ends = [int(end * len(cpus) // total) for end in accumulate(sizes)]
    begins = [0, *ends[:-1]]
    return [tuple(cpus[begin : max(end, begin + 1)]) for begin, end in zip(begins, ends, strict=True)]


def facts_of_node(facts: MachineFacts, owns: NodeResources) -> MachineFacts:
    """Returns the facts of a machine reduced to a node's part, for instance types."""
    own = () if owns.kind == CPU else tuple(_part(owns, device) for device in facts.devices if _owns(owns, device))
    return replace(facts, cores=len(owns.cpus), memory_bytes=owns.memory_bytes, devices=own)


def _part(owns: NodeResources, device: Device) -> Device:
    """The node's share of a device's memory."""
    if owns.share == 1.0 or device.memory_bytes is None:
        return device
    return replace(device, memory_bytes=int(device.memory_bytes * owns.share))


def _owns(owns: NodeResources, device: Device) -> bool:
    return device.uuid in owns.uuids if device.uuid else device.index in owns.devices


def missing_devices(facts: MachineFacts, owns: NodeResources) -> tuple[str, ...]:
    """Returns the devices of a node that its machine does not have any more."""
    if owns.kind == CPU:
        return ()
    uuids = {device.uuid for device in facts.devices if device.uuid}
    indices = {device.index for device in facts.devices}
    named = zip(owns.devices, owns.uuids or [""] * len(owns.devices), strict=True)
    return tuple(
        uuid or f"{owns.kind} {index}" for index, uuid in named if (uuid not in uuids if uuid else index not in indices)
    )


def device_count(layout: str, facts: MachineFacts) -> int:
    """Number of devices that layouts of a machine divide; 0 if unknown. A machine without accelerators has as many
    shares as its layout, which an operator chose."""
    if facts.devices:
        return len(facts.devices)
    return int(sum(parse_layout(layout))) if layout else 0


def even_sizes(devices: int, size: int, *, are_shares: bool) -> list[int]:
    """Sizes of the nodes if each has `size` devices. The rest stays unused; of shares, the last node gets it, because
    the number of shares must stay the same."""
    sizes = [size] * (devices // size)
    if are_shares and sizes:
        sizes[-1] += devices % size
    return sizes


@lru_cache(1024)
def node_sizes(layout: str, facts: MachineFacts, shapes: tuple[InstanceShape, ...]) -> Mapping[str, int]:
    """Instance type -> fewest devices of a node of this type, for the types of which this machine can have nodes. Empty
    if its devices differ, as MIG instances of several profiles."""
    devices = device_count(layout, facts)
    found: dict[str, int] = {}
    if len({device.name for device in facts.devices}) > 1:
        return found
    for shape in shapes:
        for size in [shape.chips] if facts.devices else range(1, devices + 1):
            if 1 <= size <= devices and shape.accelerator != NO_ACCELERATOR and _fits(size, devices, facts, shape):
                found[shape.name] = size
                break
    return found


def _fits(size: int, devices: int, facts: MachineFacts, shape: InstanceShape) -> bool:
    sizes = even_sizes(devices, size, are_shares=not facts.devices)
    try:
        first, *_ = plan_layout(layout_text(sizes), facts)
    except InvalidLayout:
        return False
    return not why_unfit(facts_of_node(facts, first), shape)
