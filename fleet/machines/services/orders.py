"""Orders to providers as rows: written in the transaction that decides them, claimed by one attempt at a time, and
deleted when carried out. Calls no provider. A claim lasts seconds and is renewed while its call runs, so that another
process soon takes over from a killed one. Repeated calls are harmless because they have the same node ID."""

import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from itertools import chain
from typing import Any

from django.db import connection, transaction
from django.db.models import Case, Exists, IntegerField, OuterRef, Q, QuerySet, Value, When

from fleet.machines.models import MachineStatus, ProviderCall
from fleet.nodes.models import Node
from fleet.reconcile.planning.snapshot import ProviderStatus
from fleet.reconcile.planning.states import ProviderAction
from kernel import wake_ups
from kernel.transitions import StaleDecision

LOOP = "fleet.provision"
CLAIM = timedelta(seconds=10)
"""Several passes of the loop, each of which renews it; below the 15 s of I8."""
LOOKED_AT = 100
"""Orders read by one pass: more than it can begin."""
FIRST_RETRY_S, LONGEST_RETRY_S = 2.0, 60.0
LONGEST_STATED_S = 3600.0
"""Limit of a provider's stated pause."""
_URGENCY = Case(
    *(When(action=action.value, then=Value(number)) for number, action in enumerate(ProviderAction)),
    output_field=IntegerField(),
)
_DESCRIBED = """
INSERT INTO fleet_machinestatus AS known (node_id, status, described_at)
SELECT id, status, %(at)s FROM unnest(%(nodes)s::text[], %(statuses)s::text[]) AS said (id, status)
    JOIN fleet_node USING (id)
ON CONFLICT (node_id) DO UPDATE SET status = EXCLUDED.status, described_at = EXCLUDED.described_at
WHERE known.described_at < EXCLUDED.described_at
"""


def provider_order(
    *, node: str, action: ProviderAction, reason: str, now: datetime, near: Collection[str] = (), unit: str = ""
) -> None:
    """Orders a call for a node, in the transaction that decides it. A termination replaces any other order; an attempt
    in progress ends first. `unit`: launches of the same unit are one call. Raises StaleDecision if an order exists
    already."""
    columns = {
        "action": action.value,
        "near": list(near),
        "unit": unit,
        "reason": reason,
        "requested_at": now,
        "due_at": now,
        "attempts": 0,
    }
    Node.objects.select_for_update().filter(id=node).first()  # before the order's row, as in all code
    order, is_new = ProviderCall.objects.select_for_update().get_or_create(node_id=node, defaults=columns)
    if not is_new and (action is not ProviderAction.TERMINATE or order.action == action):
        raise StaleDecision(f"{order.action} of {node} is ordered already")
    if not is_new:
        ProviderCall.objects.filter(node_id=node).update(**columns)
    wake_ups.send(LOOP)


def calls_claim(*, free: Mapping[str, int], otherwise: int, now: datetime) -> list[list[ProviderCall]]:
    """Claims the due orders, most urgent first: each list is one call, of a unit's launches or one order. `free`: how
    many more calls each provider may have; `otherwise`: the number for other providers."""
    if not ProviderCall.objects.filter(due_at__lte=now).exists():  # the usual pass: saves most of its time
        return []
    full = [provider for provider, slots in free.items() if slots <= 0]
    with transaction.atomic():
        due = (
            ProviderCall.objects.select_for_update(skip_locked=True, of=("self",))
            .filter(Q(claimed_until=None) | Q(claimed_until__lte=now), due_at__lte=now)
            .exclude(node__region__provider__in=full)
            .filter(~Q(action=ProviderAction.LAUNCH) | Q(unit="") | ~Exists(_before_in_its_unit()))
            .select_related("node__region")
            .order_by(_URGENCY, "requested_at", "node_id")[:LOOKED_AT]
        )
        taken = [_claimable_unit(call) for call in _limit_calls(due, dict(free), otherwise)]
        for calls in taken:
            claim = secrets.token_hex(8)
            for call in calls:
                call.claim, call.claimed_until, call.attempts = claim, now + CLAIM, call.attempts + 1
        ProviderCall.objects.bulk_update(chain(*taken), ["claim", "claimed_until", "attempts"])
    return taken


def _before_in_its_unit() -> "QuerySet[ProviderCall]":
    """A unit's first row is locked before the others, so that two processes do not deadlock."""
    unit = ProviderCall.objects.filter(unit=OuterRef("unit"), action=ProviderAction.LAUNCH)
    return unit.filter(node_id__lt=OuterRef("node_id"))


def _claimable_unit(first: ProviderCall) -> list[ProviderCall]:
    if first.action != ProviderAction.LAUNCH or not first.unit:
        return [first]
    unit = ProviderCall.objects.select_for_update(of=("self",)).filter(unit=first.unit, action=ProviderAction.LAUNCH)
    others = unit.exclude(node_id=first.node_id).select_related("node__region")
    return [first, *others.order_by("node_id")]


def _limit_calls(due: Iterable[ProviderCall], free: dict[str, int], otherwise: int) -> Iterator[ProviderCall]:
    for call in due:
        provider = call.node.region.provider
        left = free.get(provider, otherwise)
        if left > 0:
            free[provider] = left - 1
            yield call


def claims_renew(claims: Collection[str], *, now: datetime) -> None:
    if claims:
        ProviderCall.objects.filter(claim__in=claims).update(claimed_until=now + CLAIM)


def call_end(call: ProviderCall) -> bool:
    """Ends a call, in the transaction that stores its result. Returns False if another order or attempt has replaced
    it."""
    Node.objects.select_for_update().filter(id=call.node_id).first()
    own = ProviderCall.objects.filter(node_id=call.node_id, claim=call.claim)
    if own.filter(action=call.action).delete()[0]:
        return True
    _release_claims(own)
    return False


def call_retry(call: ProviderCall, *, now: datetime, retry_after_s: float | None = None) -> datetime | None:
    """Schedules a call again, in the transaction that stores the reason: after a pause as long as the order's age, and
    at least `retry_after_s`. Returns when; None if another order or attempt has replaced it."""
    Node.objects.select_for_update().filter(id=call.node_id).first()
    own = ProviderCall.objects.filter(node_id=call.node_id, claim=call.claim)
    age_s = (now - call.requested_at).total_seconds()
    pause_s = max(FIRST_RETRY_S, min(age_s, LONGEST_RETRY_S), min(retry_after_s or 0.0, LONGEST_STATED_S))
    due_at = now + timedelta(seconds=pause_s)
    is_repeated = own.filter(action=call.action).update(due_at=due_at, attempts=0)
    _release_claims(own)
    return due_at if is_repeated else None


def launches_hurry(*, region: str, instance_type: str, now: datetime) -> None:
    """Retries waiting launches immediately, because capacity has changed. Running calls are not affected."""
    waiting = ProviderCall.objects.filter(
        node__region_id=region, node__instance_type_id=instance_type, action=ProviderAction.LAUNCH, claim=""
    )
    orders = waiting.filter(due_at__gt=now).select_for_update(skip_locked=True, of=("self",))
    if ProviderCall.objects.filter(pk__in=[order.pk for order in orders]).update(due_at=now):
        wake_ups.send(LOOP)


def _release_claims(own: "QuerySet[ProviderCall]") -> None:
    if own.update(claim="", claimed_until=None):
        wake_ups.send(LOOP)


def machines_described(statuses: Mapping[str, ProviderStatus], *, asked_at: datetime) -> None:
    """Stores a provider's answer unless a later one is known. A changed status wakes the reconciler."""
    known = dict(MachineStatus.objects.filter(node_id__in=statuses).values_list("node_id", "status"))
    values: dict[str, Any] = {
        "nodes": list(statuses),
        "statuses": [status.value for status in statuses.values()],
        "at": asked_at,
    }
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute(_DESCRIBED, values)
        if any(known.get(node) != status for node, status in statuses.items()):
            wake_ups.send("fleet.reconcile")


def machines_forget(nodes: Collection[str], *, now: datetime) -> None:
    """These machines were acted on: earlier answers no longer count."""
    machines_described(dict.fromkeys(sorted(nodes), ProviderStatus.UNKNOWN), asked_at=now)
