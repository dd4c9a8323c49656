"""Changes what operators decide about traffic: fixed shares of an origin, evacuations of a region, and traffic
policies. Each override has a reason, an expiry and events at its start and end. It moves no request; the next pass of
the autopilot does."""

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
from kernel.events import event_record, events_record
from kernel.models import Event
from kernel.refusals import Conflict, InvalidInput
from kernel.tones import Tone
from kernel.transitions import compare_and_set
from traffic.region_shares.models import TrafficOverride, TrafficRule, TrafficWindow
from traffic.region_shares.planning.policy import (
    EvacuationMode,
    InvalidTrafficPolicy,
    OverrideKind,
    TrafficPolicy,
    parse_traffic_policy,
    traffic_policy_as_json,
    whole_row,
)
from traffic.region_shares.selectors.traffic import traffic_policies
from traffic.routing.models import Ingress

AUTOPILOT_TASK = "traffic.autopilot"
ENTRY_TASK = "traffic.entry"
SHORTEST_S, LONGEST_S = 10, 7 * 86_400
"""An override that is needed for longer than a week should be a policy."""
OVERRIDES_KEPT = 500
"""Number of ended overrides to keep; the timeline has them as well."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Who starts an override, why, when, and for how long."""

    duration_s: int
    why: str
    actor: str
    now: datetime


def shares_fix(*, deployment: str, origin: str, shares: Mapping[str, float], terms: Terms) -> TrafficOverride:
    """Fixes where an origin's requests for a deployment are served. Replaces an override of the same row. Raises
    InvalidInput for an unknown deployment or region, invalid shares or shares that residency forbids, no reason, or a
    duration outside `SHORTEST_S` … `LONGEST_S`."""
    override = shares_override(deployment=deployment, origin=origin, shares=shares, terms=terms)
    same = TrafficOverride.objects.filter(kind=override.kind, deployment_id=deployment, region_id=origin)
    return _store_override(override, same, terms.now)


def evacuation_start(*, region: str, mode: str, confirm: str, terms: Terms, deployment: str = "") -> TrafficOverride:
    """Evacuates a region, of one deployment or, with "", of all. Replaces an evacuation of the same region. Raises
    InvalidInput for an unknown region, mode or deployment, no reason, an invalid duration, or a wrong `confirm`."""
    override = evacuation_check(region=region, mode=mode, confirm=confirm, terms=terms, deployment=deployment)
    same = TrafficOverride.objects.filter(kind=override.kind, deployment_id=override.deployment_id, region_id=region)
    return _store_override(override, same, terms.now)


def evacuation_check(*, region: str, mode: str, confirm: str, terms: Terms, deployment: str = "") -> TrafficOverride:
    """Returns the override of `evacuation_start`, validated but not stored."""
    override = evacuation_override(region=region, mode=mode, terms=terms, deployment=deployment)
    if confirm != region:
        raise InvalidInput(field="confirm", rule="confirm", message=f"enter the region's name, {region}, to confirm")
    return override


def override_end(*, override_id: int, actor: str, now: datetime, why: str = "") -> None:
    """Ends an override early. Its requests return in steps. Raises Conflict if it has ended already."""
    override = TrafficOverride.objects.get(pk=override_id)
    reason = f"ended by {actor}" + (f": {why}" if why else "")
    if not _end_override(override, reason, actor, now):
        raise Conflict(f"override {override_id} has ended already")


def overrides_expire(*, now: datetime) -> list[int]:
    due = TrafficOverride.objects.filter(ended_at__isnull=True, expires_at__lte=now)
    return [override.pk for override in due if _end_override(override, "expired", "switchyard", now)]


def shares_override(*, deployment: str, origin: str, shares: Mapping[str, float], terms: Terms) -> TrafficOverride:
    """Returns the override, validated but not stored, for a preview. Raises like `shares_fix`."""
    _check_deployment(deployment)
    known = _check_region("origin", origin)
    for region, share in shares.items():
        if region not in known:
            raise _unknown_region("shares", region, known)
        if not 0 <= share <= 1:
            raise InvalidInput(
                field="shares", rule="range", message=f"the share of {region} is {share}; it must be from 0 to 1"
            )
    total = sum(shares.values())
    if abs(total - 1) > 1e-3:
        raise InvalidInput(field="shares", rule="sum", message=f"the shares sum to {total:g}; they must sum to 1")
    policy = traffic_policies().get(deployment)
    barred = [region for region in shares if shares[region] > 0 and policy and not policy.may_serve(origin, region)]
    if barred:
        message = f"residency keeps requests of {origin} out of {', '.join(barred)}"
        raise InvalidInput(field="shares", rule="residency", message=message)
    return _new_override(OverrideKind.SHARES, deployment, origin, terms, shares=whole_row(shares, origin))


def evacuation_override(*, region: str, mode: str, terms: Terms, deployment: str = "") -> TrafficOverride:
    """Returns the override, validated but not stored, for a preview. Raises like `evacuation_start`."""
    if deployment:
        _check_deployment(deployment)
    _check_region("region", region)
    modes = ", ".join(EvacuationMode)
    if mode not in list(EvacuationMode):
        raise InvalidInput(field="mode", rule="choice", message=f"the mode is {mode!r}; it must be one of: {modes}")
    return _new_override(OverrideKind.EVACUATION, deployment, region, terms, mode=mode)


def _new_override(
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
            field="why", rule="required", message="Give a reason. Everyone sees it while the override is in force."
        )
    if not SHORTEST_S <= terms.duration_s <= LONGEST_S:
        message = f"the duration is {terms.duration_s} s; it must be from {SHORTEST_S} to {LONGEST_S} s"
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


def _store_override(
    override: TrafficOverride, same: "models.QuerySet[TrafficOverride]", now: datetime
) -> TrafficOverride:
    with transaction.atomic():
        # Overrides of one region are serialised, so that the newer of two ends the older.
        Region.objects.select_for_update().get(name=override.region_id)
        override.save()
        for before in same.filter(ended_at__isnull=True).exclude(pk=override.pk):
            _end_override(before, f"superseded by {override.pk}", override.actor, now)
        ended = TrafficOverride.objects.filter(ended_at__isnull=False).order_by("-id")
        TrafficOverride.objects.filter(pk__in=list(ended.values_list("pk", flat=True)[OVERRIDES_KEPT:])).delete()
        _override_event(
            override, "begun", f"until {override.expires_at:%Y-%m-%d %H:%M:%S} UTC: {override.why}", override.actor, now
        )
        wake_ups.send(AUTOPILOT_TASK)
        wake_ups.send(ENTRY_TASK)
    return override


def _end_override(override: TrafficOverride, reason: str, actor: str, now: datetime) -> bool:
    rows = TrafficOverride.objects.filter(pk=override.pk, ended_at__isnull=True)
    with transaction.atomic():
        if not compare_and_set(rows, event=None, now=now, ended_at=now, end_reason=reason[:300]):
            return False
        _override_event(override, "ended", reason, actor, now)
        wake_ups.send(AUTOPILOT_TASK)
        wake_ups.send(ENTRY_TASK)
    return True


def _override_event(override: TrafficOverride, what: str, detail: str, actor: str, now: datetime) -> None:
    event_record(
        kind=f"traffic.{override.kind}.{what}",
        message=f"{describe_override(override)} {what}, {detail}",
        now=now,
        actor=actor,
        region=override.region_id,
        deployment=override.deployment_id or "",
        tone=Tone.MOVING,
        detail={"override": override.pk, "mode": override.mode, "shares": override.shares},
    )
    live.push("traffic")


def describe_override(override: TrafficOverride) -> str:
    whose = override.deployment_id or "all deployments"
    if override.kind == OverrideKind.EVACUATION:
        what = "evacuation" if override.mode == EvacuationMode.REAL else "evacuation drill"
        return f"{what} of {override.region_id} ({whose})"
    shares = ", ".join(f"{region} {share:.0%}" for region, share in sorted(override.shares.items()))
    return f"fixed shares of {whose} in {override.region_id} ({shares})"


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
    return InvalidInput(field=field, rule="exists", message=f"region {name!r} has no ingress; others: {there}")


def evacuation_request(
    *, region: str, mode: str, confirm: str, terms: Terms, deployment: str = ""
) -> TrafficOverride | Approval:
    """Starts an evacuation, or requests it if it needs two-person approval. Drills move little and need none. Raises
    InvalidInput as `evacuation_start`."""
    if mode != EvacuationMode.REAL or not requires_approval(EVACUATE.name):
        return evacuation_start(region=region, mode=mode, confirm=confirm, terms=terms, deployment=deployment)
    override = evacuation_check(region=region, mode=mode, confirm=confirm, terms=terms, deployment=deployment)
    arguments = {"region": region, "deployment": deployment, "duration_s": terms.duration_s, "why": terms.why}
    request = ApprovalRequest(
        describe_override(override), arguments, terms.actor, terms.now, terms.why, deployment, region
    )
    return approval_request(EVACUATE.name, request)


def _perform_evacuation(arguments: Mapping[str, Any], actor: str, now: datetime) -> str:
    terms = Terms(duration_s=arguments["duration_s"], why=arguments["why"], actor=actor, now=now)
    region, deployment = arguments["region"], arguments["deployment"]
    mode = EvacuationMode.REAL.value
    override = evacuation_start(region=region, mode=mode, confirm=region, terms=terms, deployment=deployment)
    return f"{describe_override(override)} begun"


def shares_request(
    *, deployment: str, origin: str, shares: Mapping[str, float], terms: Terms
) -> TrafficOverride | Approval:
    """Fixes shares, or requests approval if they empty a region and evacuations need two people. Raises InvalidInput as
    `shares_fix`."""
    override = shares_override(deployment=deployment, origin=origin, shares=shares, terms=terms)
    if not _empties_its_region(override) or not requires_approval(EVACUATE.name):
        return shares_fix(deployment=deployment, origin=origin, shares=shares, terms=terms)
    arguments = {
        "deployment": deployment,
        "origin": origin,
        "shares": dict(shares),
        "duration_s": terms.duration_s,
        "why": terms.why,
    }
    request = ApprovalRequest(
        describe_override(override), arguments, terms.actor, terms.now, terms.why, deployment, origin
    )
    return approval_request(FIX_SHARES.name, request)


def _empties_its_region(override: TrafficOverride) -> bool:
    """Whether a region with cells of the deployment keeps next to none of the requests that arrive there."""
    served = DeploymentRegion.objects.filter(
        deployment_id=override.deployment_id, region_id=override.region_id, cells__gt=0
    ).exists()
    return served and empties_origin(override.shares, override.region_id)


def _perform_shares(arguments: Mapping[str, Any], actor: str, now: datetime) -> str:
    terms = Terms(duration_s=arguments["duration_s"], why=arguments["why"], actor=actor, now=now)
    deployment, origin, shares = arguments["deployment"], arguments["origin"], arguments["shares"]
    return f"{describe_override(shares_fix(deployment=deployment, origin=origin, shares=shares, terms=terms))} begun"


FIX_SHARES = FleetAction("fix-shares", "Fix shares that empty a region", _perform_shares, settable=False)
EVACUATE = FleetAction(EVACUATE_RULE, "Evacuate a region for real", _perform_evacuation)


def traffic_policy_change(*, deployment: str, stated: Mapping[str, Any], actor: str, now: datetime) -> TrafficPolicy:
    """Changes parts of a deployment's traffic policy and returns the whole. Raises InvalidInput for an unknown key,
    region or deployment, a value out of range, or a residency without its own region."""
    return traffic_policies_change(stated={deployment: stated}, actor=actor, now=now)[deployment]


@transaction.atomic
def traffic_policies_change(
    *, stated: Mapping[str, Mapping[str, Any]], actor: str, now: datetime
) -> dict[str, TrafficPolicy]:
    """As `traffic_policy_change` for several deployments, by name. At most eight queries. Raises
    Deployment.DoesNotExist for an unknown one."""
    known = Deployment.objects.select_for_update().filter(name__in=stated).order_by("name")
    if unknown := sorted(set(stated) - {row.name for row in known}):
        raise Deployment.DoesNotExist(f"there is no deployment {unknown[0]!r}")
    rules = {rule.deployment_id: rule for rule in TrafficRule.objects.filter(deployment__in=stated)}
    regions, there = set(Region.objects.values_list("name", flat=True)), _deployment_names()
    policies: dict[str, TrafficPolicy] = {}
    new: list[TrafficRule] = []
    changed: list[TrafficRule] = []
    retested: list[str] = []
    for name, fields in stated.items():
        rule = rules.get(name)
        before = rule.policy() if rule else TrafficPolicy()
        policies[name] = policy = _parsed_policy(fields, before, regions, there)
        if policy == before:
            continue
        tested = (policy.tested_concurrency, policy.tested_by_type)
        if tested != (before.tested_concurrency, before.tested_by_type):
            retested.append(name)
        row = rule or TrafficRule(deployment_id=name, revision=0)
        row.stated, row.revision = traffic_policy_as_json(policy), row.revision + 1
        row.actor, row.changed_at = actor, now
        (changed if rule else new).append(row)
    if retested:
        # Samples in the old unit would look like a change of capacity.
        TrafficWindow.objects.filter(deployment__in=retested).update(samples=[])
    if new:
        TrafficRule.objects.bulk_create(new)
    if changed:
        TrafficRule.objects.bulk_update(changed, ("stated", "revision", "actor", "changed_at"))
    if rows := [*new, *changed]:
        events_record([_policy_event(row, stated[row.deployment_id]) for row in rows])
        live.push("traffic")
        wake_ups.send(AUTOPILOT_TASK)
    return policies


def _policy_event(row: TrafficRule, stated: Mapping[str, Any]) -> Event:
    return Event(
        at=row.changed_at,
        kind="traffic.policy",
        message=f"traffic policy of {row.deployment_id} changed by {row.actor}: {', '.join(sorted(stated))}",
        tone=Tone.MOVING,
        actor=row.actor,
        deployment=row.deployment_id,
        detail={"stated": dict(stated), "revision": row.revision},
    )


def _deployment_names() -> set[str]:
    return set(Deployment.objects.values_list("name", flat=True))


def _parsed_policy(
    stated: Mapping[str, Any], before: TrafficPolicy, known_regions: set[str], there: set[str]
) -> TrafficPolicy:
    try:
        policy = parse_traffic_policy(stated, known_regions, before)
    except InvalidTrafficPolicy as error:
        raise InvalidInput(field=error.field, rule="policy", message=str(error)) from None
    for name in policy.split:
        if name not in there:
            message = f"unknown deployment {name}; known: {', '.join(sorted(there))}"
            raise InvalidInput(field=f"split.{name}", rule="policy", message=message)
    for origin, regions in policy.residency.items():
        if origin not in regions:
            message = f"residency of {origin} must include {origin}: its ingress serves there what no other region can"
            raise InvalidInput(field=f"residency.{origin}", rule="policy", message=message)
    return policy
