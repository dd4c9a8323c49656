"""Alarms of CloudWatch as evidence of faults: which alarms a region names, and what an alarm says about which machine.
Pure. An alarm is evidence only: it opens an incident and replaces nothing, unless the region says so of it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kernel.constraints import InvalidField

SOURCES_MOST = 10
"""Each is one call every 30 s. CloudWatch allows 9 a second of DescribeAlarms in a region."""
PREFIX_MOST = 255
TEXT_MOST = 500
INSTANCE = "InstanceId"
"""The dimension that names a machine, as metrics of EC2 and of the CloudWatch agent have it."""


class AlarmSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Alarms whose names begin with `prefix`. `replaces`: a machine in such an alarm is taken out of use and replaced,
    without other evidence."""

    prefix: Annotated[str, Meta(min_length=1, max_length=PREFIX_MOST)]
    replaces: bool = False


def parse_alarms(stated: Any) -> tuple[AlarmSource, ...]:
    """Returns the alarms that a region names. Raises InvalidField, on `alarms`, for anything else, too many, or a
    prefix that is stated twice."""
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
    return sources


@dataclass(frozen=True, slots=True)
class AlarmSeen:
    """An alarm in the state ALARM. `machine`: ID of the EC2 instance in its dimensions, "" if it has none."""

    name: str
    machine: str
    reason: str
    since: datetime
    replaces: bool

    @property
    def evidence(self) -> dict[str, Any]:
        return {"alarm": self.name, "reason": self.reason, "since": self.since.isoformat(), "replaces": self.replaces}


def alarm_seen(found: Mapping[str, Any], source: AlarmSource) -> AlarmSeen:
    """Returns the meaning of an entry of `MetricAlarms`."""
    return AlarmSeen(
        name=str(found["AlarmName"])[:PREFIX_MOST],
        machine=next((one["Value"] for one in _dimensions(found) if one["Name"] == INSTANCE), ""),
        reason=str(found.get("StateReason") or "")[:TEXT_MOST],
        since=found["StateUpdatedTimestamp"],
        replaces=source.replaces,
    )


def _dimensions(found: Mapping[str, Any]) -> Iterable[Mapping[str, str]]:
    """Of its metric, or of those in its expressions."""
    yield from found.get("Dimensions") or ()
    for query in found.get("Metrics") or ():
        yield from query.get("MetricStat", {}).get("Metric", {}).get("Dimensions") or ()


def gravest(alarms: Iterable[AlarmSeen]) -> AlarmSeen:
    """Returns the alarm to name first: one that replaces, then the oldest."""
    return min(alarms, key=lambda one: (not one.replaces, one.since, one.name))
