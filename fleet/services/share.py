"""Writes down how many of the cells that were set a place may have while machines are short, and tells both sides."""

from datetime import datetime

from django.db import transaction

from fleet.models import DeploymentRegion
from fleet.planning.autoscaling.needs import cells_text
from fleet.planning.claims import GrantRule
from fleet.planning.decisions import GrantCells
from fleet.services.autoscaling import AUTOSCALE_TASK
from kernel import live, wake_ups
from kernel.events import event_record
from kernel.tones import Tone
from kernel.transitions import StaleDecision

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
    """Set what a place may have. A new reason alone is written down and not told.

    Raises:
        StaleDecision: what was set or granted has changed since.
    """
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
            raise StaleDecision(f"{place[0]} in {place[1]} was set or granted other cells meanwhile")
        if decision.granted != decision.seen:
            _tell(decision, now)
            wake_ups.send(AUTOSCALE_TASK)  # requests may wait for a first cell, which it may have or not from now on
        live.push("deployments", place[0])


def _tell(decision: GrantCells, now: datetime) -> None:
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
