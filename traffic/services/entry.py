"""What operators may do to the entry of all clients: plan other shares, and replace what is not ours."""

import math
from collections.abc import Mapping
from datetime import datetime

from django.db import transaction

from fleet.models import Region
from kernel import live, wake_ups
from kernel.events import event_record
from kernel.refusals import Conflict, InvalidInput
from kernel.tones import Tone
from traffic.models import Entry
from traffic.services.override import ENTRY_TASK

MOST_SHARE = 1e6


def entry_shares_plan(*, name: str, shares: Mapping[str, float], actor: str, now: datetime) -> Entry:
    """Plan the shares of regions, in any measure; those that are not named have 1. The loop moves clients within
    minutes, by 5 points or more. Repeating it changes nothing.

    Raises:
        InvalidInput: an unknown region, a share that is no number from 0 on, or no region with more than 0.
    """
    with transaction.atomic():
        entry = Entry.objects.select_for_update().get(name=name)
        planned = _checked(shares)
        if planned == entry.shares:
            return entry
        entry.shares, entry.revision = planned, entry.revision + 1
        entry.actor, entry.changed_at = actor[:64], now
        entry.save(update_fields=["shares", "revision", "actor", "changed_at"])
        stated = ", ".join(f"{region} {share:g}" for region, share in sorted(planned.items())) or "all alike"
        event_record(
            kind="entry.planned",
            message=f"shares of {entry.name} planned by {actor}: {stated}",
            tone=Tone.MOVING,
            now=now,
            actor=actor[:64],
            detail={"shares": planned, "revision": entry.revision},
        )
        live.push("traffic")
        wake_ups.send(ENTRY_TASK)
    return entry


def entry_adopt(*, name: str, seen: str, actor: str, now: datetime) -> Entry:
    """Let the loop replace what stands there though it is not ours. `seen`: the fingerprint of what was looked at.

    Raises:
        Conflict: something else stands there by now, or nothing waits for it.
    """
    with transaction.atomic():
        entry = Entry.objects.select_for_update().get(name=name)
        if seen != entry.seen:
            raise Conflict(f"what stands at {entry.name} is {entry.seen or 'not read yet'} by now, not {seen}")
        if not entry.held:
            raise Conflict(f"{entry.name} is as wanted; there is nothing to adopt")
        Entry.objects.filter(pk=entry.pk).update(adopted=seen)
        event_record(
            kind="entry.adopted",
            message=f"what stands at {entry.name} may be replaced by ours, by {actor}: {entry.held}",
            tone=Tone.WARN,
            now=now,
            actor=actor[:64],
            detail={"seen": seen, "weights": entry.seen_weights},
        )
        live.push("traffic")
        wake_ups.send(ENTRY_TASK)
    entry.adopted = seen
    return entry


def _checked(shares: Mapping[str, float]) -> dict[str, float]:
    there = set(Region.objects.values_list("name", flat=True))
    for region, share in shares.items():
        if region not in there:
            message = f"there is no region {region}; there are: {', '.join(sorted(there))}"
            raise InvalidInput(field=f"shares.{region}", rule="region", message=message)
        if not (math.isfinite(share) and 0 <= share <= MOST_SHARE):
            message = f"the share of {region} is {share:g}; it must be from 0 to {MOST_SHARE:g}"
            raise InvalidInput(field=f"shares.{region}", rule="share", message=message)
    if there and not any(shares.get(region, 1.0) for region in there):
        raise InvalidInput(field="shares", rule="none", message="at least one region must get clients")
    return {region: float(share) for region, share in shares.items()}
