"""Changes what an operator laid down about a deployment's traffic. The next pass of the autopilot follows it."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from django.db import transaction

from fleet.models import Deployment, Region
from kernel import live, wake_ups
from kernel.events import event_record
from kernel.refusals import InvalidInput
from kernel.tones import Tone
from traffic.models import TrafficRule, TrafficWindow
from traffic.planning.traffic_policy import (
    InvalidTrafficPolicy,
    TrafficPolicy,
    parse_traffic_policy,
    traffic_policy_as_json,
)
from traffic.services.override import AUTOPILOT_TASK


def traffic_policy_change(*, deployment: str, stated: Mapping[str, Any], actor: str, now: datetime) -> TrafficPolicy:
    """State parts of a deployment's traffic policy; what is not named stays. Returns the whole.

    Raises:
        InvalidInput: an unknown key, region or deployment, a value outside its range, a residency without its region.
    """
    with transaction.atomic():
        Deployment.objects.select_for_update().get(name=deployment)
        rule = TrafficRule.objects.filter(deployment_id=deployment).first()
        before = rule.policy() if rule else TrafficPolicy()
        policy = _parse(stated, before)
        if policy == before:
            return policy
        tested = (policy.tested_concurrency, policy.tested_by_type)
        if tested != (before.tested_concurrency, before.tested_by_type):
            # In another measure the old samples would look like capacity that came or went.
            TrafficWindow.objects.filter(deployment_id=deployment).update(samples=[])
        revision = rule.revision + 1 if rule else 1
        TrafficRule.objects.update_or_create(
            deployment_id=deployment,
            defaults={
                "stated": traffic_policy_as_json(policy), "revision": revision, "actor": actor, "changed_at": now,
            },
        )  # fmt: skip
        event_record(
            kind="traffic.policy",
            message=f"traffic policy of {deployment} changed by {actor}: {', '.join(sorted(stated))}",
            tone=Tone.MOVING,
            now=now,
            actor=actor,
            deployment=deployment,
            detail={"stated": dict(stated), "revision": revision},
        )
        live.push("traffic")
        wake_ups.send(AUTOPILOT_TASK)
    return policy


def _parse(stated: Mapping[str, Any], before: TrafficPolicy) -> TrafficPolicy:
    try:
        policy = parse_traffic_policy(stated, Region.objects.values_list("name", flat=True), before)
    except InvalidTrafficPolicy as error:
        raise InvalidInput(field=error.field, rule="policy", message=str(error)) from None
    there = set(Deployment.objects.values_list("name", flat=True))
    for name in policy.split:
        if name not in there:
            message = f"there is no deployment {name}; there are: {', '.join(sorted(there))}"
            raise InvalidInput(field=f"split.{name}", rule="policy", message=message)
    for origin, regions in policy.residency.items():
        if origin not in regions:
            message = f"residency of {origin} must name {origin} too: its ingress serves there what no other can take"
            raise InvalidInput(field=f"residency.{origin}", rule="policy", message=message)
    return policy
