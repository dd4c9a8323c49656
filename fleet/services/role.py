"""Applies what the planner of roles decides: how many cells of a place have which role, with the reason.

It sets the numbers that a person sets; which cells change, and when, is the reconciler's, under the disruption ledger.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.db import transaction

from fleet.models import DeploymentRegion, RoleState
from fleet.planning.roles.ratio import RatioDecision
from fleet.services.deployment import announce_scaled
from fleet.services.desired import place_pairs_changed
from kernel import live
from kernel.events import event_record
from kernel.tones import Tone


@dataclass(frozen=True, slots=True)
class RoleLook:
    """A look at one place, as its row was, with what was decided upon it. `acting`: the decision is to be carried out;
    `figures`: what was seen, by name; `counted`: what its cells had counted."""

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
    """Carry it out and write it down. False: what was looked at has changed meanwhile, and nothing was done."""
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
    RoleState.objects.update_or_create(place_id=place.pk, defaults=_columns(look, now))
    if before != (look.acting, decision.from_tokens):
        place_pairs_changed(place.deployment_id, place.region_id)
    live.push("deployments", place.deployment_id)
    return True


def _columns(look: RoleLook, now: datetime) -> dict[str, Any]:
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
