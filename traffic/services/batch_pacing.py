"""Watches the pace of open batches: each that falls behind is noted once, with an event and a message to its tenant, in
one transaction that names what it saw. Any process may do it, and any number at once."""

from collections.abc import Mapping
from datetime import datetime

from django.conf import settings as django_settings
from django.db import transaction

from kernel import live
from kernel.events import event_record
from kernel.tones import Tone
from traffic.models import Batch
from traffic.planning.batch import BatchState
from traffic.planning.batch_event import BatchEvent
from traffic.planning.batch_pacing import AtRiskPolicy, Pace, plan_paces
from traffic.selectors.batch import batches_paced
from traffic.services.tenant_webhook import tenant_webhooks_notify


def batches_pace(*, now: datetime, rates: Mapping[str, float]) -> int:
    """Note batches that will miss their deadline, and raise the class of what is left of them where that is wanted.
    `rates`: lines a second as of late, by `region model`. Returns how many."""
    policy = AtRiskPolicy(django_settings.BATCH_AT_RISK)
    paces = plan_paces(batches_paced(now, rates), policy, now)
    return sum(_apply(pace, now) for pace in paces)


@transaction.atomic
def _apply(pace: Pace, now: datetime) -> bool:
    rows = Batch.objects.filter(id=pace.batch, state=BatchState.IN_PROGRESS.value, raised_at=None)
    batch = rows.select_for_update().first()
    if batch is None or (batch.at_risk_at is not None and not pace.raises):
        return False
    is_new, batch.at_risk_at = batch.at_risk_at is None, batch.at_risk_at or now
    batch.raised_at = now if pace.raises else None
    batch.save(update_fields=["at_risk_at", "raised_at"])
    done = "; they are sent as near-real-time from now on" if pace.raises else ""
    detail = {"batch": batch.id, "tenant": batch.tenant, "region": batch.region_id, "raised": pace.raises}
    event_record(
        kind="batch.deadline_at_risk",
        message=f"the deadline of batch {batch.id} of {batch.tenant or 'nobody'} is at risk: {pace.reason}{done}",
        tone=Tone.WARN,
        now=now,
        detail=detail,
    )
    if is_new:
        tenant_webhooks_notify(tenant=batch.tenant, event=BatchEvent.AT_RISK, batch_id=batch.id, now=now)
    live.push("batches")
    return True
