"""Sets and deletes quotas, and stores how many of its target cells a place may have while machines are scarce, with
events for both sides. Never changes cells: the reconciler does."""

from collections.abc import Mapping
from datetime import datetime

from django.db import transaction

from fleet.autoscaling.planning.needs import cells_text
from fleet.autoscaling.services import AUTOSCALE_TASK
from fleet.deployments.models import DeploymentRegion
from fleet.deployments.planner import GrantRule
from fleet.quotas.models import Quota, quota_name
from fleet.reconcile.planning.decisions import GrantCells
from fleet.regions.models import Region
from kernel import live, wake_ups
from kernel.columns import check_columns
from kernel.events import event_record
from kernel.refusals import InvalidInput
from kernel.tones import Tone
from kernel.transitions import StaleDecision
from models_registry.instance_types.services import instance_type_named


@transaction.atomic
def quota_set(
    *,
    team: str,
    instance_type: str,
    machines: int,
    actor: str,
    now: datetime,
    borrow_most: int | None = None,
    region: str = "",
) -> Quota:
    """Sets a team's quota of a type, in a region or, without one, in total. `borrow_most`: machines that it may borrow,
    None for any number. Does nothing if it is set already. Raises InvalidInput for an unknown instance type or region,
    an invalid team name, or an invalid number."""
    check_columns(Quota, team=team, machines=machines, borrow_most=borrow_most)
    kind = instance_type_named(instance_type)
    place = _region_named(region)
    of_team = {
        row.region_id or "": row for row in Quota.objects.select_for_update().filter(team=team, instance_type=kind)
    }
    _check_scopes({at: row.machines for at, row in of_team.items()} | {region: machines}, team, kind.name, region)
    before = of_team.get(region)
    if before is not None and (before.machines, before.borrow_most) == (machines, borrow_most):
        return before
    row, _ = Quota.objects.update_or_create(
        name=quota_name(team, kind.name, region),
        defaults={
            "team": team,
            "instance_type": kind,
            "region": place,
            "machines": machines,
            "borrow_most": borrow_most,
            "changed_by": actor[:64],
            "changed_at": now,
        },
    )
    was = f"{before.machines} before" if before else "none before"
    borrowing = "" if borrow_most is None else f", may borrow at most {borrow_most}"
    where = f" in {region}" if region else ""
    _tell_quota(
        "set", f"team {team} is entitled to {machines} {kind.name}{where}, {was}{borrowing}, by {actor}", actor, now
    )
    return row


def _region_named(name: str) -> Region | None:
    """The region that a request names, or None."""
    if not name:
        return None
    found = Region.objects.filter(name=name).first()
    if found is None:
        there = ", ".join(Region.objects.values_list("name", flat=True)) or "none"
        message = f"unknown region {name!r}; known: {there}"
        raise InvalidInput(field="region", rule="exists", message=message)
    return found


def _check_scopes(machines: Mapping[str, int], team: str, kind: str, stated: str) -> None:
    """A team's quota in a region may not exceed its total quota, if both exist."""
    overall = machines.get("")
    for region, number in sorted(machines.items()):
        if overall is None or not region or number <= overall or stated not in {"", region}:
            continue
        message = (
            f"team {team} would be entitled to {number} {kind} in {region} and to {overall} over all regions; "
            + (
                f"state {overall} at most, or raise that first"
                if stated
                else f"state {number} at least, or lower {region} first"
            )
        )
        raise InvalidInput(field="machines", rule="regions", message=message)


@transaction.atomic
def quota_remove(*, name: str, actor: str, now: datetime) -> None:
    """Deletes a team's quota. It no longer limits the team and grants no machines."""
    row = Quota.objects.select_for_update().get(name=name)
    row.delete()
    where = f" in {row.region_id}" if row.region_id else ""
    message = (
        f"team {row.team} has no quota of {row.instance_type_id}{where} any more ({row.machines} before), by {actor}"
    )
    _tell_quota("removed", message, actor, now)


def _tell_quota(what: str, message: str, actor: str, now: datetime) -> None:
    event_record(kind=f"quota.{what}", message=message, tone=Tone.MOVING, now=now, actor=actor)
    live.push("quotas")
    wake_ups.send("fleet.reconcile")


TONES = {
    GrantRule.QUOTA: Tone.WARN,
    GrantRule.RECLAIM: Tone.WARN,
    GrantRule.PRIORITY: Tone.WARN,
    GrantRule.RETURN: Tone.OK,
}
KINDS = {
    GrantRule.QUOTA: "deployment.limited",
    GrantRule.RECLAIM: "deployment.preempted",
    GrantRule.PRIORITY: "deployment.preempted",
    GrantRule.RETURN: "deployment.returned",
}


def cells_grant(decision: GrantCells, *, now: datetime) -> None:
    """Stores a place's grant. A change of only the reason causes no event. Raises StaleDecision if the target or the
    grant has changed since the decision."""
    place = (decision.deployment, decision.region)
    with transaction.atomic():
        changed = DeploymentRegion.objects.filter(
            deployment=place[0], region=place[1], cells=decision.asked, cells_granted=decision.seen
        ).update(
            cells_granted=decision.granted,
            granted_at=now,
            grant_rule=decision.rule.value,
            grant_reason=decision.reason,
        )
        if not changed:
            raise StaleDecision(f"{place[0]} in {place[1]} has another target or grant meanwhile")
        if decision.granted != decision.seen:
            _grant_event(decision, now)
            wake_ups.send(AUTOSCALE_TASK)  # requests may wait for a first cell, which is now allowed or not
        live.push("deployments", place[0])


def _grant_event(decision: GrantCells, now: datetime) -> None:
    granted = decision.asked if decision.granted is None else min(decision.granted, decision.asked)
    of = f"{granted} of {cells_text(decision.asked)} in {decision.region}"
    detail = {"was": decision.seen, "granted": decision.granted, "cells": decision.asked, "rule": decision.rule.value}
    event_record(
        kind=KINDS[decision.rule],
        message=f"{decision.deployment} may have {of}: {decision.reason}",
        tone=TONES[decision.rule],
        now=now,
        region=decision.region,
        deployment=decision.deployment,
        detail={**detail, "taker": decision.taker},
    )
    if decision.taker:
        event_record(
            kind="deployment.preempts",
            message=f"{decision.deployment} makes room for {decision.taker}: it may have {of}",
            tone=Tone.MOVING,
            now=now,
            region=decision.region,
            deployment=decision.taker,
            detail={**detail, "taken_from": decision.deployment},
        )
        live.push("deployments", decision.taker)
