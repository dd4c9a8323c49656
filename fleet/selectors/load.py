"""The load of a cell as its proxy last measured it, and nothing that was measured for another cell or generation."""

from collections import Counter
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any

import msgspec
from django.db.models import F
from msgspec import convert, structs

from engine_agent.protocol.messages import BatchLoad, CacheLoad, HandoverLoad, Load, SpeculationLoad
from fleet.models import Cell, CellMember, NodeReport
from fleet.planning.states import CellState


@dataclass(frozen=True, slots=True)
class CellLoad:
    """Zeros and None while nothing was reported. `reported_at`: when the numbers came, to show their age."""

    in_flight: int = 0
    queued: int = 0
    tokens_per_s: float = 0.0
    ttft_p50_ms: float | None = None
    ttft_p99_ms: float | None = None
    itl_p50_ms: float | None = None
    itl_p99_ms: float | None = None
    batch: BatchLoad | None = None
    handovers: HandoverLoad | None = None
    cache: CacheLoad | None = None
    speculation: SpeculationLoad | None = None
    reported_at: datetime | None = None


_SHOWN = tuple(field.name for field in fields(CellLoad) if field.name != "reported_at")
"""What a reported load and the one that is shown have in common, by name."""


def load_stored(stored: dict[str, Any]) -> Load:
    """A reported load as it comes out of a JSON column, which has made text of the numbers of buckets."""
    return msgspec.convert(stored, Load, str_keys=True)


_SCALARS = tuple(field.name for field in structs.fields(Load) if field.default_factory is msgspec.NODEFAULT)


def load_in_short(stored: dict[str, Any]) -> Load:
    """A reported load without what it counts by bucket, class and tenant: lists of cells have no use for them."""
    return msgspec.convert({name: stored[name] for name in _SCALARS if name in stored}, Load)


def cell_load(cell: Cell) -> CellLoad:
    """What the leader's report states of this generation. No query after `cells_described`."""
    leader = next((member for member in cell.members.all() if member.rank == 0), None)
    report: NodeReport | None = getattr(leader.node, "report", None) if leader else None
    if report is None or report.load is None or (report.cell, report.generation) != (cell.id, cell.generation):
        return CellLoad()
    load = load_in_short(report.load)
    return CellLoad(**{name: getattr(load, name) for name in _SHOWN}, reported_at=report.last_seen_at)


# How well requests are sent by what cells have in their prefix caches, by region and deployment.

HEARD_WITHIN = timedelta(seconds=15)
"""As old as a report may be that counts."""


def cache_totals(now: datetime) -> dict[tuple[str, str], Counter[str]]:
    """Tokens of prompts, by region and deployment: what the leaders of ready cells reported of late. `asked`: of
    requests that were sent by a cell's list; `predicted` and `found`: of those; `other` and `other_found`: of all the
    rest."""
    leaders = CellMember.objects.filter(
        rank=0, cell__state=CellState.READY.value, node__report__last_seen_at__gt=now - HEARD_WITHIN
    ).filter(node__report__cell=F("cell_id"))
    totals: dict[tuple[str, str], Counter[str]] = {}
    for region, deployment, stored in leaders.values_list(
        "cell__region_id", "cell__deployment_id", "node__report__load__cache"
    ):
        each = convert(stored or {}, CacheLoad)
        totals.setdefault((region, deployment), Counter()).update(
            asked=each.asked_tokens_total,
            predicted=each.predicted_tokens_total,
            found=each.found_tokens_total,
            other=each.other_tokens_total,
            other_found=each.other_found_tokens_total,
        )
    return totals
