"""Orders to providers, as rows: written in the transaction that decides them, taken by one attempt at a time, and gone
when they are carried out. Calls no provider.

A claim lasts seconds and is renewed while its call runs, so what a killed process left is soon taken up by another. A
node's id is what makes a repeated call harmless.
"""

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
"""Several passes of the loop, each of which renews it, and below the 15 s of I8."""
LOOKED_AT = 100
"""Orders that one pass looks at: more than it can begin."""
FIRST_RETRY_S, LONGEST_RETRY_S = 2.0, 60.0
LONGEST_STATED_S = 3600.0
"""However long a provider says that it wants to be left alone."""
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
    """Order something of a node's provider, in the transaction that decides it. The end of a machine takes the place of
    whatever else was ordered: an attempt that is at that ends first. `unit`: which launches are one call.

    Raises:
        StaleDecision: something is ordered already.
    """
    columns = {
        "action": action.value,
        "near": list(near),
        "unit": unit,
        "reason": reason,
        "requested_at": now,
        "due_at": now,
        "attempts": 0,
    }
    Node.objects.select_for_update().filter(id=node).first()  # before the order's row, as everybody does
    order, is_new = ProviderCall.objects.select_for_update().get_or_create(node_id=node, defaults=columns)
    if not is_new and (action is not ProviderAction.TERMINATE or order.action == action):
        raise StaleDecision(f"{order.action} of {node} is ordered already")
    if not is_new:
        ProviderCall.objects.filter(node_id=node).update(**columns)
    wake_ups.send(LOOP)


def calls_claim(*, free: Mapping[str, int], otherwise: int, now: datetime) -> list[list[ProviderCall]]:
    """Take what is due, the most urgent first: each list is one call, of a unit's launches or of a single order.
    `free`: how many more calls each provider may get at once; `otherwise`: one that is not named."""
    if not ProviderCall.objects.filter(due_at__lte=now).exists():  # the usual pass: spares it most of its time
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
        taken = [_together(call) for call in _within(due, dict(free), otherwise)]
        for calls in taken:
            claim = secrets.token_hex(8)
            for call in calls:
                call.claim, call.claimed_until, call.attempts = claim, now + CLAIM, call.attempts + 1
        ProviderCall.objects.bulk_update(chain(*taken), ["claim", "claimed_until", "attempts"])
    return taken


def _before_in_its_unit() -> "QuerySet[ProviderCall]":
    """Whoever takes a unit locks its first row before the others, so that two do not wait for each other."""
    unit = ProviderCall.objects.filter(unit=OuterRef("unit"), action=ProviderAction.LAUNCH)
    return unit.filter(node_id__lt=OuterRef("node_id"))


def _together(first: ProviderCall) -> list[ProviderCall]:
    if first.action != ProviderAction.LAUNCH or not first.unit:
        return [first]
    unit = ProviderCall.objects.select_for_update(of=("self",)).filter(unit=first.unit, action=ProviderAction.LAUNCH)
    others = unit.exclude(node_id=first.node_id).select_related("node__region")
    return [first, *others.order_by("node_id")]


def _within(due: Iterable[ProviderCall], free: dict[str, int], otherwise: int) -> Iterator[ProviderCall]:
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
    """The call is over, in the transaction that notes its result. False: something else is ordered meanwhile, which may
    begin now, or another attempt is at it."""
    Node.objects.select_for_update().filter(id=call.node_id).first()
    own = ProviderCall.objects.filter(node_id=call.node_id, claim=call.claim)
    if own.filter(action=call.action).delete()[0]:
        return True
    _release(own)
    return False


def call_retry(call: ProviderCall, *, now: datetime, retry_after_s: float | None = None) -> datetime | None:
    """The call came back and is to be made again, in the transaction that notes why: after a pause as long as the order
    is old, and not before `retry_after_s`. Returns when; None: something else is ordered meanwhile, or another attempt
    is at it."""
    Node.objects.select_for_update().filter(id=call.node_id).first()
    own = ProviderCall.objects.filter(node_id=call.node_id, claim=call.claim)
    age_s = (now - call.requested_at).total_seconds()
    pause_s = max(FIRST_RETRY_S, min(age_s, LONGEST_RETRY_S), min(retry_after_s or 0.0, LONGEST_STATED_S))
    due_at = now + timedelta(seconds=pause_s)
    is_repeated = own.filter(action=call.action).update(due_at=due_at, attempts=0)
    _release(own)
    return due_at if is_repeated else None


def launches_hurry(*, region: str, instance_type: str, now: datetime) -> None:
    """Try waiting launches again at once: where machines may be had has changed. Calls that run are left alone."""
    waiting = ProviderCall.objects.filter(
        node__region_id=region, node__instance_type_id=instance_type, action=ProviderAction.LAUNCH, claim=""
    )
    orders = waiting.filter(due_at__gt=now).select_for_update(skip_locked=True, of=("self",))
    if ProviderCall.objects.filter(pk__in=[order.pk for order in orders]).update(due_at=now):
        wake_ups.send(LOOP)


def _release(own: "QuerySet[ProviderCall]") -> None:
    if own.update(claim="", claimed_until=None):
        wake_ups.send(LOOP)


def machines_described(statuses: Mapping[str, ProviderStatus], *, asked_at: datetime) -> None:
    """Store a provider's answer unless a later one is known. A changed status wakes the reconciler."""
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
    """Something was done with these machines: what was said of them until now counts no more."""
    machines_described(dict.fromkeys(sorted(nodes), ProviderStatus.UNKNOWN), asked_at=now)
