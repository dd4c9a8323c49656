"""Periodic checks that open and close incidents outside the reconciler: silent hosts of the control plane, stale
control loops, and drift of token counts and speculation. Also sets the mode of a fault rule. Every web process checks;
an incident opens only once."""

from collections.abc import Callable
from datetime import datetime
from time import monotonic
from typing import Any

from django.db import transaction

from engine_agent.protocol.watchdog import LateWakeUp
from fleet.cells.models import Cell
from fleet.deployments.models import Deployment
from fleet.faults.models import FaultRule, Incident
from fleet.faults.planning.drift import (
    SPECULATION_DRIFT,
    TOKENS_DRIFT,
    CheckedCell,
    plan_speculation_drift,
    plan_token_drift,
)
from fleet.faults.planning.views import Rule, RuleMode
from fleet.faults.selectors.faults import FRESH_FOR, guessing_calibrated
from fleet.faults.services.incidents import incident_open, incidents_close
from fleet.load.planner import MAX_COUNT
from fleet.nodes.models import NodeReport, holds_since
from fleet.reconcile.planning.states import CellState, IncidentState
from kernel import live, wake_ups
from kernel.ages import age_text
from kernel.control_hosts import control_hosts
from kernel.control_standing import LATE_AFTER_S, STALE_AFTER_S, LoopAge
from kernel.events import event_record
from kernel.loop_passes import control_standing
from kernel.tones import Tone

CONTROL_HOST = "control-host"


class ControlHostWatch:
    """The check of one process. A host must be silent in two checks in a row, because hosts restart."""

    def __init__(self) -> None:
        self._suspected: frozenset[str] = frozenset()

    def check(self, now: datetime) -> None:
        found = control_hosts()
        problems, known = found.problems, {host.name for host in found.hosts}
        incidents = Incident.objects.filter(kind=CONTROL_HOST, state=IncidentState.OPEN.value)
        opened = set(incidents.values_list("subject", flat=True))
        for subject in sorted(problems.keys() & self._suspected - opened):
            incident_open(kind=CONTROL_HOST, subject=subject, summary=problems[subject], evidence={}, now=now)
        for subject in sorted(opened - problems.keys()):
            resolution = (
                "it reports again" if subject in known else "it no longer counts as a host of the control plane"
            )
            incidents_close(kind=CONTROL_HOST, subject=subject, resolution=resolution, now=now)
        self._suspected = frozenset(problems)


CHECK_EVERY_S = 5.0
LOOP_STALE = "control-loop-stale"


class ControlLoopWatch:
    """Opens an incident when a control loop makes no pass. Runs outside the controller, which cannot report its own
    absence. After its own start or pause the process waits `STALE_AFTER_S`, because the same event may have stopped the
    controller."""

    def __init__(self, now_s: Callable[[], float] = monotonic) -> None:
        self._now_s = now_s
        self._own = LateWakeUp(grace_s=STALE_AFTER_S, longest_pause_s=3 * CHECK_EVERY_S)

    def check(self, now: datetime) -> None:
        """Call it every `CHECK_EVERY_S`."""
        is_awake = self._own.may_enforce(self._now_s())
        standing = control_standing()
        incidents = Incident.objects.filter(kind=LOOP_STALE, state=IncidentState.OPEN.value)
        opened = set(incidents.values_list("subject", flat=True))
        for loop in standing.stale:
            if is_awake and loop.loop not in opened:
                _open_stale_loop(loop, now)
        for subject in opened & {loop.loop for loop in standing.loops if loop.age_s <= LATE_AFTER_S}:
            incidents_close(kind=LOOP_STALE, subject=subject, resolution="it makes passes again", now=now)


def _open_stale_loop(loop: LoopAge, now: datetime) -> None:
    incident_open(
        kind=LOOP_STALE,
        subject=loop.loop,
        summary=f"{loop.loop} has completed no pass for {age_text(loop.age_s)}",
        evidence={"last_pass_s": round(loop.age_s, 1), "last_pass_took_s": round(loop.took_s, 3)},
        now=now,
    )


def fault_rule_set(*, rule: Rule, mode: RuleMode, actor: str, now: datetime, why: str = "") -> None:
    """Sets a rule's mode. Does nothing if it is set already."""
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


def token_drift_check(*, now: datetime) -> None:
    """Opens and closes incidents about cells that count other tokens than their engine."""
    open_about = set(
        Incident.objects.filter(kind=TOKENS_DRIFT, state=IncidentState.OPEN.value).values_list("subject", flat=True)
    )
    live_cells = Cell.objects.exclude(state=CellState.STOPPED.value)
    known = set(live_cells.filter(pk__in=open_about).values_list("pk", flat=True))
    plan = plan_token_drift(_reported_token_checks(now), known, open_about)
    with transaction.atomic():
        for each, summary in plan.opened:
            cell = Cell.objects.filter(pk=each.cell).first()
            if cell is not None:
                incident_open(
                    kind=TOKENS_DRIFT,
                    subject=each.cell,
                    summary=summary,
                    evidence=_token_evidence(each),
                    now=now,
                    region=cell.region_id,
                    deployment=cell.deployment_id,
                    cell=cell.pk,
                )
        for subject, why in plan.closed:
            incidents_close(kind=TOKENS_DRIFT, subject=subject, resolution=why, now=now)


def _reported_token_checks(now: datetime) -> list[CheckedCell]:
    """Token counts that leaders report about their own cells."""
    reports = NodeReport.objects.filter(
        holds_since(now - FRESH_FOR), load__has_key="token_check", node__member__rank=0
    ).exclude(load__token_check=None)
    reported_checks = reports.values_list("node__member__cell_id", "cell", "load__token_check")
    return [
        _checked_cell(cell, check)
        for cell, reported, check in reported_checks
        if cell == reported and isinstance(check, dict)
    ]


def _checked_cell(cell: str, check: dict[str, Any]) -> CheckedCell:
    prompt, completion, our_prompt, our_completion = (
        max(0, min(int(check.get(name, 0)), MAX_COUNT))
        for name in (
            *("engine_prompt_total", "engine_completion_total"),
            *("counted_prompt_total", "counted_completion_total"),
        )
    )
    since = float(check.get("since", 0.0))
    return CheckedCell(cell, since, (prompt, completion), (our_prompt, our_completion))


def _token_evidence(each: CheckedCell) -> dict[str, Any]:
    return {
        "since": each.since,
        "engine_prompt_tokens": each.engine[0],
        "engine_completion_tokens": each.engine[1],
        "counted_prompt_tokens": each.counted[0],
        "counted_completion_tokens": each.counted[1],
    }


def speculation_drift_check(*, now: datetime) -> None:
    """Opens and closes incidents about deployments whose speculation is accepted less often than calibrated."""
    open_about = set(
        Incident.objects.filter(kind=SPECULATION_DRIFT, state=IncidentState.OPEN.value).values_list(
            "subject", flat=True
        )
    )
    known = set(Deployment.objects.filter(pk__in=open_about).values_list("pk", flat=True))
    plan = plan_speculation_drift(guessing_calibrated(now), known, open_about)
    with transaction.atomic():
        for each, summary in plan.opened:
            evidence = {
                "version": each.version,
                "drafts": each.drafts,
                "guessed_tokens": round(each.guessed, 3),
                "accepted_tokens": round(each.accepted, 3),
                "expected_tokens": round(each.expected, 3),
            }
            incident_open(
                kind=SPECULATION_DRIFT,
                subject=each.deployment,
                summary=summary,
                evidence=evidence,
                now=now,
                deployment=each.deployment,
            )
        for subject, why in plan.closed:
            incidents_close(kind=SPECULATION_DRIFT, subject=subject, resolution=why, now=now)
