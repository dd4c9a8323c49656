"""Benchmarks as readers see them, and what they say together."""

from collections.abc import Mapping
from typing import Any

from django.db.models import Prefetch, Q, QuerySet

from models_registry.models import Benchmark, BenchmarkPoint, ModelVersion
from models_registry.planning.benchmark import BenchmarkState, ComparedGoodput, version_digest
from models_registry.planning.best_configuration import Measured

COMPARED = 200
"""Benchmarks of one use that are looked at, the newest."""


def benchmarks_described() -> QuerySet[Benchmark]:
    """Benchmarks with their versions and points, without histograms: two queries."""
    points = BenchmarkPoint.objects.order_by("rate").defer("histograms")
    return Benchmark.objects.select_related("version").prefetch_related(Prefetch("points", queryset=points))


def benchmarks_of_use(workload: str, slo: str, instance_type: str = "") -> list[Benchmark]:
    """Done ones of this workload and objective, newest first, without those that a search measured for less than their
    length; sentences as they are stored."""
    rows = whole_benchmarks(benchmarks_described()).filter(state=BenchmarkState.DONE.value, workload=workload, slo=slo)
    return list((rows.filter(instance_type=instance_type) if instance_type else rows)[:COMPARED])


def whole_benchmarks(rows: QuerySet[Benchmark]) -> QuerySet[Benchmark]:
    """Those whose points had their whole length."""
    return rows.filter(Q(trial=None) | Q(trial__fidelity__gte=1))


def measured_of(row: Benchmark) -> Measured | None:
    """What a benchmark of `benchmarks_described` found; None if no rate held."""
    figures = figures_at_goodput(row)
    if not row.goodput or figures is None:
        return None
    chips = max(1, row.chips)
    return Measured(
        benchmark=row.pk,
        version=row.version.reference,
        instance_type=row.instance_type,
        split=row.split,
        goodput_per_chip=row.goodput / chips,
        tokens_per_s_per_chip=figures["tokens_per_s"] / chips,
        tokens_per_s_per_user=figures["tokens_per_s_per_user"],
        dollars_per_mtoken=figures["dollars_per_mtoken"],
        joules_per_token=figures["joules_per_token"],
    )


def figures_at_goodput(row: Benchmark) -> Mapping[str, Any] | None:
    """The numbers at the highest rate that held."""
    return next((point.figures for point in row.points.all() if point.rate == row.goodput), None)


def goodput_compared(before: ModelVersion, after: ModelVersion, instance_type: str) -> tuple[ComparedGoodput, ...]:
    """All conditions under which both were measured as they are now, by the newest benchmark of each: one query. None
    where one of them is not served."""
    if any(instance_type not in version.parallelism for version in (before, after)):
        return ()
    versions = {version.pk: version_digest(version.spec(), instance_type) for version in (before, after)}
    rows = (
        whole_benchmarks(Benchmark.objects.all())
        .filter(version_id__in=versions, state=BenchmarkState.DONE.value, instance_type=instance_type)
        .order_by("id")
    )
    found: dict[str, dict[int, Benchmark]] = {}
    for row in rows:
        if row.version_digest == versions[row.version_id]:
            found.setdefault(row.conditions, {})[row.version_id] = row
    pairs = (of for of in found.values() if len(of) == len(versions))
    return tuple(
        ComparedGoodput(
            f"{of[after.pk].workload} within {of[after.pk].slo}", _a_cell(of[before.pk]), _a_cell(of[after.pk])
        )
        for of in pairs
    )


def _a_cell(row: Benchmark) -> float:
    return (row.goodput or 0.0) / max(1, row.cells)
