"""Sets whether a rule about faults is on, in shadow (it only reports what it would do), or off."""

from datetime import datetime

from django.db import transaction

from fleet.models import FaultRule
from fleet.planning.fault_rules import Rule, RuleMode
from kernel import live, wake_ups
from kernel.events import event_record
from kernel.tones import Tone


def fault_rule_set(*, rule: Rule, mode: RuleMode, actor: str, now: datetime, why: str = "") -> None:
    """Set a rule's mode. Setting what is set already changes nothing."""
    with transaction.atomic():
        known = FaultRule.objects.select_for_update().filter(rule=rule).first()
        before = RuleMode(known.mode) if known else RuleMode.ON
        if before is mode:
            return
        FaultRule.objects.update_or_create(rule=rule, defaults={"mode": mode, "actor": actor, "changed_at": now})
        event_record(
            kind="fault_rule.changed",
            message=f"rule {rule}: {before} -> {mode} by {actor}" + (f": {why}" if why else ""),
            tone=Tone.OK if mode is RuleMode.ON else Tone.WARN,
            now=now,
            actor=actor,
            detail={"rule": rule, "mode": mode, "was": before},
        )
        live.push("incidents")
        wake_ups.send("fleet.reconcile")
