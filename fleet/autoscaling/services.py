"""Applies decisions about the number of cells and their roles in a place, with the reason, and the fleet's switch. It
sets the same columns as operators. Never changes cells: the reconciler does, under the disruption ledger."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any

from django.db import transaction

from fleet.autoscaling.models import RoleState, ScalingDecision, ScalingState, ScalingSwitch
from fleet.autoscaling.planning.needs import PlaceDecision, cells_text
from fleet.autoscaling.planning.planner import Regret, regret_after
from fleet.autoscaling.planning.roles import RatioDecision
from fleet.autoscaling.selectors import scaling_state, scaling_switch
from fleet.deployments.models import DeploymentRegion
from fleet.deployments.services.deployments import announce_scaled
from fleet.nodes.services.events import place_pairs_changed
from kernel import live, wake_ups
from kernel.events import event_record
from kernel.tones import Tone


@dataclass(frozen=True, slots=True)
class RoleLook:
    """The check of one place and its decision. `acting`: the decision is to be carried out; `figures`: observed figures
    by name; `counted`: request totals of its cells."""

    place: DeploymentRegion
    acting: bool
    decision: RatioDecision
    figures: Mapping[str, float | None] = field(default_factory=dict)
    counted: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sets_roles(self) -> bool:
        split = self.decision.split
        return self.acting and (split.prefill, split.decode) != (self.place.prefill, self.place.decode)


@transaction.atomic
def role_apply(*, look: RoleLook, now: datetime) -> bool:
    """Carries out and stores a decision. Returns False and does nothing if the place has changed since the check."""
    place, decision = look.place, look.decision
    split = decision.split
    seen = {name: getattr(place, name) for name in ("pk", "cells", "prefill", "decode")}
    rows = DeploymentRegion.objects.filter(**seen)
    if look.sets_roles:
        if not rows.update(prefill=split.prefill, decode=split.decode):
            return False
        event_record(
            kind="deployment.roles",
            message=f"{place.deployment_id} in {place.region_id} should have {split}: {decision.reason}",
            tone=Tone.MOVING,
            now=now,
            actor="role planner",
            region=place.region_id,
            deployment=place.deployment_id,
            detail={"prefill": split.prefill, "decode": split.decode, "rule": decision.rule.value},
        )
        announce_scaled(place.deployment_id)
    elif not rows.exists():
        return False
    before = RoleState.objects.filter(place_id=place.pk).values_list("acting", "from_tokens").first()
    RoleState.objects.update_or_create(place_id=place.pk, defaults=_role_columns(look, now))
    if before != (look.acting, decision.from_tokens):
        place_pairs_changed(place.deployment_id, place.region_id)
    live.push("deployments", place.deployment_id)
    return True


def _role_columns(look: RoleLook, now: datetime) -> dict[str, Any]:
    decision = look.decision
    needed = decision.needed
    return {
        "mixed": decision.split.mixed,
        "prefill": decision.split.prefill,
        "decode": decision.split.decode,
        "needed_prefill": needed.prefill if needed else None,
        "needed_decode": needed.decode if needed else None,
        "carries": decision.carries,
        "mixed_carries": decision.mixed_carries,
        "from_tokens": decision.from_tokens,
        "rule": decision.rule.value,
        "reason": decision.reason,
        "acting": look.acting,
        "figures": dict(look.figures),
        "counted": dict(look.counted),
        "looked_at": now,
    }


DECISIONS_KEPT = 200
"""Per place. With a change every ten minutes that covers 33 hours, for a quiet deployment months."""
REGRET_FIELDS = tuple(field.name for field in fields(Regret))
AUTOSCALE_TASK = "traffic.autoscale"


@dataclass(frozen=True, slots=True)
class ScalingLook:
    """The check of one place and its decision. `load`: observed figures by name; `acting`: the decision is to be
    carried out."""

    place: DeploymentRegion
    acting: bool
    decision: PlaceDecision
    load: Mapping[str, float | None]

    @property
    def before(self) -> ScalingState | None:
        return scaling_state(self.place)

    @property
    def in_force(self) -> int:
        return self.place.cells

    @property
    def wanted_before(self) -> int:
        """The previous decision's target. In shadow mode it is separate from the place's."""
        return self.in_force if self.acting or self.before is None else self.before.wanted

    @property
    def sets_cells(self) -> bool:
        return self.acting and self.decision.wanted != self.in_force

    @property
    def is_news(self) -> bool:
        return self.decision.wanted != self.wanted_before


def scaling_apply(*, looks: Sequence[ScalingLook], now: datetime) -> list[ScalingLook]:
    """Carries out and stores the decisions of all places. A place that was changed since its check is skipped until the
    next one. Returns the looks that were not skipped."""
    newest = _newest_decisions(looks)
    regrets = [row for look in looks if (row := _with_regret(look, newest, now)) is not None]
    ScalingDecision.objects.bulk_update(regrets, REGRET_FIELDS)
    applied = [look for look in looks if not look.is_news or _apply_one(look, now)]
    _save_states(applied, now)
    if any(_changes_pages(look) for look in applied):
        live.push("autoscaling")
    return applied


@transaction.atomic
def _apply_one(look: ScalingLook, now: datetime) -> bool:
    """Returns False and does nothing if the place has changed since the check."""
    decision, name = look.decision, look.place.deployment_id
    if look.sets_cells:
        seen = {name: getattr(look.place, name) for name in ("pk", "cells", "cells_min", "cells_max")}
        if not DeploymentRegion.objects.filter(**seen).update(cells=decision.wanted):
            return False
        event_record(
            kind="deployment.scaled",
            message=f"{name} in {decision.region} from {look.in_force} to {cells_text(decision.wanted)}, by "
            f"load within {look.place.range}: {decision.reason}",
            tone=Tone.MOVING,
            now=now,
            actor="autoscaler",
            region=decision.region,
            deployment=name,
            detail={"was": look.in_force, "cells": decision.wanted, "rule": decision.rule.value},
        )
        announce_scaled(name)
    row = ScalingDecision.objects.create(
        deployment_id=name,
        region_id=decision.region,
        at=now,
        was=look.wanted_before,
        wanted=decision.wanted,
        acted=look.acting,
        rule=decision.rule.value,
        reason=decision.reason,
        load=dict(look.load),
    )
    _trim_decisions(row)
    return True


def _trim_decisions(newest: ScalingDecision) -> None:
    here = ScalingDecision.objects.filter(deployment_id=newest.deployment_id, region_id=newest.region_id)
    kept = list(here.order_by("-id").values_list("pk", flat=True)[:DECISIONS_KEPT])
    here.filter(pk__lt=kept[-1]).delete()


def _newest_decisions(looks: Iterable[ScalingLook]) -> dict[tuple[str, str], ScalingDecision]:
    names = {look.place.deployment_id for look in looks}
    rows = ScalingDecision.objects.filter(deployment__in=names).order_by("deployment_id", "region_id", "-id")
    return {(row.deployment_id, row.region_id): row for row in rows.distinct("deployment_id", "region_id")}


def _with_regret(
    look: ScalingLook, newest: Mapping[tuple[str, str], ScalingDecision], now: datetime
) -> ScalingDecision | None:
    """The current decision with its regret until now, or None if there is no decision or the need is unknown."""
    row = newest.get((look.place.deployment_id, look.place.region_id))
    if row is None or look.before is None or look.decision.needed is None:
        return None
    regret = regret_after(
        Regret(row.observed_s, row.too_few_cell_s, row.too_many_cell_s, row.in_force_cell_s),
        wanted=row.wanted,
        needed=look.decision.needed,
        in_force=look.in_force,
        passed_s=(now - look.before.looked_at).total_seconds(),
    )
    for name in REGRET_FIELDS:
        setattr(row, name, round(getattr(regret, name), 3))
    return row


def _save_states(looks: Iterable[ScalingLook], now: datetime) -> None:
    fields = ("wanted", "needed", "rule", "reason", "acting", "load", "history", "idle_since", "looked_at")
    ScalingState.objects.bulk_create(
        [_scaling_state_row(look, now) for look in looks],
        update_conflicts=True,
        unique_fields=["place"],
        update_fields=fields,
    )


def _scaling_state_row(look: ScalingLook, now: datetime) -> ScalingState:
    decision = look.decision
    return ScalingState(
        place_id=look.place.pk,
        wanted=decision.wanted,
        needed=decision.needed,
        rule=decision.rule.value,
        reason=decision.reason,
        acting=look.acting,
        load=dict(look.load),
        idle_since=decision.idle_since,
        history=[[round(sample.at.timestamp(), 3), sample.cells] for sample in decision.history],
        looked_at=now,
    )


def _changes_pages(look: ScalingLook) -> bool:
    before, decision = look.before, look.decision
    return before is None or (before.wanted, before.rule) != (decision.wanted, decision.rule.value)


def autoscaling_pause(*, actor: str, now: datetime, why: str = "") -> ScalingSwitch:
    """Pauses the autoscaler in the whole fleet. It keeps deciding as in shadow mode."""
    return _set_switch(True, actor, now, why)


def autoscaling_resume(*, actor: str, now: datetime, why: str = "") -> ScalingSwitch:
    """Resumes the autoscaler where policies let it act."""
    return _set_switch(False, actor, now, why)


def _set_switch(paused: bool, actor: str, now: datetime, why: str) -> ScalingSwitch:
    """Does nothing if the switch is set already."""
    with transaction.atomic():
        before = ScalingSwitch.objects.select_for_update().first() or scaling_switch()
        if before.paused == paused:
            return before
        values: dict[str, Any] = {"paused": paused, "why": why[:200], "actor": actor[:64], "changed_at": now}
        row, _ = ScalingSwitch.objects.update_or_create(name="fleet", defaults=values)
        what = "paused" if paused else "resumed"
        event_record(
            kind=f"autoscaling.{what}",
            message=f"autoscaling {what} by {actor}" + (f": {why}" if why else ""),
            tone=Tone.WARN if paused else Tone.OK,
            now=now,
            actor=actor,
        )
        live.push("autoscaling")
        wake_ups.send(AUTOSCALE_TASK)
    return row
