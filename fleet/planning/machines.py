"""Which instance type a machine is, which machine a launch takes, and what an operator should know of one. Pure.

A type that an operator stated when he invited the host counts, whatever its agent found; that they differ is said.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from engine_agent.protocol.machine_messages import Device, MachineFacts
from kernel.ages import age_text
from models_registry.planning.instance_types import InstanceShape

POOLED = "machines"
"""The provider whose machines are a pool of the region's own: hosts that joined by an invitation."""
CLOUDS = frozenset({"aws"})
"""Providers whose machines are launched when they are wanted, and prove by themselves which ones they are."""
WITH_MACHINE_AGENT = CLOUDS | {POOLED}
CPU = "cpu"
GIB = 1024**3
MEMORY_SHARE = 0.9
"""Of the memory that a type states, what must be there: makers count 10^9 bytes, and drivers keep some."""
SILENT_AFTER_S = 75.0
"""Machine agents report every 30 s, and at once when something changes."""
CLOCK_NOTICE_S = 2.0
LOW_DISK_BYTES = 20 * GIB


def has_machine_agent(provider: str) -> bool:
    """Whether a machine agent runs on its machines: it starts their node or ingress, and moves it to other releases."""
    return provider in WITH_MACHINE_AGENT


@dataclass(frozen=True, slots=True)
class PooledMachine:
    """A free machine. `instance_type`: as it was invited, or as `instance_type_of` found; "" for none."""

    id: str
    instance_type: str
    connected: bool
    facts: MachineFacts


@dataclass(frozen=True, slots=True)
class NoMachine:
    """No free machine fits; the text says how many were looked at and what they lack."""

    reason: str


def why_unfit(facts: MachineFacts, shape: InstanceShape) -> str:
    """What a machine lacks to be of a type, as a clause; "" if it lacks nothing."""
    if shape.accelerator == CPU:
        wanted = shape.memory_gib * GIB * MEMORY_SHARE
        if facts.memory_bytes < wanted:
            return f"has {facts.memory_bytes / GIB:.1f} GiB of memory instead of {shape.memory_gib:g}"
        return f"has {len(facts.devices)} accelerators instead of none" if facts.devices else ""
    devices = [device for device in facts.devices if _is_of(device, shape.accelerator)]
    if len(devices) != shape.chips:
        return f"has {len(devices)} chips of {shape.accelerator} instead of {shape.chips}"
    cores = [device.cores for device in devices]
    if shape.cores and None not in cores and sum(filter(None, cores)) != shape.cores:
        return f"has {sum(filter(None, cores))} cores of {shape.accelerator} instead of {shape.cores}"
    memory = [device.memory_bytes for device in devices]
    there = sum(filter(None, memory))
    if None not in memory and there < shape.memory_gib * GIB * MEMORY_SHARE:
        return f"has {there / GIB:.0f} GiB on its accelerators instead of {shape.memory_gib:g}"
    return ""


def _is_of(device: Device, accelerator: str) -> bool:
    """`NVIDIA H100 80GB HBM3` is an h100, `trainium1` a trainium, and `trn1.32xlarge` says so by its family."""
    family = {"trainium": "trn1", "trainium2": "trn2", "inferentia2": "inf2"}.get(accelerator, accelerator)
    name = device.name.lower()
    return accelerator in name or family in name


def instance_type_of(facts: MachineFacts, shapes: Iterable[InstanceShape]) -> str:
    """The type that a machine is: of those that fit, the one with the most chips and memory; "" if none fits."""
    fitting = [shape for shape in shapes if not why_unfit(facts, shape)]
    fitting.sort(key=lambda shape: (-shape.chips, -shape.memory_gib, shape.name))
    return fitting[0].name if fitting else ""


def plan_machine(shape: InstanceShape, machines: Sequence[PooledMachine]) -> PooledMachine | NoMachine:
    """The free machine that a launch of this type takes: the one with the least that it does not need."""
    ready = [machine for machine in machines if machine.connected]
    fitting = [machine for machine in ready if machine.instance_type == shape.name]
    if fitting:
        return min(fitting, key=lambda machine: (len(machine.facts.devices), machine.facts.memory_bytes, machine.id))
    if not machines:
        return NoMachine("no machine is free there; `switchyard machine add` invites one")
    if not ready:
        return NoMachine(f"none of the {len(machines)} free machines there is connected")
    clauses = sorted({f"{one.id} {why_unfit(one.facts, shape) or f'is {one.instance_type}'}" for one in ready})
    more = f", and {len(clauses) - 3} more" if len(clauses) > 3 else ""
    return NoMachine(f"no free machine there is {shape.name}: {', '.join(clauses[:3])}{more}")


def machine_notices(
    *, facts: MachineFacts | None, stated: InstanceShape | None, found: str, silent_s: float | None
) -> tuple[str, ...]:
    """What an operator should know of a machine, a sentence each. `stated`: the type that it was invited as."""
    notices = []
    if silent_s is not None and silent_s > SILENT_AFTER_S:
        notices.append(f"Its machine agent has been silent for {age_text(silent_s)}.")
    if facts is None:
        return tuple(notices)
    if stated is not None and (lack := why_unfit(facts, stated)):
        notices.append(f"It was invited as {stated.name}, but {lack}.")
    elif stated is None and not found:
        notices.append(f"No instance type fits it: {describe(facts)}. Invite it with an instance type.")
    if abs(facts.clock_ahead_s) > CLOCK_NOTICE_S:
        direction = "ahead of" if facts.clock_ahead_s > 0 else "behind"
        notices.append(f"Its clock is {age_text(abs(facts.clock_ahead_s))} {direction} the control plane's.")
    if facts.disk_free_bytes < LOW_DISK_BYTES:
        notices.append(f"It has {facts.disk_free_bytes / GIB:.0f} GiB of disk free.")
    return (*notices, *facts.notices)


def describe(facts: MachineFacts) -> str:
    """A machine in one line: `8 x NVIDIA H100 80GB HBM3, 96 cores, 1007 GiB`."""
    names = sorted({device.name for device in facts.devices})
    counts = [f"{sum(device.name == name for device in facts.devices)} x {name}" for name in names]
    return ", ".join([*(counts or ["no accelerators"]), f"{facts.cores} cores", f"{facts.memory_bytes / GIB:.0f} GiB"])


def silent_for_s(last_seen_at: datetime | None, now: datetime) -> float | None:
    """Seconds since a machine's last report; None if it never sent one."""
    return None if last_seen_at is None else (now - last_seen_at).total_seconds()
