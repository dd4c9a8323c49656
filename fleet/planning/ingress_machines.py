"""Decides which ingress machines a region of a cloud lacks, and which are gone. Pure.

One in each zone, and two in a region at least: a region whose one zone or one machine fails is still reached.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

LEAST_IN_REGION = 2


@dataclass(frozen=True, slots=True)
class IngressMachine:
    """An ingress of the region. `zone`: where it is, or is to be launched. `gone`: its machine was seen to end."""

    id: str
    zone: str
    gone: bool = False


@dataclass(frozen=True, slots=True)
class NewIngress:
    """Launch an ingress machine in this zone."""

    zone: str
    reason: str


@dataclass(frozen=True, slots=True)
class RemoveIngress:
    """Nobody waits for it any more; another takes its place."""

    id: str
    reason: str


def plan_ingress_machines(
    zones: Collection[str], there: Sequence[IngressMachine]
) -> tuple[NewIngress | RemoveIngress, ...]:
    """What to do in a region with these zones. None is ever ended that runs: more than are wanted stay."""
    gone = tuple(RemoveIngress(each.id, "its machine is gone") for each in there if each.gone)
    running = Counter(each.zone for each in there if not each.gone)
    new = [NewIngress(zone, f"zone {zone} has no ingress") for zone in sorted(zones) if not running[zone]]
    running.update(each.zone for each in new)
    while zones and running.total() < LEAST_IN_REGION:
        zone = min(sorted(zones), key=lambda name: running[name])
        new.append(NewIngress(zone, f"a region has {LEAST_IN_REGION} ingresses at least"))
        running[zone] += 1
    return (*gone, *new)
