"""How many spares a region keeps warm, and which of them only repairs may use. Reads what is stated, no more.

Which instance type a machine is, which machine a launch takes, and what an operator should know of one. Pure.

A type that an operator stated when he invited the host counts, whatever its agent found; that they differ is said.

What planners must know of a provider beside what it says of single machines: how long its machines take,
and whether they are bought in markets. Pure.

Whether a machine of a cloud is there, from lists that lag and zones that do not answer. Pure.

Gone is only what was seen to end, or was absent from two complete lists in a row while it was old enough to be in
them. Of what a list does not show nothing follows by itself: a wrong "gone" would end a cell that serves.

What several sources said of one kind of announcement about one machine: when it counts, until when, and when it is
over. Pure.

The same thing is heard several times, late and out of order. The first word counts at once, the others confirm it. A
machine speaks of itself alone and may be somebody else's by now: what it says ends nothing that the cloud said.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from engine_agent.protocol.machine_messages import Device, MachineFacts
from fleet.clouds.planning.call_budget import TOPOLOGY_CALL_EVERY_S
from fleet.reconcile.planning.states import NoticeSource
from kernel.ages import age_text
from models_registry.versions.planning.machines import InstanceShape

WARM_MAX = 10_000


class InvalidWarmSpares(ValueError):
    """Not a statement of warm spares; the text says what is wrong and what would be right."""


@dataclass(frozen=True, slots=True)
class WarmSpares:
    """`warm` idle nodes of a type are kept; new cells must leave `repair_only` of them, so that repairs need not wait
    for a machine to boot."""

    warm: int
    repair_only: int = 0


def parse_warm_spares(stated: Mapping[str, Any]) -> dict[str, WarmSpares]:
    """Instance type -> what to keep, from `{"trn1.32xlarge": 2}` or `{"trn1.32xlarge": {"warm": 2, "repair_only": 1}}`.

    Raises:
        InvalidWarmSpares: a value of another form, or more for repair than are kept.
    """
    return {kind: _parse(kind, value) for kind, value in stated.items()}


def _parse(kind: str, value: Any) -> WarmSpares:
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


@dataclass(frozen=True, slots=True)
class ProviderLimits:
    """`launch_grace_s`: how long after a launch "gone" may mean that the provider does not list the machine yet.
    `join_timeout_s`: from its launch until its agent must have joined; GPUStack gives a worker 150 s. `boot_s`: how
    long that usually takes. `places_s`: how long its cloud takes to say where 100 machines are in its network; 0: they
    say so themselves, or nobody does. `has_markets`: they are bought in one of several."""

    launch_grace_s: float = 10.0
    join_timeout_s: float = 120.0
    boot_s: float = 30.0
    places_s: float = 0.0
    has_markets: bool = False


LIMITS: Mapping[str, ProviderLimits] = {
    # A machine is not in every list at once, and one with many accelerators takes 15 minutes to boot.
    "aws": ProviderLimits(
        launch_grace_s=300.0, join_timeout_s=1200.0, boot_s=600.0, places_s=TOPOLOGY_CALL_EVERY_S, has_markets=True
    ),
    "local": ProviderLimits(),
    POOLED: ProviderLimits(),
}
"""By name, as regions name their provider. Here and not at the classes, because who reads the fleet for a plan must not
import what calls a cloud."""


def provider_limits(provider: str) -> ProviderLimits:
    """Of a provider that is gone from the registry, the usual ones: its regions' nodes are judged all the same."""
    return LIMITS.get(provider, ProviderLimits())


VISIBLE_AFTER = timedelta(minutes=10)
"""When a machine that was launched is in every complete list."""
ABSENT_LISTS = 2
ENDED = frozenset({"shutting-down", "terminated", "gone"})
"""States of a machine that will not come back. `gone`: lists prove it, nobody saw its end."""
GONE = "gone"


@dataclass(frozen=True, slots=True)
class KnownMachine:
    """`launched_at`: when its launch was noted. `absent_lists`: in how many complete lists in a row it was not."""

    provider_id: str
    zone: str
    state: str
    launched_at: datetime
    absent_lists: int = 0


@dataclass(frozen=True, slots=True)
class Listed:
    """What one list said, which began at `began_at`. `states` by id. `complete`: all pages came. Machines in
    `silent_zones` may be missing in it."""

    states: Mapping[str, str]
    began_at: datetime
    complete: bool
    silent_zones: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Presence:
    """What is known of a machine from now on."""

    provider_id: str
    state: str
    absent_lists: int


def plan_presence(machines: Collection[KnownMachine], listed: Listed) -> tuple[Presence, ...]:
    """What a list changes about the machines that are recorded."""
    found = [_judge(machine, listed) for machine in machines]
    return tuple(one for one in found if one is not None)


def _judge(machine: KnownMachine, listed: Listed) -> Presence | None:
    if machine.state in ENDED and listed.states.get(machine.provider_id) not in ENDED:
        return None  # what ended does not come back, however a late list shows it
    if machine.provider_id in listed.states:
        return Presence(machine.provider_id, listed.states[machine.provider_id], 0)
    if not listed.complete or machine.zone in listed.silent_zones:
        return None
    if listed.began_at - machine.launched_at < VISIBLE_AFTER:
        return None
    absent = machine.absent_lists + 1
    return Presence(machine.provider_id, GONE if absent >= ABSENT_LISTS else machine.state, absent)


LISTED = frozenset({NoticeSource.STATUS, NoticeSource.BLOCK})
"""Whose answers are lists of all there is: what they say now goes before what was announced of it once."""
NODE_SPEAKS_EVERY = timedelta(seconds=60)
"""A machine is heard at once, and whatever else it says of the same so much later."""
LATEST = timedelta(days=60)


class Said(msgspec.Struct, frozen=True):
    """`key`: the same as long as the same is said. `over`: it was taken back."""

    key: str
    at: datetime
    ends_at: datetime | None = None
    over: bool = False


Evidence = Mapping[NoticeSource, Said]
"""The last word of each source."""


def heard(evidence: Evidence, source: NoticeSource, said: Said) -> Evidence | None:
    """With one word more; None: it is known, or older than what that source said since."""
    return None if _is_known(evidence.get(source), said) else {**evidence, source: said}


def _is_known(before: Said | None, said: Said) -> bool:
    if before is None:
        return said.over
    if said.at < before.at:
        return True
    if before.over:
        return said.over or said.at == before.at
    return not said.over and said.key == before.key


def stands(evidence: Evidence) -> bool:
    """Whether it is still to be acted upon: a list that had it has it no more, or everybody took it back."""
    listed = [said for source, said in evidence.items() if source in LISTED]
    return not all(said.over for said in listed or evidence.values())


def end_of(evidence: Evidence) -> datetime | None:
    """The earliest end that somebody stands by; None: nobody names one."""
    counts = {source: said for source, said in evidence.items() if not said.over}
    if LISTED & counts.keys():
        counts.pop(NoticeSource.EVENTS, None)
    return min((said.ends_at for said in counts.values() if said.ends_at is not None), default=None)


def bounded_end(seconds: float | None, now: datetime) -> datetime | None:
    """The end that a machine named, in seconds since 1970: never in the past, and in no time that nobody plans for."""
    if seconds is None:
        return None
    ahead_s = seconds - now.timestamp()
    if 0.0 <= ahead_s <= LATEST.total_seconds():
        return datetime.fromtimestamp(seconds, UTC)
    return now if ahead_s < 0.0 else now + LATEST
