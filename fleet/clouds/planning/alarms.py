"""Alarms of CloudWatch as evidence of faults: which alarms a region names, and which machine, cell or group an alarm is
about. Pure. An alarm is evidence only: it opens an incident and replaces nothing, unless the region says so of it and
it is about one machine."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kernel.constraints import InvalidField

SOURCES_MOST = 10
"""Each is one call every 30 s. CloudWatch allows 9 a second of DescribeAlarms in a region."""
PREFIX_MOST = 255
TEXT_MOST = 500
LISTED_MOST = 50
"""Nodes and cells that an incident names."""
PLACEHOLDER = re.compile(r"\{(node|cell)\}")
INSTANCE, CONTAINER_INSTANCE, TASK = "InstanceId", "ContainerInstanceId", "TaskId"
"""Dimensions that name a machine: of EC2 and of the CloudWatch agent, and of Container Insights for ECS."""
GROUP, CLUSTER, FAMILY, SERVICE = "AutoScalingGroupName", "ClusterName", "TaskDefinitionFamily", "ServiceName"
"""Dimensions that name several machines, or a service: of EC2 Auto Scaling and of ECS."""


class AlarmSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Alarms whose names begin with `prefix`, in which `{node}` or `{cell}` stands for the ID of one. `replaces`: a
    machine in such an alarm is taken out of use and replaced, without other evidence."""

    prefix: Annotated[str, Meta(min_length=1, max_length=PREFIX_MOST)]
    replaces: bool = False

    @property
    def literal(self) -> str:
        """The part before the placeholder, by which CloudWatch selects."""
        return PLACEHOLDER.split(self.prefix)[0]

    def named(self, name: str, noun: str, known: Collection[str]) -> str | None:
        """Returns the ID in an alarm's name, "" for one that is not known, or None if the prefix has no such
        placeholder. A longer ID has precedence over its own beginning."""
        head, *rest = PLACEHOLDER.split(self.prefix)
        if not rest or rest[0] != noun:
            return None
        found = [each for each in known if _continues(name, head + each, rest[1])]
        return max(found, key=len, default="")


def _continues(name: str, begin: str, tail: str) -> bool:
    """Without a tail, the ID ends where the name does, or before a character that IDs do not have."""
    if not name.startswith(begin + tail):
        return False
    return bool(tail) or not re.match(r"[A-Za-z0-9._-]", name[len(begin) :])


def parse_alarms(stated: Any) -> tuple[AlarmSource, ...]:
    """Returns the alarms that a region names. Raises InvalidField, on `alarms`, for anything else, too many, a prefix
    that is stated twice, or one that begins with a placeholder or has two."""
    try:
        sources = msgspec.convert(stated, tuple[AlarmSource, ...])
    except msgspec.ValidationError as error:
        message = f"alarms must be a list of objects with prefix and, if it replaces machines, replaces: {error}"
        raise InvalidField("alarms", message) from None
    if len(sources) > SOURCES_MOST:
        raise InvalidField("alarms", f"alarms has {len(sources)} entries; the limit is {SOURCES_MOST}")
    prefixes = [one.prefix for one in sources]
    if twice := sorted({prefix for prefix in prefixes if prefixes.count(prefix) > 1}):
        raise InvalidField("alarms", f"alarms has the prefix {twice[0][:60]!r} twice")
    for one in sources:
        if not one.literal or len(PLACEHOLDER.findall(one.prefix)) > 1:
            rule = "it needs text before {node} or {cell}, and at most one of them"
            raise InvalidField("alarms", f"alarms has the prefix {one.prefix[:60]!r}: {rule}")
        if one.replaces and "{cell}" in one.prefix:
            rule = "an alarm about a cell does not say which of its machines to replace"
            raise InvalidField("alarms", f"alarms has the prefix {one.prefix[:60]!r} that replaces machines: {rule}")
    return sources


@dataclass(frozen=True, slots=True)
class AlarmSeen:
    """An alarm in the state ALARM. `dimensions`: of its metric, or of those in its expressions; name -> values."""

    name: str
    source: AlarmSource
    reason: str
    since: datetime
    dimensions: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @property
    def replaces(self) -> bool:
        return self.source.replaces

    @property
    def evidence(self) -> dict[str, Any]:
        return {"alarm": self.name, "reason": self.reason, "since": self.since.isoformat(), "replaces": self.replaces}


def alarm_seen(found: Mapping[str, Any], source: AlarmSource) -> AlarmSeen:
    """Returns the meaning of an entry of `MetricAlarms`."""
    dimensions: dict[str, set[str]] = {}
    for one in _dimensions(found):
        dimensions.setdefault(one["Name"], set()).add(one["Value"])
    return AlarmSeen(
        name=str(found["AlarmName"])[:PREFIX_MOST],
        source=source,
        reason=str(found.get("StateReason") or "")[:TEXT_MOST],
        since=found["StateUpdatedTimestamp"],
        dimensions={name: frozenset(values) for name, values in dimensions.items()},
    )


def _dimensions(found: Mapping[str, Any]) -> Iterable[Mapping[str, str]]:
    yield from found.get("Dimensions") or ()
    for query in found.get("Metrics") or ():
        yield from query.get("MetricStat", {}).get("Metric", {}).get("Dimensions") or ()


def distinct(alarms: Iterable[AlarmSeen]) -> list[AlarmSeen]:
    """Returns each alarm once, by the source that replaces, then by the longest prefix."""
    best: dict[str, AlarmSeen] = {}
    for one in alarms:
        known = best.get(one.name)
        if known is None or _precedence(one.source) > _precedence(known.source):
            best[one.name] = one
    return list(best.values())


def _precedence(source: AlarmSource) -> tuple[bool, int]:
    return source.replaces, len(source.prefix)


@dataclass(frozen=True, slots=True)
class AlarmedMachine:
    """A machine of a region as alarms name it. `instance`: ID of the EC2 instance. Of a task of ECS: `task`,
    `container_instance` (IDs) and `family` of its definition; else "". `cell`: of its node, "" if it is a spare."""

    node: str
    instance: str
    cell: str = ""
    task: str = ""
    container_instance: str = ""
    family: str = ""


@dataclass(frozen=True, slots=True)
class About:
    """The subject of an alarm. `machine`: the only one; None: several, or none in particular. `cell`: as named. `what`:
    words for an incident, "" for the region as a whole. `machines`: those that it covers, if it is known."""

    what: str = ""
    machine: AlarmedMachine | None = None
    cell: str = ""
    machines: tuple[AlarmedMachine, ...] = ()

    @property
    def evidence(self) -> dict[str, Any]:
        nodes = sorted(one.node for one in self.machines)
        cells = sorted({one.cell for one in self.machines} - {""})
        return {
            **({"about": self.what} if self.what else {}),
            **({"nodes": nodes[:LISTED_MOST], "node_count": len(nodes)} if nodes else {}),
            **({"cells": cells[:LISTED_MOST], "cell_count": len(cells)} if cells else {}),
        }

    @property
    def words(self) -> str:
        """For a summary: `Auto Scaling group g (3 nodes in 2 cells)`."""
        cells = len({one.cell for one in self.machines} - {""})
        counted = [f"{len(self.machines)} nodes"] if len(self.machines) != 1 else ["1 node"]
        counted += [f"in {cells} cells" if cells != 1 else "in 1 cell"] if cells and not self.cell else []
        return f"{self.what} ({' '.join(counted)})" if self.machines else self.what


def about_of(
    alarm: AlarmSeen,
    machines: Sequence[AlarmedMachine],
    cells: Collection[str] = (),
    groups: Mapping[str, Collection[str]] | None = None,
    cluster: str = "",
) -> About | None:
    """Returns what an alarm is about, or None if its name or dimensions are those of a machine, cell or cluster that
    the region does not have. `cells`: of the region, also those without a machine. `groups`: EC2 instances of each Auto
    Scaling group. `cluster`: of the region, "" if it is none of ECS.

    The most specific one counts: a machine or cell in its name, a machine in its dimensions, then a group of machines,
    then a service or the cluster."""
    node = alarm.source.named(alarm.name, "node", [one.node for one in machines])
    if node is not None:
        return next((_about_machines("", [one]) for one in machines if one.node == node), None)
    cell = alarm.source.named(alarm.name, "cell", cells)
    if cell is not None:
        there = tuple(one for one in machines if one.cell == cell)
        return About(f"cell {cell}", cell=cell, machines=there) if cell else None
    stated = alarm.dimensions
    for name, attribute in ((INSTANCE, "instance"), (CONTAINER_INSTANCE, "container_instance"), (TASK, "task")):
        if values := {value.rpartition("/")[2] for value in stated.get(name, ())}:
            found = [one for one in machines if getattr(one, attribute) in values]
            return _about_machines(f"{len(found)} machines", found) if found else None
    if names := stated.get(GROUP):
        members = {instance for name in names for instance in (groups or {}).get(name, ())}
        listed = ", ".join(sorted(names))
        return About(f"Auto Scaling group {listed}", machines=tuple(one for one in machines if one.instance in members))
    if cluster and (named := stated.get(CLUSTER)) and cluster not in {one.rpartition("/")[2] for one in named}:
        return None
    return _about_cluster(stated, machines)


def _about_machines(what: str, found: Sequence[AlarmedMachine]) -> About:
    return About(machine=found[0]) if len(found) == 1 else About(what, machines=tuple(found))


def _about_cluster(stated: Mapping[str, Collection[str]], machines: Sequence[AlarmedMachine]) -> About:
    if names := stated.get(FAMILY):
        families = {one.partition(":")[0] for one in names}
        tasks = tuple(one for one in machines if one.family in families)
        return About(f"task definition {', '.join(sorted(families))}", machines=tasks)
    if names := stated.get(SERVICE):
        return About(f"service {', '.join(sorted(names))}")
    if names := stated.get(CLUSTER):
        return About(f"cluster {', '.join(sorted(names))}", machines=tuple(machines))
    return About()


def groups_named(alarms: Iterable[AlarmSeen]) -> list[str]:
    """Returns the Auto Scaling groups whose machines must be known."""
    return sorted({name for one in alarms for name in one.dimensions.get(GROUP, ())})


def gravest(alarms: Iterable[AlarmSeen]) -> AlarmSeen:
    """Returns the alarm to name first: one that replaces, then the oldest."""
    return min(alarms, key=lambda one: (not one.replaces, one.since, one.name))
