"""Reads faults into the planners' plain data, in a constant number of queries. Never writes."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Exists, F, Max, OuterRef, Q, Subquery
from django.db.models.functions import Coalesce

from engine_agent.protocol.signatures import fault_detail, fault_device, fault_scope
from fleet.cells.models import Cell
from fleet.faults.models import CellSighting, FaultRule, Incident, IncidentPart, Repair, Replacement, Signal
from fleet.faults.planning.drift import Guessing
from fleet.faults.planning.views import (
    Attempt,
    DeviceWindow,
    FaultsView,
    IncidentKind,
    IncidentView,
    PartNoun,
    ReplacementView,
    Rule,
    RuleMode,
    Rung,
    SignalView,
    StepWindow,
)
from fleet.load.planner import FRESH_FOR_S, MAX_COUNT
from fleet.machines.selectors import nodes_sharing_devices, nodes_that_may_reboot
from fleet.nodes.models import NodeReport, holds_since
from fleet.reconcile.planning.settings import FaultSettings
from fleet.reconcile.planning.states import CellState, IncidentState
from kernel.row_cache import WrittenTables
from models_registry.versions.selectors import chains_expected

ATTEMPTS = (Rung.RESET.value, Rung.REBOOT.value)
"""`Repair.what` of attempts; the others are counted when they are done."""


def faults_view(*, now: datetime, windows: Mapping[str, tuple[StepWindow, ...]], written: WrittenTables) -> FaultsView:
    """Everything about faults that one pass of the reconciler needs. `windows`: node -> its recent step windows.

    Signals, repairs and muted incidents only expire with time, so an empty result stays valid until a row is `written`.
    """
    settings = FaultSettings()
    recent, repaired = (
        now - timedelta(seconds=seconds) for seconds in (settings.common_cause_window_s, settings.repairs_window_s)
    )
    signals = written.get_lasting("signals", ["fleet_signal"], lambda: tuple(_signals(recent)))
    return FaultsView(
        signals=signals,
        incidents=written.get("incidents", ["fleet_incident", "fleet_incidentpart"], lambda: tuple(_incidents())),
        replacements=written.get("replacements", ["fleet_replacement", "fleet_node"], lambda: tuple(_replacements())),
        repairs=written.get_lasting("repairs", ["fleet_repair", "fleet_incident"], lambda: _repairs(repaired)),
        modes=written.get("modes", ["fleet_faultrule"], rule_modes),
        down=_unreachable_cells(now - timedelta(seconds=settings.witness_age_s)),
        windows=windows,
        muted=written.get_lasting("muted", ["fleet_incident"], lambda: _muted(now)),
        attempts=_with_checks(written.get_lasting("attempts", ["fleet_repair"], lambda: _attempts(repaired))),
        sharing=nodes_sharing_devices() if any(one.device and not one.settled for one in signals) else {},
        may_reboot=nodes_that_may_reboot() if any(not one.settled for one in signals) else frozenset(),
    )


def _muted(now: datetime) -> frozenset[tuple[str, str]]:
    return frozenset(Incident.objects.filter(muted_until__gt=now).values_list("kind", "subject"))


def rule_modes() -> dict[Rule, RuleMode]:
    return {Rule(row.rule): RuleMode(row.mode) for row in FaultRule.objects.all()}


def step_windows(cell: str, generation: int, stored: Iterable[Mapping[str, Any]]) -> tuple[StepWindow, ...]:
    """A rank's recent windows as stored in `StepRecord`, oldest first."""
    return tuple(
        StepWindow(
            window["index"],
            cell,
            generation,
            _buckets(window.get("steps", {})),
            _buckets(window.get("compute_ms", {})),
            {name: DeviceWindow(**clocks) for name, clocks in window.get("devices", {}).items()},
            window.get("of_cell", False),
        )
        for window in stored
    )


def _buckets(stored: dict[str, Any]) -> dict[int, Any]:
    return {int(bucket): number for bucket, number in stored.items()}


def _signals(since: datetime) -> Iterable[SignalView]:
    for row in Signal.objects.filter(Q(settled_at__isnull=True) | Q(last_at__gte=since)).order_by("id"):
        yield SignalView(
            node=row.node_id,
            signature=row.signature,
            summary=row.summary,
            instance_type=row.instance_type,
            first_at=row.first_at,
            last_at=row.last_at,
            count=row.count,
            cell=row.cell,
            settled=row.settled_at is not None,
            scope=fault_scope(row.signature, row.evidence),
            detail=fault_detail(row.signature, row.evidence),
            device=fault_device(row.signature, row.evidence),
        )


def _incidents() -> Iterable[IncidentView]:
    down = IncidentPart.objects.filter(incident=OuterRef("pk"), noun=PartNoun.CELL.value, recovered_at__isnull=True)
    rows = Incident.objects.filter(state=IncidentState.OPEN.value).annotate(is_held=Exists(down))
    for row in rows.order_by("id"):
        yield IncidentView(
            id=row.pk,
            kind=row.kind,
            subject=row.subject,
            opened_at=row.opened_at,
            seen_at=row.seen_at or row.opened_at,
            summary=row.summary,
            node=row.node,
            cell=row.cell,
            shadow=row.shadow,
            is_held=row.is_held,
        )


def _replacements() -> Iterable[ReplacementView]:
    for row in Replacement.objects.filter(closed_at__isnull=True).select_related("node").order_by("id"):
        yield ReplacementView(
            id=row.pk,
            node=row.node_id,
            rule=Rule(row.rule),
            region=row.node.region_id,
            instance_type=row.node.instance_type_id,
            cell=row.cell,
            begun=row.begun_at is not None,
            reason=row.reason,
        )


def _repairs(since: datetime) -> dict[str, int]:
    """Node -> its repairs since then, and since an operator last closed an incident about its repairs."""
    inspected_at = (
        Incident.objects.filter(
            kind=IncidentKind.REPEATED_REPAIRS, node=OuterRef("node_id"), state=IncidentState.CLOSED.value
        )
        .order_by()
        .values("node")
        .annotate(last=Max("closed_at"))
        .values("last")
    )
    counted = Repair.objects.filter(at__gte=since).annotate(inspected_at=Coalesce(Subquery(inspected_at), since))
    return Counter(counted.filter(at__gte=F("inspected_at")).order_by().values_list("node_id", flat=True))


def _attempts(since: datetime) -> dict[str, tuple[Attempt, ...]]:
    """Node -> its resets and reboots since then, oldest first, without results of deep checks."""
    found: dict[str, tuple[Attempt, ...]] = {}
    for row in Repair.objects.filter(at__gte=since, what__in=ATTEMPTS).order_by("id"):
        attempt = Attempt(
            row.pk,
            row.node_id,
            Rung(row.what),
            row.reason,
            row.at,
            request=row.request,
            ended_at=row.ended_at,
            cured=row.cured,
            result=row.result,
        )
        found[row.node_id] = (*found.get(row.node_id, ()), attempt)
    return found


def _with_checks(attempts: Mapping[str, tuple[Attempt, ...]]) -> dict[str, tuple[Attempt, ...]]:
    """Adds the results of deep checks of running attempts. One query, and none without any."""
    running = {node: mine[-1].request for node, mine in attempts.items() if mine[-1].ended_at is None}
    reports = NodeReport.objects.filter(node__in=[node for node, request in running.items() if request])
    found = dict(attempts)
    for node, checks in reports.values_list("node_id", "telemetry__checks") if running else ():
        if isinstance(checks, dict) and checks.get("request") == running[node] and checks.get("ended_at"):
            results = tuple((str(r.get("check")), r.get("ok"), str(r.get("found"))) for r in checks.get("results", []))
            found[node] = (*found[node][:-1], replace(found[node][-1], checks=results))
    return found


def _unreachable_cells(since: datetime) -> dict[str, str]:
    """Cell -> an ingress that cannot reach its current generation, from recent sightings only."""
    witnesses: dict[tuple[str, int], str] = {}
    for row in CellSighting.objects.filter(seen_at__gte=since).order_by("witness"):
        witnesses |= dict.fromkeys(row.down.items(), row.witness)
    if not witnesses:
        return {}
    known = Cell.objects.filter(id__in={cell for cell, _ in witnesses}).values_list("id", "generation")
    return {cell: witnesses[cell, generation] for cell, generation in known if (cell, generation) in witnesses}


FRESH_FOR = timedelta(seconds=FRESH_FOR_S)
"""Older reports are ignored."""


@dataclass(frozen=True, slots=True)
class CellGuesses:
    """Speculation counters of a cell's engine over the last `covered_s`."""

    cell: Cell
    covered_s: float
    drafts: int
    guessed: int
    accepted: int


def cell_guesses(now: datetime) -> list[CellGuesses]:
    """Every cell whose leader reported speculation counters recently. Two queries."""
    reports = NodeReport.objects.filter(
        holds_since(now - FRESH_FOR), load__has_key="speculation", node__member__rank=0
    ).exclude(load__speculation=None)
    rows = reports.values_list("node__member__cell_id", "cell", "load__speculation")
    speculation = {cell: load for cell, reported, load in rows if cell == reported and isinstance(load, dict)}
    if not speculation:
        return []
    cells = (
        Cell.objects.filter(pk__in=speculation).exclude(state=CellState.STOPPED.value).select_related("model_version")
    )
    return [_cell_guesses(cell, speculation[cell.pk]) for cell in cells.order_by("pk")]


def _cell_guesses(cell: Cell, load: Mapping[str, Any]) -> CellGuesses:
    drafts, guessed, accepted = (
        max(0, min(int(load.get(name, 0)), MAX_COUNT)) for name in ("drafts", "guessed_tokens", "accepted_tokens")
    )
    return CellGuesses(cell, float(load.get("covered_s", 0.0)), drafts, guessed, accepted)


def guessing_calibrated(now: datetime) -> Iterator[Guessing]:
    """Cells whose version is calibrated, with the expectations of the newest calibration."""
    found = cell_guesses(now)
    chains = chains_expected({each.cell.model_version_id for each in found}) if found else {}
    for each in found:
        if each.cell.model_version_id in chains:
            yield Guessing(
                each.cell.deployment_id,
                each.cell.model_version.reference,
                each.covered_s,
                each.drafts,
                each.guessed,
                each.accepted,
                chains[each.cell.model_version_id],
            )
