"""Runs the region autopilot: stores samples of each deployment and region, asks the planner, and stores new shares. It
never calls an agent; routing tables take the shares from the rows. Passes are independent, so lost work is decided
again. The tested capacity of a cell is its version's `max_concurrency`, or the policy's `tested_concurrency`."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass
from datetime import datetime, timedelta
from typing import Any

import msgspec
from django.db import transaction

from fleet.deployments.models import Deployment
from fleet.reconcile.planning.rest import REST_S
from fleet.recorder.planning.loops import Round
from fleet.recorder.services import Recorder
from kernel import live
from kernel.events import event_record
from kernel.leases import lease_during
from kernel.tones import Tone
from traffic.region_shares.models import TrafficMatrix, TrafficShift, TrafficWindow
from traffic.region_shares.planning.autopilot import (
    AutopilotSettings,
    Decision,
    KeepTable,
    ShiftKind,
    ShiftTraffic,
    TrafficView,
    placement_problem,
    plan_shift,
)
from traffic.region_shares.planning.load import (
    IngressCounters,
    Sample,
    arrivals_per_s,
    in_service,
    ingress_counters,
    is_calm,
    queued,
    recent_samples,
)
from traffic.region_shares.planning.placement import place_demand
from traffic.region_shares.planning.policy import Matrix, TrafficPolicy, loads, overrides_for
from traffic.region_shares.planning.recording import round_of
from traffic.region_shares.selectors.traffic import (
    UP,
    IngressView,
    ReadyCell,
    ingress_views,
    ready_cells,
    samples_of,
    traffic_policies,
    traffic_views,
)
from traffic.region_shares.services.overrides import overrides_expire
from traffic.region_shares.services.unserved import unserved_check

SAMPLE_EVERY_S = 1.0
"""Wake-ups may come many times a second; a sample is taken earlier only if capacity has changed."""

RegionIngresses = dict[str, list[IngressView]]


def windows_update(ingresses: RegionIngresses, *, now: datetime) -> list[TrafficWindow]:
    """Adds a sample to each window. A region without an ingress has none, since it receives no requests. Returns all
    windows as they are now."""
    policies = traffic_policies()
    cells: dict[str, list[ReadyCell]] = defaultdict(list)
    for cell in ready_cells():
        cells[cell.deployment].append(cell)
    windows = {(row.deployment_id, row.region_id): row for row in TrafficWindow.objects.all()}
    changed = []
    for name in Deployment.objects.values_list("name", flat=True):
        there = {
            region: windows.setdefault((name, region), TrafficWindow(deployment_id=name, region_id=region))
            for region in ingresses
        }
        _update_counters(there, ingresses, name)
        arrivals = arrivals_per_s({region: _stored_counters(window).values() for region, window in there.items()})
        for region, window in there.items():
            if any(ingress.seen_at is None for ingress in ingresses[region]):
                continue  # capacity there is unknown: no sample is better than one of zero
            mine = [cell for cell in cells[name] if cell.region == region]
            _add_sample(window, ingresses[region], mine, arrivals[region], policies.get(name, TrafficPolicy()), now)
            changed.append(window)
    TrafficWindow.objects.bulk_create(
        changed, update_conflicts=True, unique_fields=["deployment", "region"], update_fields=["samples", "counters"]
    )
    return list(windows.values())


def _update_counters(there: dict[str, TrafficWindow], ingresses: RegionIngresses, deployment: str) -> None:
    for region, window in there.items():
        before, updated = _stored_counters(window), {}
        for ingress in ingresses[region]:
            if ingress.seen_at is not None:
                counters = ingress_counters(
                    before.get(ingress.id), ingress.telemetry, deployment, ingress.seen_at.timestamp()
                )
                if counters is not None:
                    updated[ingress.id] = msgspec.to_builtins(counters)
        window.counters = updated


def _stored_counters(window: TrafficWindow) -> dict[str, IngressCounters]:
    return msgspec.convert(window.counters, dict[str, IngressCounters])


def _add_sample(
    window: TrafficWindow,
    ingresses: list[IngressView],
    cells: list[ReadyCell],
    arrivals: float,
    policy: TrafficPolicy,
    now: datetime,
) -> None:
    # A cell that any ingress of its region cannot reach counts as unavailable.
    healthy = [cell for cell in cells if all(ingress.cells.get(cell.id) == UP for ingress in ingresses)]
    # Without arrivals, requests in service would look like requests that never end.
    rated = [
        ingress
        for ingress in ingresses
        if (counters := _stored_counters(window).get(ingress.id)) and counters.over_s > 0
    ]
    sample = Sample(
        at=round(now.timestamp(), 3),
        arrivals_per_s=round(arrivals, 3),
        in_service=sum(in_service(ingress.telemetry, [cell.id for cell in cells]) for ingress in rated),
        capacity=float(sum(policy.tested_on(cell.instance_type) or cell.concurrency for cell in healthy)),
        queued=sum(queued(ingress.telemetry, window.deployment_id) for ingress in ingresses),
        to_cells_per_s=round(sum(one.local_per_s for one in _stored_counters(window).values()), 3),
    )
    before = samples_of(window)
    if before and sample.at - before[-1].at < SAMPLE_EVERY_S and sample.capacity == before[-1].capacity:
        return
    rows = recent_samples((*before, sample), sample.at)
    window.samples = [list(astuple(row)) for row in rows]


SETTINGS = AutopilotSettings()
WRITE_AGAIN = timedelta(seconds=9)
"""Of figures that are unchanged: each write is one more row for the publisher."""
SILENCE_BEGINS = timedelta(seconds=5)
"""Ingresses report every 2 s."""
SHIFTS_KEPT = 200
"""Per deployment: half an hour of continuous steps, or weeks of quiet operation."""
LEASE = "region-autopilot"
PASS_LIMIT_S = 10.0
"""A pass takes tens of milliseconds; after this time another worker may try."""
SHIFT_TONE = {
    ShiftKind.FIRST: Tone.IDLE,
    ShiftKind.ORDERED: Tone.MOVING,
    ShiftKind.RELIEF: Tone.WARN,
    ShiftKind.RETURN: Tone.OK,
    ShiftKind.STEP: Tone.MOVING,
}

WHILE_HELD = frozenset({ShiftKind.ORDERED, ShiftKind.RETURN})
"""Kinds of shifts that are applied during a hold."""

log = logging.getLogger(__name__)


def autopilot_run(
    *, now: datetime, recorder: Recorder | None = None, rest: Callable[[float], None] = lambda _: None
) -> list[str]:
    """Runs one pass over all deployments. Returns those whose shares changed; empty while another worker runs it.
    `recorder`: stores what was decided, after the lease is released. `rest` is called with the seconds for which no
    pass is needed, because there are no requests: the first ones, and changes of cells and ingresses, wake the
    loop."""
    with lease_during(name=LEASE, ttl_s=PASS_LIMIT_S, now=now) as is_ours:
        if not is_ours:
            return []
        overrides_expire(now=now)
        ingresses = ingress_views()
        windows = windows_update(ingresses, now=now)
        views = traffic_views(now, ingresses=ingresses, windows=windows)
        steered = [_steer_deployment(row, view, now) for row, view in views.values() if view.regions]
        unserved_check([view for _, view in views.values()], windows, ingresses, now=now)
    if recorder is not None and any(one.is_news for one in steered):
        recorder.record(_rounds(steered, now))
    moves = any(one.decision or one.view.overrides for one in steered)
    if not moves and all(map(_is_calm, windows)) and _all_report(ingresses, now):
        rest(REST_S)
    return [one.view.deployment for one in steered if one.moved]


def _is_calm(window: TrafficWindow) -> bool:
    return is_calm(samples_of(window))


def _all_report(ingresses: RegionIngresses, now: datetime) -> bool:
    """Silence of an ingress wakes nothing, so passes continue while there may be some."""
    ages = (now - one.seen_at if one.seen_at else None for there in ingresses.values() for one in there)
    return all(age is not None and age < SILENCE_BEGINS for age in ages)


@dataclass(frozen=True, slots=True)
class _Steered:
    """A deployment after a pass. `is_news`: its shares were to change, or began to be kept; `saved`: nothing else
    changed its row meanwhile."""

    view: TrafficView
    decision: Decision | None
    is_news: bool
    saved: bool

    @property
    def moved(self) -> bool:
        return self.saved and isinstance(self.decision, ShiftTraffic)


def _rounds(steered: Iterable[_Steered], now: datetime) -> Iterator[Round]:
    """One round, with the deployments for which the pass decided something."""
    news = [(one, one.decision) for one in steered if one.is_news and one.decision is not None]
    views = {one.view.deployment: one.view for one, _ in news}
    decisions = tuple(decision for _, decision in news)
    yield round_of(views, SETTINGS, decisions, tuple(one.saved for one, _ in news), now)


def _steer_deployment(row: TrafficMatrix, view: TrafficView, now: datetime) -> _Steered:
    decision = plan_shift(view, SETTINGS, now)
    is_news = isinstance(decision, ShiftTraffic) or (decision is not None and not row.held)
    held = decision.reason if isinstance(decision, KeepTable) else ""
    matrix = decision.matrix if isinstance(decision, ShiftTraffic) else view.in_force
    changes: dict[str, Any] = {"looked_at": now, "figures": figures_of(view, matrix, now)}
    if not held and row.held and isinstance(decision, ShiftTraffic) and decision.kind in WHILE_HELD:
        held = row.held  # the hold continues
    if decision is None and not row.held and changes["figures"] == row.figures and _is_fresh(row, now):
        return _Steered(view, decision, is_news, saved=True)
    with transaction.atomic():
        changes |= _hold_changes(row, view.deployment, held, now)
        if isinstance(decision, ShiftTraffic):
            changes |= {"shares": matrix, "moved_at": now, "revision": row.revision + 1}
        saved = _save_matrix(row, changes)
        if saved and isinstance(decision, ShiftTraffic):
            _record_shift(row.revision + 1, decision, now)
    return _Steered(view, decision, is_news, saved)


def _is_fresh(row: TrafficMatrix, now: datetime) -> bool:
    return row.looked_at is not None and now - row.looked_at < WRITE_AGAIN


def _save_matrix(row: TrafficMatrix, changes: dict[str, Any]) -> bool:
    """Compare-and-set on the revision that was read; the first row is created."""
    if row.looked_at is None:
        _, created = TrafficMatrix.objects.get_or_create(deployment_id=row.pk, defaults=changes)
        return created
    return TrafficMatrix.objects.filter(pk=row.pk, revision=row.revision).update(**changes) > 0


def _hold_changes(row: TrafficMatrix, deployment: str, held: str, now: datetime) -> dict[str, Any]:
    """Returns changed fields when a hold starts, continues or ends. Start and end are events."""
    if bool(held) != bool(row.held):
        event_record(
            kind="traffic.held" if held else "traffic.released",
            message=f"{deployment}: {f'keeping the last shares, {held}' if held else 'shares change again'}",
            now=now,
            deployment=deployment,
            tone=Tone.WARN if held else Tone.OK,
        )
        live.push("traffic")
        return {"held": held, "held_since": now if held else None}
    return {"held": held}


def _record_shift(revision: int, shift: ShiftTraffic, now: datetime) -> None:
    TrafficShift.objects.create(
        deployment_id=shift.deployment,
        revision=revision,
        kind=shift.kind.value,
        shares=shift.matrix,
        moved=shift.moved,
        reason=shift.reason,
        at=now,
    )
    TrafficShift.objects.filter(deployment_id=shift.deployment, revision__lte=revision - SHIFTS_KEPT).delete()
    event_record(
        kind="traffic.shift",
        message=f"{shift.deployment}: {shift.reason}",
        now=now,
        deployment=shift.deployment,
        tone=SHIFT_TONE[shift.kind],
        detail={"kind": shift.kind.value, "moved": round(shift.moved, 4), "revision": revision},
    )
    live.push("traffic")


def figures_of(view: TrafficView, matrix: Matrix, now: datetime) -> dict[str, Any]:
    """Returns measurements and expectations in concurrent requests: by region, and the demand that fits below no
    cap."""
    task = placement_problem(view, overrides_for(view.deployment, view.overrides, now))
    carried = loads(matrix, task.demand)
    regions = {
        one.name: {
            "demand": round(one.demand, 2),
            "capacity": one.capacity,
            "capacity_now": one.capacity_now,
            "load": round(carried.get(one.name, 0.0), 2),
        }
        for one in view.regions
    }
    unplaced = {origin: round(slots, 2) for origin, slots in place_demand(task).unplaced.items()}
    return {"regions": regions, "unplaced": unplaced, "utilisation_cap": view.policy.utilisation_cap}
