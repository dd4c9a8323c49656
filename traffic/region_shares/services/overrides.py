"""What operators order about traffic: fixed shares of an origin, and the evacuation of a region. Each order has a time
at which it ends by itself, a reason, and an event at its beginning and end. Nothing here moves a request: the next pass
of the autopilot finds the order and carries it out.

Changes what an operator laid down about a deployment's traffic. The next pass of the autopilot follows it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import models, transaction

from accounts.models import Approval
from accounts.services.approval import ApprovalRequest, FleetAction, approval_request, requires_approval
from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.deployments.planner import empties_origin
from fleet.deployments.services.deployments import EVACUATE_RULE
from fleet.regions.models import Region
from kernel import live, wake_ups
from kernel.events import event_record
from kernel.refusals import Conflict, InvalidInput
from kernel.tones import Tone
from kernel.transitions import compare_and_set
from traffic.region_shares.planning.policy import (
    EvacuationMode,
    InvalidTrafficPolicy,
    OverrideKind,
    TrafficPolicy,
    parse_traffic_policy,
    traffic_policy_as_json,
    whole_row,
)
from traffic.region_shares.selectors import traffic_policies
from traffic.routing.models import Ingress, TrafficOverride, TrafficRule, TrafficWindow

AUTOPILOT_TASK = "traffic.autopilot"
ENTRY_TASK = "traffic.entry"
SHORTEST_S, LONGEST_S = 10, 7 * 86_400
"""An order that is needed for longer than a week is a policy."""
OVERRIDES_KEPT = 500
"""Orders that have ended; the timeline has them too."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Who gives an order, why, when, and for how long."""

    duration_s: int
    why: str
    actor: str
    now: datetime


def shares_fix(*, deployment: str, origin: str, shares: Mapping[str, float], terms: Terms) -> TrafficOverride:
    """Fix where an origin's requests of a deployment are served. An order about the same row ends in favour of it.

    Raises:
        InvalidInput: an unknown deployment or region, shares that are none, or that residency forbids, no reason, or a
            time outside `SHORTEST_S` … `LONGEST_S`.
    """
    order = shares_order(deployment=deployment, origin=origin, shares=shares, terms=terms)
    same = TrafficOverride.objects.filter(kind=order.kind, deployment_id=deployment, region_id=origin)
    return _give(order, same, terms.now)


def evacuation_start(*, region: str, mode: str, confirm: str, terms: Terms, deployment: str = "") -> TrafficOverride:
    """Empty a region of traffic, of one deployment or ("") of all. One that is under way ends in favour of this.

    Raises:
        InvalidInput: an unknown region, mode or deployment, no reason, a time outside the bounds, or `confirm` is not
            the region's name.
    """
    order = evacuation_check(region=region, mode=mode, confirm=confirm, terms=terms, deployment=deployment)
    same = TrafficOverride.objects.filter(kind=order.kind, deployment_id=order.deployment_id, region_id=region)
    return _give(order, same, terms.now)


def evacuation_check(*, region: str, mode: str, confirm: str, terms: Terms, deployment: str = "") -> TrafficOverride:
    """The order as `evacuation_start` would give it, checked in the same way and not stored."""
    order = evacuation_order(region=region, mode=mode, terms=terms, deployment=deployment)
    if confirm != region:
        raise InvalidInput(field="confirm", rule="confirm", message=f"write the region's name, {region}, to confirm")
    return order


def override_end(*, override_id: int, actor: str, now: datetime, why: str = "") -> None:
    """End an order before its time. What it moved goes back in steps.

    Raises:
        Conflict: it has ended already.
    """
    order = TrafficOverride.objects.get(pk=override_id)
    reason = f"ended by {actor}" + (f": {why}" if why else "")
    if not _end(order, reason, actor, now):
        raise Conflict(f"override {override_id} has ended already")


def overrides_expire(*, now: datetime) -> list[int]:
    """End every order whose time has come. Returns their ids."""
    due = TrafficOverride.objects.filter(ended_at__isnull=True, expires_at__lte=now)
    return [order.pk for order in due if _end(order, "its time was over", "switchyard", now)]


def shares_order(*, deployment: str, origin: str, shares: Mapping[str, float], terms: Terms) -> TrafficOverride:
    """The order, checked and not stored: what a preview looks at. Raises as `shares_fix` does."""
    _check_deployment(deployment)
    known = _check_region("origin", origin)
    for region, share in shares.items():
        if region not in known:
            raise _unknown_region("shares", region, known)
        if not 0 <= share <= 1:
            raise InvalidInput(field="shares", rule="range", message=f"the share of {region} is {share}, not 0 to 1")
    total = sum(shares.values())
    if abs(total - 1) > 1e-3:
        raise InvalidInput(field="shares", rule="sum", message=f"the shares sum to {total:g}; they must sum to 1")
    policy = traffic_policies().get(deployment)
    barred = [region for region in shares if shares[region] > 0 and policy and not policy.may_serve(origin, region)]
    if barred:
        message = f"residency keeps requests of {origin} out of {', '.join(barred)}"
        raise InvalidInput(field="shares", rule="residency", message=message)
    return _order(OverrideKind.SHARES, deployment, origin, terms, shares=whole_row(shares, origin))


def evacuation_order(*, region: str, mode: str, terms: Terms, deployment: str = "") -> TrafficOverride:
    """The order, checked and not stored: what a preview looks at. Raises as `evacuation_start` does, but `confirm`."""
    if deployment:
        _check_deployment(deployment)
    _check_region("region", region)
    modes = ", ".join(EvacuationMode)
    if mode not in list(EvacuationMode):
        raise InvalidInput(field="mode", rule="choice", message=f"the mode is {mode!r}; it must be one of: {modes}")
    return _order(OverrideKind.EVACUATION, deployment, region, terms, mode=mode)


def _order(
    kind: OverrideKind,
    deployment: str,
    region: str,
    terms: Terms,
    *,
    shares: Mapping[str, float] | None = None,
    mode: str = "",
) -> TrafficOverride:
    if not terms.why.strip():
        raise InvalidInput(
            field="why", rule="required", message="Give a reason: others will see it while this is in force."
        )
    if not SHORTEST_S <= terms.duration_s <= LONGEST_S:
        message = f"it should last {terms.duration_s} s; an order lasts from {SHORTEST_S} to {LONGEST_S} s"
        raise InvalidInput(field="duration_s", rule="range", message=message)
    return TrafficOverride(
        kind=kind.value,
        deployment_id=deployment or None,
        region_id=region,
        shares=dict(shares or {}),
        mode=mode,
        why=terms.why.strip(),
        actor=terms.actor,
        created_at=terms.now,
        expires_at=terms.now + timedelta(seconds=terms.duration_s),
    )


def _give(order: TrafficOverride, same: "models.QuerySet[TrafficOverride]", now: datetime) -> TrafficOverride:
    with transaction.atomic():
        # Orders about one region are given one after the other, so that the younger of two ends the elder.
        Region.objects.select_for_update().get(name=order.region_id)
        order.save()
        for before in same.filter(ended_at__isnull=True).exclude(pk=order.pk):
            _end(before, f"superseded by {order.pk}", order.actor, now)
        ended = TrafficOverride.objects.filter(ended_at__isnull=False).order_by("-id")
        TrafficOverride.objects.filter(pk__in=list(ended.values_list("pk", flat=True)[OVERRIDES_KEPT:])).delete()
        _event(order, "begun", f"until {order.expires_at:%Y-%m-%d %H:%M:%S} UTC: {order.why}", order.actor, now)
        wake_ups.send(AUTOPILOT_TASK)
        wake_ups.send(ENTRY_TASK)
    return order


def _end(order: TrafficOverride, reason: str, actor: str, now: datetime) -> bool:
    rows = TrafficOverride.objects.filter(pk=order.pk, ended_at__isnull=True)
    with transaction.atomic():
        if not compare_and_set(rows, event=None, now=now, ended_at=now, end_reason=reason[:300]):
            return False
        _event(order, "ended", reason, actor, now)
        wake_ups.send(AUTOPILOT_TASK)
        wake_ups.send(ENTRY_TASK)
    return True


def _event(order: TrafficOverride, what: str, detail: str, actor: str, now: datetime) -> None:
    event_record(
        kind=f"traffic.{order.kind}.{what}",
        message=f"{describe_order(order)} {what}, {detail}",
        now=now,
        actor=actor,
        region=order.region_id,
        deployment=order.deployment_id or "",
        tone=Tone.MOVING,
        detail={"override": order.pk, "mode": order.mode, "shares": order.shares},
    )
    live.push("traffic")


def describe_order(order: TrafficOverride) -> str:
    """An order in short, as timelines name it."""
    whose = order.deployment_id or "all deployments"
    if order.kind == OverrideKind.EVACUATION:
        what = "evacuation" if order.mode == EvacuationMode.REAL else "evacuation drill"
        return f"{what} of {order.region_id} ({whose})"
    shares = ", ".join(f"{region} {share:.0%}" for region, share in sorted(order.shares.items()))
    return f"fixed shares of {whose} in {order.region_id} ({shares})"


def _check_deployment(name: str) -> None:
    if not Deployment.objects.filter(name=name).exists():
        raise InvalidInput(field="deployment", rule="exists", message=f"there is no deployment {name!r}")


def _check_region(field: str, name: str) -> list[str]:
    known = sorted(set(Ingress.objects.values_list("region_id", flat=True)))
    if name not in known:
        raise _unknown_region(field, name, known)
    return known


def _unknown_region(field: str, name: str, known: list[str]) -> InvalidInput:
    there = ", ".join(known) or "none"
    return InvalidInput(
        field=field, rule="exists", message=f"there is no region {name!r} with an ingress; there are: {there}"
    )


def evacuation_request(
    *, region: str, mode: str, confirm: str, terms: Terms, deployment: str = ""
) -> TrafficOverride | Approval:
    """Evacuate, or, where it needs two-person approval, request it. Drills move little and need none.

    Raises:
        InvalidInput: as `evacuation_start` does.
    """
    if mode != EvacuationMode.REAL or not requires_approval(EVACUATE.name):
        return evacuation_start(region=region, mode=mode, confirm=confirm, terms=terms, deployment=deployment)
    order = evacuation_check(region=region, mode=mode, confirm=confirm, terms=terms, deployment=deployment)
    arguments = {"region": region, "deployment": deployment, "duration_s": terms.duration_s, "why": terms.why}
    request = ApprovalRequest(describe_order(order), arguments, terms.actor, terms.now, terms.why, deployment, region)
    return approval_request(EVACUATE.name, request)


def _perform(arguments: Mapping[str, Any], actor: str, now: datetime) -> str:
    terms = Terms(duration_s=arguments["duration_s"], why=arguments["why"], actor=actor, now=now)
    region, deployment = arguments["region"], arguments["deployment"]
    mode = EvacuationMode.REAL.value
    order = evacuation_start(region=region, mode=mode, confirm=region, terms=terms, deployment=deployment)
    return f"{describe_order(order)} begun"


def shares_request(
    *, deployment: str, origin: str, shares: Mapping[str, float], terms: Terms
) -> TrafficOverride | Approval:
    """Fix shares or, where they empty a region and evacuations need two-person approval, request it.

    Raises:
        InvalidInput: as `shares_fix` does.
    """
    order = shares_order(deployment=deployment, origin=origin, shares=shares, terms=terms)
    if not _empties_its_region(order) or not requires_approval(EVACUATE.name):
        return shares_fix(deployment=deployment, origin=origin, shares=shares, terms=terms)
    arguments = {
        "deployment": deployment,
        "origin": origin,
        "shares": dict(shares),
        "duration_s": terms.duration_s,
        "why": terms.why,
    }
    request = ApprovalRequest(describe_order(order), arguments, terms.actor, terms.now, terms.why, deployment, origin)
    return approval_request(FIX_SHARES.name, request)


def _empties_its_region(order: TrafficOverride) -> bool:
    """Whether a region with cells of the deployment keeps next to none of its own requests."""
    served = DeploymentRegion.objects.filter(
        deployment_id=order.deployment_id, region_id=order.region_id, cells__gt=0
    ).exists()
    return served and empties_origin(order.shares, order.region_id)


def _perform_shares(arguments: Mapping[str, Any], actor: str, now: datetime) -> str:
    terms = Terms(duration_s=arguments["duration_s"], why=arguments["why"], actor=actor, now=now)
    deployment, origin, shares = arguments["deployment"], arguments["origin"], arguments["shares"]
    return f"{describe_order(shares_fix(deployment=deployment, origin=origin, shares=shares, terms=terms))} begun"


FIX_SHARES = FleetAction("fix-shares", "Fix shares that empty a region", _perform_shares, settable=False)
EVACUATE = FleetAction(EVACUATE_RULE, "Evacuate a region for real", _perform)


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
