"""Keeps the last minute of every deployment in every region: what arrives, what is worked on, what could be.

The tested capacity of a cell is its version's `max_concurrency`, the number of requests at once that the version was
measured with and that every ingress limits the cell to; an operator's `tested_concurrency` takes its place.
"""

from collections import defaultdict
from dataclasses import astuple
from datetime import datetime

import msgspec

from fleet.models import Deployment
from traffic.models import TrafficWindow
from traffic.planning.load_window import (
    IngressCounters,
    Sample,
    arrivals_per_s,
    in_service,
    ingress_counters,
    queued,
    recent_samples,
)
from traffic.planning.traffic_policy import TrafficPolicy
from traffic.selectors.steering import (
    UP,
    IngressView,
    ReadyCell,
    ingress_views,
    ready_cells,
    samples_of,
    traffic_policies,
)

SAMPLE_EVERY_S = 1.0
"""More often only when capacity has changed: wake-ups may arrive many times a second."""

RegionIngresses = dict[str, list[IngressView]]


def windows_update(*, now: datetime) -> None:
    """Add a sample to every window. Regions without an ingress have none: nothing arrives there, nothing is sent."""
    ingresses, policies = ingress_views(), traffic_policies()
    cells: dict[str, list[ReadyCell]] = defaultdict(list)
    for cell in ready_cells():
        cells[cell.deployment].append(cell)
    windows = {(row.deployment_id, row.region_id): row for row in TrafficWindow.objects.all()}
    changed = []
    for name in Deployment.objects.values_list("name", flat=True):
        there = {
            region: windows.get((name, region)) or TrafficWindow(deployment_id=name, region_id=region)
            for region in ingresses
        }
        _update_counters(there, ingresses, name)
        arrivals = arrivals_per_s({region: _stored_counters(window).values() for region, window in there.items()})
        for region, window in there.items():
            if any(ingress.seen_at is None for ingress in ingresses[region]):
                continue  # nobody knows what could be worked on there: no sample is better than one of nothing
            mine = [cell for cell in cells[name] if cell.region == region]
            _add_sample(window, ingresses[region], mine, arrivals[region], policies.get(name, TrafficPolicy()), now)
            changed.append(window)
    TrafficWindow.objects.bulk_create(
        changed, update_conflicts=True, unique_fields=["deployment", "region"], update_fields=["samples", "counters"]
    )


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
    # A cell that one of its region's ingresses cannot reach is not one to send more to.
    healthy = [cell for cell in cells if all(ingress.cells.get(cell.id) == UP for ingress in ingresses)]
    # Without a rate beside it, what is worked on would say that requests take for ever.
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
