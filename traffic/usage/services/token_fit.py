"""Adds up the work that leaders report of their engines and fits token weights from it every hour. The sums are written
under the lease of usage counting."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db import transaction
from msgspec import ValidationError, convert
from msgspec.structs import asdict, astuple

from engine_agent.protocol.load_messages import CellWork
from fleet.cells.models import CellMember
from fleet.reconcile.planning.states import CellState
from traffic.usage.models import TokenFit, TokenWork, UsageMark
from traffic.usage.planning.prices import (
    FIT_DAYS,
    FittedWeights,
    TokenWeights,
    WorkSums,
    fit_tokens,
    sample,
    weights_of,
)
from traffic.usage.selectors.weights import token_prices

SOURCE = "work"
"""Source of marks about counted work of a node's engine."""
Place = tuple[str, str]
"""Version, instance type."""


@transaction.atomic
def token_work_count(*, now: datetime) -> int:
    """Adds new work of cell leaders. Returns the number of usable reports."""
    marks = {row.subject: row for row in UsageMark.objects.filter(source=SOURCE)}
    found: dict[tuple[str, str, str], WorkSums] = {}
    counted: list[UsageMark] = []
    for node, version, instance_type, totals in _reported_totals():
        before = marks.get(node)
        if before is not None and before.totals == asdict(totals):
            continue
        counted.append(UsageMark(source=SOURCE, subject=node, since="", at=now, totals=asdict(totals)))
        added = sample(CellWork(**before.totals), totals) if before is not None else None
        if added is not None:
            found[version, instance_type, node] = added
    UsageMark.objects.bulk_create(
        counted, update_conflicts=True, unique_fields=["source", "subject", "since"], update_fields=["totals", "at"]
    )
    _add_work(found, now)
    return len(found)


def token_fit_all(*, now: datetime) -> int:
    """Fits each version on each instance type from the last days, and deletes older ones. Returns the number of
    fits."""
    since = (now - timedelta(days=FIT_DAYS)).astimezone(UTC).date()
    TokenWork.objects.filter(day__lt=since).delete()
    of_places: dict[Place, dict[str, WorkSums]] = defaultdict(lambda: defaultdict(WorkSums))
    for row in TokenWork.objects.filter(day__gte=since).iterator(chunk_size=2000):
        of_places[row.version, row.instance_type][row.node] += row.work()
    listed = _listed_weights(now)
    fitted = {
        place: fit
        for place, nodes in of_places.items()
        if (fit := fit_tokens(nodes.values(), listed.get(place[0], weights_of(None)))) is not None
    }
    TokenFit.objects.bulk_create(
        [_fit_row(place, fit, now) for place, fit in sorted(fitted.items())],
        update_conflicts=True, unique_fields=["version", "instance_type"], update_fields=_FITTED,
    )  # fmt: skip
    return len(fitted)


_FITTED = [
    "prompt", "cached", "completion", "step_us", "sequence_us", "prompt_us", "cached_us", "sequences", "samples",
    "nodes", "error", "weight_error", "bounded", "fitted_at",
]  # fmt: skip


def _reported_totals() -> Iterable[tuple[str, str, str, CellWork]]:
    report = "node__report__"
    rows = (
        CellMember.objects.filter(rank=0, cell__state=CellState.READY.value)
        .filter(**{f"{report}connected": True, f"{report}load__work__isnull": False})
        .order_by("node_id")
        .values_list(
            "node_id", "node__instance_type_id", "cell_id", "cell__model_version__model_id",
            "cell__model_version__version", f"{report}cell", f"{report}load__work",
        )
    )  # fmt: skip
    for node, instance_type, cell, model, version, reported, work in rows:
        totals = _work_totals(work) if cell == reported else None
        if totals is not None:
            yield node, f"{model}@{version}", instance_type, totals


def _work_totals(work: Any) -> CellWork | None:
    """Totals of a report, or None if missing or implausible."""
    try:
        totals = convert(work, CellWork)
    except ValidationError:
        return None
    return totals if all(0 <= total < 2**62 for total in astuple(totals)) else None


def _add_work(found: Mapping[tuple[str, str, str], WorkSums], now: datetime) -> None:
    day = now.astimezone(UTC).date()
    nodes = [node for _, _, node in found]
    there = {
        (row.version, row.instance_type, row.node): row
        for row in TokenWork.objects.select_for_update().filter(day=day, node__in=nodes).order_by("id")
    }
    rows = []
    for place, work in sorted(found.items()):
        version, instance_type, node = place
        row = there.get(place) or TokenWork(version=version, instance_type=instance_type, node=node, day=day)
        row.take(row.work() + work)
        rows.append(row)
    TokenWork.objects.bulk_create(
        rows, update_conflicts=True, unique_fields=["version", "instance_type", "node", "day"],
        update_fields=["samples", "sums", "square", "steps", "completion_tokens"],
    )  # fmt: skip


def _listed_weights(now: datetime) -> dict[str, TokenWeights]:
    prices = token_prices(now)
    served = CellMember.objects.filter(rank=0).values_list(
        "cell__deployment_id", "cell__model_version__model_id", "cell__model_version__version"
    )
    return {
        f"{model}@{version}": weights_of(prices[deployment])
        for deployment, model, version in served.distinct().order_by("cell__deployment_id")
        if deployment in prices
    }


def _fit_row(place: Place, fitted: FittedWeights, now: datetime) -> TokenFit:
    weights, fit = fitted.weights, fitted.fit
    return TokenFit(
        version=place[0],
        instance_type=place[1],
        prompt=weights.prompt,
        cached=weights.cached,
        completion=weights.completion,
        step_us=fit.step_s * 1e6,
        sequence_us=fit.sequence_s * 1e6,
        prompt_us=fit.prompt_s * 1e6,
        cached_us=fit.cached_s * 1e6,
        sequences=fit.sequences,
        samples=fit.samples,
        nodes=fitted.nodes,
        error=fit.error,
        weight_error=fit.weight_error,
        bounded=fitted.is_bounded,
        fitted_at=now,
    )
