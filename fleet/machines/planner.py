"""Decisions about machines. Pure. Warm spares of a region: how many to keep, and which of them are for repairs only.
Instance types: detected from hardware, unless stated in the invitation. Launches of `machines`: the free host that fits
best. Presence of cloud machines: gone only if seen to end, or absent from two complete lists while old enough; a wrong
"gone" would stop a serving cell. Notices from several sources: the first statement counts immediately and the others
confirm it; a machine's own statement never cancels the cloud's, because the machine may be compromised. Provider limits
are here and not in the providers' classes, so that planners import no cloud code."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from engine_agent.protocol.machine_messages import INSTANCES_FROM, MachineFacts, NodeResources, gpu_index
from fleet.clouds.planning.call_budget import TOPOLOGY_CALL_EVERY_S
from fleet.reconcile.planning.states import NoticeSource
from kernel.ages import age_text
from models_registry.instance_types.planner import (
    CPU,
    CPU_ARCHITECTURES,
    NO_ACCELERATOR,
    VENDORS,
    WITHOUT_CHIPS,
    InstanceShape,
    accelerator_of,
    completed,
    is_device_of,
    shape_problems,
)

WARM_MAX = 10_000


class InvalidWarmSpares(ValueError):
    """Not valid warm spares; the text says why."""


@dataclass(frozen=True, slots=True)
class WarmSpares:
    """`warm` idle nodes of a type are kept; new cells leave `repair_only` of them for repairs."""

    warm: int
    repair_only: int = 0


def parse_warm_spares(stated: Mapping[str, Any]) -> dict[str, WarmSpares]:
    """Parses `{"trn1.32xlarge": 2}` or `{"trn1.32xlarge": {"warm": 2, "repair_only": 1}}`. Raises InvalidWarmSpares for
    a value of another form, or more for repairs than are kept."""
    return {kind: _parse_spares(kind, value) for kind, value in stated.items()}


def _parse_spares(kind: str, value: Any) -> WarmSpares:
    fields = value if isinstance(value, Mapping) else {"warm": value}
    unknown = sorted(set(fields) - {"warm", "repair_only"})
    if unknown or "warm" not in fields:
        raise InvalidWarmSpares(f'spares.{kind} is {value!r}; it must be a number or {{"warm": …, "repair_only": …}}')
    for name, number in fields.items():
        if type(number) is not int or not 0 <= number <= WARM_MAX:
            raise InvalidWarmSpares(f"spares.{kind}: {name} is {number!r}; it must be a whole number to {WARM_MAX}")
    spares = WarmSpares(**fields)
    if spares.repair_only > spares.warm:
        raise InvalidWarmSpares(f"spares.{kind}: repair_only is {spares.repair_only}; it must be at most {spares.warm}")
    return spares


POOLED = "machines"
"""The provider of hosts that joined by invitation."""
LOCAL = "local"
"""The provider of processes on the control plane's computer. With a layout, each of its regions has one machine."""
CLOUDS = frozenset({"aws", "ecs"})
"""Providers that launch machines on demand, which attest their identity."""
WITH_MACHINE_AGENT = CLOUDS | {POOLED}
INGRESS_TYPE = "c7i.2xlarge"
"""Type of an ingress's machine in a cloud, unless stated."""
GIB = 1024**3
MEMORY_SHARE = 0.9
"""Share of a type's memory that must be present: vendors count 10^9 bytes, and drivers reserve some."""
SILENT_AFTER_S = 75.0
"""Machine agents report every 30 s, and immediately after a change."""
CLOCK_NOTICE_S = 2.0
LOW_DISK_BYTES = 20 * GIB
HARDWARE_DIFFERS = "hardware-differs"
"""The kind of incidents about machines that are not what their instance type states. Its subject is the machine."""
FOUND = "found by a machine's agent"
FOUND_GIB_MOST, FOUND_CORES_MOST = 100_000, 10_000
"""No type is made of larger reports, which are mistakes or attacks."""


WHOLE = "machine"
"""Key of `Machine.broken` for the machine itself; the others are devices."""


def device_keys(owns: NodeResources, evidence: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the node's devices that a fault is about: the one in its evidence, else all of the node. A device is
    named by its UUID, because the driver's numbers change when one fails, or as `neuron 3` if it has none."""
    keys = {index: uuid or f"{owns.kind} {index}" for index, uuid in _named(owns)}
    if (uuid := evidence.get("uuid")) in owns.uuids and uuid:
        return (str(uuid),)
    index = evidence.get("device", evidence.get("nd_id"))
    mine = [key for number, key in keys.items() if str(number) == str(index) and not any(owns.uuids)]
    return tuple(mine or keys.values())


def _named(owns: NodeResources) -> Iterable[tuple[int, str]]:
    return zip(owns.devices, owns.uuids or ("",) * len(owns.devices), strict=True)


def devices_used(owns: NodeResources) -> tuple[str, ...]:
    """Returns the names by which faults concern a node's devices. A fault of a GPU concerns its MIG instances."""
    names = [uuid or f"{owns.kind} {index}" for index, uuid in _named(owns)]
    return (*names, *(f"{owns.kind} {gpu_index(index)}" for index in owns.devices if index >= INSTANCES_FROM))


def why_set_aside(owns: NodeResources, broken: Mapping[str, str]) -> str:
    """Returns why a node cannot have its part of a machine, or ""."""
    if not broken:
        return ""
    keys = (WHOLE, *(uuid or f"{owns.kind} {index}" for index, uuid in _named(owns)))
    return next((broken[key] for key in keys if key in broken), "")


def has_machine_agent(provider: str) -> bool:
    """Whether its machines have a machine agent, which starts their node or ingress and changes its release."""
    return provider in WITH_MACHINE_AGENT


@dataclass(frozen=True, slots=True)
class PooledMachine:
    """A free machine, or a free node (`slot`) of a machine with a layout. `instance_type`: stated or detected; "" for
    none. `facts`: of the node's part. `in_use`: nodes of the machine that are taken."""

    id: str
    instance_type: str
    connected: bool
    facts: MachineFacts
    slot: int | None = None
    in_use: int = 0


@dataclass(frozen=True, slots=True)
class NoMachine:
    """No free machine fits; the text says how many were checked and what they lack."""

    reason: str


def why_unfit(facts: MachineFacts, shape: InstanceShape) -> str:
    """Returns why a machine is not of a type, as a clause, or ""."""
    arch = cpu_arch_of(facts)
    if shape.cpu_arch and arch and arch != shape.cpu_arch:
        return f"has a processor of {arch} instead of {shape.cpu_arch}"
    if shape.accelerator in WITHOUT_CHIPS:
        if facts.memory_bytes < shape.memory_gib * GIB * MEMORY_SHARE:
            return f"has {facts.memory_bytes / GIB:.1f} GiB of memory instead of {shape.memory_gib:g}"
        return f"has {len(facts.devices)} accelerators instead of none" if facts.devices else ""
    devices = [device for device in facts.devices if is_device_of(device.name, shape.accelerator)]
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


def cpu_arch_of(facts: MachineFacts) -> str:
    """The architecture of its processor as instance types name it, "" if its agent reported another one or none."""
    machine = facts.system.rpartition(" ")[2]
    arch = {"aarch64": "arm64"}.get(machine, machine)
    return arch if arch in CPU_ARCHITECTURES else ""


def instance_type_of(facts: MachineFacts, shapes: Iterable[InstanceShape], preferred: Collection[str] = ()) -> str:
    """Returns the fitting type with the most chips and memory, or "". Among equal ones a `preferred` type, then the one
    whose host is most alike. Never a type for ingresses alone, which any host without accelerators would fit."""
    fitting = [shape for shape in shapes if shape.accelerator != NO_ACCELERATOR and not why_unfit(facts, shape)]

    def order(shape: InstanceShape) -> tuple[Any, ...]:
        host = abs((shape.vcpus or 0) - facts.cores), abs((shape.host_memory_gib or 0) - facts.memory_bytes / GIB)
        return -shape.chips, -shape.memory_gib, shape.name not in preferred, *host, shape.name

    return min(fitting, key=order).name if fitting else ""


def shape_found(facts: MachineFacts) -> InstanceShape | None:
    """The type of a host that is of no known type, from what its agent found: same hardware, same name. None if its
    accelerators differ from each other, or their driver does not report their memory."""
    host_gib, arch = round(facts.memory_bytes / GIB, 1), cpu_arch_of(facts)
    if not 0 < host_gib <= FOUND_GIB_MOST or not 0 < facts.cores <= FOUND_CORES_MOST:
        return None
    host: dict[str, Any] = {"cpu_arch": arch, "vcpus": facts.cores, "host_memory_gib": host_gib, "notes": FOUND}
    if not facts.devices:
        return _completed(
            f"found.cpu-{facts.cores}x-{host_gib:g}gib", CPU, {"memory_gib": host_gib, "cores": 1, **host}
        )
    first, chips = facts.devices[0], len(facts.devices)
    if any((one.kind, one.name, one.cores) != (first.kind, first.name, first.cores) for one in facts.devices):
        return None
    if first.cores is not None and not 1 <= first.cores <= FOUND_CORES_MOST:
        return None
    accelerator, each_gib = accelerator_of(first.name), min(one.memory_bytes or 0 for one in facts.devices) / GIB
    if not accelerator or not 0 < each_gib * chips <= FOUND_GIB_MOST:
        return None
    stated = {"chips": chips, "memory_gib": round(each_gib * chips, 1), "vendor": first.kind, **host}
    if first.cores is not None:
        stated["cores"] = first.cores * chips
    name = f"found.{chips}x{accelerator}-{each_gib:.0f}gib" + (f"-{arch}" if arch and arch != "x86_64" else "")
    return _completed(name, accelerator, stated)


def _completed(name: str, accelerator: str, stated: Mapping[str, Any]) -> InstanceShape | None:
    shape = completed(InstanceShape(name, accelerator, **stated), stated)
    return None if any(shape_problems(shape)) or shape.vendor not in VENDORS else shape


@dataclass(frozen=True, slots=True)
class HardwareDifference:
    """A machine that is not what its instance type states."""

    summary: str
    evidence: Mapping[str, Any]


def hardware_difference(
    machine: str, facts: MachineFacts, shape: InstanceShape, *, is_stated: bool
) -> HardwareDifference | None:
    """`is_stated`: by an operator or a cloud; else its agent found this type before. None if it has what it should."""
    lack = why_unfit(facts, shape)
    if not lack:
        return None
    was = "is stated as" if is_stated else "was found as"
    evidence = {"instance_type": shape.name, "stated": is_stated, "difference": lack, "found": describe(facts)}
    return HardwareDifference(f"{machine} {was} {shape.name}, but {lack}", evidence)


def plan_machine(shape: InstanceShape, machines: Sequence[PooledMachine]) -> PooledMachine | NoMachine:
    """Returns the free machine for a launch of this type: the one with the least excess hardware, and among shared
    machines the fullest, so that whole machines stay free for other layouts."""
    ready = [machine for machine in machines if machine.connected]
    fitting = [machine for machine in ready if machine.instance_type == shape.name]
    if fitting:
        return min(
            fitting,
            key=lambda one: (len(one.facts.devices), one.facts.memory_bytes, -one.in_use, one.id, one.slot or 0),
        )
    if not machines:
        return NoMachine("no machine is free; `switchyard machine add` invites one")
    if not ready:
        return NoMachine(f"none of the {len(machines)} free machines is connected")
    clauses = sorted({f"{one.id} {why_unfit(one.facts, shape) or f'is {one.instance_type}'}" for one in ready})
    more = f", and {len(clauses) - 3} more" if len(clauses) > 3 else ""
    return NoMachine(f"no free machine is {shape.name}: {', '.join(clauses[:3])}{more}")


def machine_notices(
    *, facts: MachineFacts | None, stated: InstanceShape | None, found: str, silent_s: float | None
) -> tuple[str, ...]:
    """Returns notices for operators, one sentence each. `stated`: the type in its invitation."""
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
    """Returns a machine in one line: `8 x NVIDIA H100 80GB HBM3, 96 cores, 1007 GiB`."""
    names = sorted({device.name for device in facts.devices})
    counts = [f"{sum(device.name == name for device in facts.devices)} x {name}" for name in names]
    return ", ".join([*(counts or ["no accelerators"]), f"{facts.cores} cores", f"{facts.memory_bytes / GIB:.0f} GiB"])


def silent_for_s(last_seen_at: datetime | None, now: datetime) -> float | None:
    """Seconds since a machine's last report; None if it never sent one."""
    return None if last_seen_at is None else (now - last_seen_at).total_seconds()


@dataclass(frozen=True, slots=True)
class ProviderLimits:
    """`launch_grace_s`: after a launch, "gone" may mean "not listed yet" for so long. `join_timeout_s`: limit from
    launch to the agent's join; GPUStack gives a worker 150 s. `boot_s`: usual time for that. `places_s`: time until a
    cloud states the places of 100 machines; 0 if it states none. `has_markets`: whether there are several ways to buy.
    `has_power_control`: whether it can reboot a machine."""

    launch_grace_s: float = 10.0
    join_timeout_s: float = 120.0
    boot_s: float = 30.0
    places_s: float = 0.0
    has_markets: bool = False
    has_power_control: bool = False


LIMITS: Mapping[str, ProviderLimits] = {
    # New machines are not in every list, and one with many accelerators boots for 15 minutes.
    "aws": ProviderLimits(
        launch_grace_s=300.0,
        join_timeout_s=1200.0,
        boot_s=600.0,
        places_s=TOPOLOGY_CALL_EVERY_S,
        has_markets=True,
        has_power_control=True,
    ),
    # Its container instances run already: a task only pulls its image.
    # Its `gone` is proof: a task that is not listed yet counts as running.
    "ecs": ProviderLimits(launch_grace_s=0.0, join_timeout_s=600.0, boot_s=90.0, places_s=TOPOLOGY_CALL_EVERY_S),
    "local": ProviderLimits(has_power_control=True),
    POOLED: ProviderLimits(),
}


def provider_limits(provider: str) -> ProviderLimits:
    """Returns the defaults for providers that are not registered any more."""
    return LIMITS.get(provider, ProviderLimits())


VISIBLE_AFTER = timedelta(minutes=10)
"""After this long a launched machine is in every complete list."""
ABSENT_LISTS = 2
ENDED = frozenset({"shutting-down", "terminated", "gone", "STOPPED", "DELETED"})
"""Final states of EC2's machines and, in capitals, of ECS's tasks. `gone`: proven by lists; its end was not seen."""
GONE = "gone"


@dataclass(frozen=True, slots=True)
class KnownMachine:
    """`launched_at`: when its launch was recorded. `absent_lists`: complete lists in a row without it."""

    provider_id: str
    zone: str
    state: str
    launched_at: datetime
    absent_lists: int = 0


@dataclass(frozen=True, slots=True)
class Listed:
    """A list that began at `began_at`. `states` by ID. `complete`: all pages arrived. Machines in `silent_zones` may be
    missing."""

    states: Mapping[str, str]
    began_at: datetime
    complete: bool
    silent_zones: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class ListedState:
    provider_id: str
    state: str
    absent_lists: int


def plan_listed_states(machines: Collection[KnownMachine], listed: Listed) -> tuple[ListedState, ...]:
    """Returns the changes of recorded machines that follow from a list."""
    found = [_listed_state(machine, listed) for machine in machines]
    return tuple(one for one in found if one is not None)


def _listed_state(machine: KnownMachine, listed: Listed) -> ListedState | None:
    if machine.state in ENDED and listed.states.get(machine.provider_id) not in ENDED:
        return None  # final, although a late list may show it
    if machine.provider_id in listed.states:
        return ListedState(machine.provider_id, listed.states[machine.provider_id], 0)
    if not listed.complete or machine.zone in listed.silent_zones:
        return None
    if listed.began_at - machine.launched_at < VISIBLE_AFTER:
        return None
    absent = machine.absent_lists + 1
    return ListedState(machine.provider_id, GONE if absent >= ABSENT_LISTS else machine.state, absent)


LISTED = frozenset({NoticeSource.STATUS, NoticeSource.BLOCK})
"""Sources whose lists are complete: their latest statement overrides earlier announcements."""
MACHINE_SPEAKS_EVERY = timedelta(seconds=60)
"""A machine's first statement is stored immediately, later ones of the same kind after this long."""
LATEST = timedelta(days=60)


class Statement(msgspec.Struct, frozen=True):
    """`key`: identifies the statement. `over`: it was withdrawn."""

    key: str
    at: datetime
    ends_at: datetime | None = None
    over: bool = False


Evidence = Mapping[NoticeSource, Statement]
"""The latest statement of each source."""


def add_statement(evidence: Evidence, source: NoticeSource, statement: Statement) -> Evidence | None:
    """Returns the evidence with one more statement; None if it is known or outdated."""
    return None if _is_known(evidence.get(source), statement) else {**evidence, source: statement}


def _is_known(before: Statement | None, statement: Statement) -> bool:
    if before is None:
        return statement.over
    if statement.at < before.at:
        return True
    if before.over:
        return statement.over or statement.at == before.at
    return not statement.over and statement.key == before.key


def is_in_force(evidence: Evidence) -> bool:
    """Whether the notice is still valid: not if a list dropped it, or all sources withdrew it."""
    listed = [statement for source, statement in evidence.items() if source in LISTED]
    return not all(statement.over for statement in listed or evidence.values())


def earliest_end(evidence: Evidence) -> datetime | None:
    """Returns the earliest end among valid statements, or None."""
    counts = {source: statement for source, statement in evidence.items() if not statement.over}
    if LISTED & counts.keys():
        counts.pop(NoticeSource.EVENTS, None)
    return min((statement.ends_at for statement in counts.values() if statement.ends_at is not None), default=None)


def bounded_end(seconds: float | None, now: datetime) -> datetime | None:
    """Returns the end that a machine stated, in seconds since 1970: never in the past or in the far future."""
    if seconds is None:
        return None
    ahead_s = seconds - now.timestamp()
    if 0.0 <= ahead_s <= LATEST.total_seconds():
        return datetime.fromtimestamp(seconds, UTC)
    return now if ahead_s < 0.0 else now + LATEST
