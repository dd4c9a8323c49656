"""Garbage collection: decides which machines, cloud resources and files are deleted. Pure.

A resource to which nothing refers is a suspect from the first complete list that shows it. A later list must show it
again, and its grace period must be over, before it is deleted. Each list deletes a limited number. When too many
resources of a kind have no record, the records are probably wrong, as after restoring an old backup. Then that kind is
held: none of it is deleted until few are without a record again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum


class ResourceKind(StrEnum):
    MACHINE = "machine"
    VOLUME = "volume"
    INTERFACE = "network interface"
    SPOT_REQUEST = "spot request"
    FILE = "file"


@dataclass(frozen=True, slots=True)
class Resource:
    """A listed resource. `is_recorded`: a row exists, even if it says that the resource should be gone. `created_at` is
    None where the provider does not state it; the age then counts from the first list that showed the resource."""

    kind: ResourceKind
    id: str
    is_referenced: bool
    is_recorded: bool = False
    created_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class GarbagePolicy:
    """`deleted_at_once` applies to each kind and list. A kind is held while more resources than `unknown_least`, and
    more than `unknown_most_share` of the machines, have no record. None means no limit."""

    grace_period_s: float
    lists: int = 2
    deleted_at_once: int | None = None
    unknown_least: int | None = None
    unknown_most_share: float = 0.0

    def is_over(self, since: datetime, now: datetime) -> bool:
        return (now - since).total_seconds() >= self.grace_period_s


PROVIDER_MACHINES = GarbagePolicy(grace_period_s=0.0, deleted_at_once=5, unknown_least=2, unknown_most_share=0.25)
"""Providers are listed once a minute, which is longer than a launch takes to be recorded."""
CLOUD_RESOURCES = GarbagePolicy(grace_period_s=600.0, deleted_at_once=5, unknown_least=5, unknown_most_share=0.2)
"""Lists of a cloud lag behind by minutes."""
FILES = GarbagePolicy(grace_period_s=86_400.0, lists=1)
"""An upload takes less than a day, and its row is written last."""


@dataclass(frozen=True, slots=True)
class GarbagePlan:
    """`suspects`: since when each resource without a reference has been listed, by id. `held`: why some kinds are left
    alone, or ""."""

    delete: tuple[Resource, ...]
    suspects: Mapping[str, datetime]
    held: str = ""


def plan_garbage_collection(
    found: Sequence[Resource],
    before: Mapping[str, datetime],
    now: datetime,
    policy: GarbagePolicy,
    *,
    machines: int = 0,
    has_records: bool = True,
) -> GarbagePlan:
    """Plans what one complete list leads to.

    Args:
        before: Suspects of the previous complete list.
        machines: Number of machines that the share of the policy refers to.
        has_records: Whether any launch is recorded at all. If none is, everything is held.
    """
    garbage = [one for one in found if not one.is_referenced]
    suspects = {one.id: before.get(one.id, now) for one in garbage}
    delete: list[Resource] = []
    held = []
    for kind in ResourceKind:
        same = [one for one in garbage if one.kind is kind]
        unknown = sum(not one.is_recorded for one in same)
        if reason := _held(kind, unknown, machines, has_records, policy):
            held.append(reason)
            continue
        seen = (one for one in same if policy.lists == 1 or one.id in before)
        old = (one for one in seen if policy.is_over(one.created_at or suspects[one.id], now))
        delete += sorted(old, key=lambda one: one.id)[: policy.deleted_at_once]
    return GarbagePlan(tuple(delete), suspects, "; ".join(held))


def _held(kind: ResourceKind, unknown: int, machines: int, has_records: bool, policy: GarbagePolicy) -> str:
    if unknown and not has_records:
        return f"{kind}: {unknown} have no record, and no launch is recorded at all"
    if policy.unknown_least is None or unknown <= max(policy.unknown_least, policy.unknown_most_share * machines):
        return ""
    return f"{kind}: {unknown} have no record, compared with {machines} machines; were records lost?"
