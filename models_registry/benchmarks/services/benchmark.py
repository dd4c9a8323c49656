"""Starts, updates and ends benchmarks. Each change is compare-and-set on the state, with its event in the same
transaction. It never measures; the process that does finds a cancellation at its next update."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any

from django.db import transaction

from kernel import live
from kernel.events import event_record
from kernel.refusals import Conflict, InvalidInput
from kernel.transitions import compare_and_set
from models_registry.benchmarks.models import Benchmark, BenchmarkPoint
from models_registry.benchmarks.planning.goodput import Found, GoodputRules
from models_registry.benchmarks.planning.measurements import Machines, histograms, point_figures
from models_registry.benchmarks.planning.workload import (
    BENCHMARK_OPEN,
    BENCHMARK_TONE,
    BenchmarkKey,
    BenchmarkState,
    InvalidWorkload,
    parse_slo,
    parse_workload,
    version_digest,
)
from models_registry.benchmarks.selectors import BenchmarkTarget, NoTarget, benchmark_target
from models_registry.benchmarks.services.load import MeasuredPoint
from models_registry.versions.models import ModelVersion

MOST_OPEN = 20
BOUNDS: Mapping[str, tuple[float, float]] = {
    "min_s": (1, 600),
    "min_requests": (20, 100_000),
    "p99_times": (0, 100),
    "most_s": (5, 3600),
    "warm_up_min_s": (0, 600),
    "most_points": (1, 40),
    "share": (0.5, 0.999),
}
"""Allowed range of each rule."""


def benchmark_rules(stated: Mapping[str, Any]) -> GoodputRules:
    """The default rules with the given changes. Raises InvalidInput for an unknown rule, or a value out of bounds."""
    usual = GoodputRules()
    for name, value in stated.items():
        if name not in BOUNDS:
            message = f"unknown rule {name!r}; the rules are {', '.join(BOUNDS)}"
            raise InvalidInput(field=f"rules.{name}", rule="choice", message=message)
        low, high = BOUNDS[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            message = f"rules.{name} is {value!r}; it must be a number from {low:g} to {high:g}"
            raise InvalidInput(field=f"rules.{name}", rule="range", message=message)
    return replace(usual, **{name: type(getattr(usual, name))(value) for name, value in stated.items()})


@dataclass(frozen=True, slots=True)
class BenchmarkRequest:
    """A requested measurement. An empty `region` means the deployment's only one. See `Benchmark`."""

    version: ModelVersion
    deployment: str
    workload: str
    slo: str
    region: str = ""
    seed: int = 0
    rules: Mapping[str, Any] = field(default_factory=dict)
    first_rate: float | None = None
    beside_traffic: bool = False


def benchmark_start(asked: BenchmarkRequest, *, actor: str, now: datetime) -> Benchmark:
    """Queue a benchmark of a deployment's cells. Raises InvalidInput if workload, objective or rules cannot be read, or
    another version runs there. Raises Conflict if too many are waiting."""
    workload, slo = readable_use(asked)
    region = _region_of(asked)
    benchmark_rules(asked.rules)
    if Benchmark.objects.filter(state__in=[state.value for state in BENCHMARK_OPEN]).count() >= MOST_OPEN:
        raise Conflict(f"{MOST_OPEN} benchmarks are waiting or running; cancel one or wait")
    with transaction.atomic():
        row = Benchmark.objects.create(
            version=asked.version,
            deployment=asked.deployment,
            region=region,
            workload=workload,
            slo=slo,
            seed=asked.seed,
            rules=dict(asked.rules),
            first_rate=asked.first_rate,
            beside_traffic=asked.beside_traffic,
            actor=actor[:64],
            created_at=now,
            reason="waits for earlier benchmarks",
        )
        _record(row, "queued", f"{row} requested by {actor}: {row.workload} within {row.slo}", now)
    return row


def readable_use(asked: BenchmarkRequest) -> tuple[str, str]:
    """Workload and objective in their stored form. Raises InvalidInput if one of them cannot be read."""
    try:
        return parse_workload(asked.workload).text, parse_slo(asked.slo).text
    except InvalidWorkload as wrong:
        field = "slo" if str(wrong).startswith("slo") else "workload"
        raise InvalidInput(field=field, rule="readable", message=str(wrong)) from None


def _region_of(asked: BenchmarkRequest) -> str:
    try:
        target = benchmark_target(asked.deployment, asked.region)
    except NoTarget as wrong:
        raise InvalidInput(field="deployment", rule="serves", message=str(wrong)) from None
    if target.version_id != asked.version.pk:
        serves = f"{asked.deployment} does not serve {asked.version.reference} in {target.region}"
        raise InvalidInput(
            field="version", rule="serves", message=f"{serves}; roll it out, or name the running version"
        )
    return target.region


def benchmark_cancel(*, benchmark_id: int, actor: str, now: datetime) -> Benchmark:
    """Cancel a benchmark that waits or runs; measured points are kept. Raises Conflict if it has ended."""
    with transaction.atomic():
        row = Benchmark.objects.select_for_update().get(pk=benchmark_id)
        if BenchmarkState(row.state) not in BENCHMARK_OPEN:
            raise Conflict(f"benchmark {row.pk} has ended: it is {row.state}")
        _end_benchmark(row, BenchmarkState.CANCELLED, f"cancelled by {actor}", now, actor=actor)
    row.refresh_from_db()
    return row


def benchmark_begin(row: Benchmark, target: BenchmarkTarget, statistics: Mapping[str, Any], now: datetime) -> bool:
    """Set its key and conditions from the current cells. Returns False if it was cancelled."""
    version = row.version
    key = BenchmarkKey(
        version_digest(version.spec(), target.instance_type),
        target.instance_type,
        target.fingerprint,
        row.parsed_workload().digest,
        row.slo,
        row.seed,
        target.split,
    )
    with transaction.atomic():
        return _change_state(
            row,
            BenchmarkState.RUNNING,
            f"measures {len(target.cells)} cells of {row.deployment} in {row.region}",
            now,
            started_at=now,
            key=key.digest,
            conditions=key.conditions,
            version_digest=key.version,
            instance_type=target.instance_type,
            fingerprint=target.fingerprint,
            split=target.split,
            statistics=dict(statistics),
            **asdict(target.machines),
        )


def benchmark_note(row: Benchmark, *, now: datetime, **columns: Any) -> bool:
    """Store the progress. Returns False if the benchmark has ended."""
    noted = Benchmark.objects.filter(pk=row.pk, state=BenchmarkState.RUNNING.value).update(seen_at=now, **columns)
    if noted:
        for name, value in columns.items():
            setattr(row, name, value)
        live.push("benchmarks", str(row.pk))
    return bool(noted)


def benchmark_point_add(row: Benchmark, point: MeasuredPoint, reason: str, now: datetime) -> bool:
    """Store a point permanently. Returns False if the benchmark has ended or already has this rate."""
    judged = point.judgement
    figures = point_figures(point.samples, point.span_s, row.parsed_slo(), row_machines(row))
    figures |= {
        "judged": judged.requests,
        "judged_inside": judged.inside,
        "share_low": round(judged.low, 5),
        "share_high": round(judged.high, 5),
        "is_early": judged.is_early,
        "is_proven": judged.is_proven,
    }
    with transaction.atomic():
        running = Benchmark.objects.select_for_update().filter(pk=row.pk, state=BenchmarkState.RUNNING.value)
        if not running.exists() or row.points.filter(rate=point.rate).exists():
            return False
        BenchmarkPoint.objects.create(
            benchmark=row,
            number=row.points.count() + 1,
            rate=point.rate,
            verdict=judged.verdict.value,
            reason=reason,
            figures=figures,
            histograms=histograms(point.samples),
            measured_at=now,
        )
    live.push("benchmarks", str(row.pk))
    return True


def benchmark_finish(row: Benchmark, found: Found, now: datetime) -> None:
    at_best = row.points.filter(rate=found.rate).first() if found.rate else None
    concurrency = at_best.figures.get("concurrency") if at_best else None
    with transaction.atomic():
        _end_benchmark(
            row,
            BenchmarkState.DONE,
            found.reason,
            now,
            goodput=found.rate or None,
            broke_at=found.broke_at,
            concurrency=concurrency / max(1, row.answering) if concurrency else None,
        )


def benchmark_fail(row: Benchmark, reason: str, now: datetime) -> None:
    with transaction.atomic():
        _end_benchmark(row, BenchmarkState.FAILED, reason[:1000], now)


def row_machines(row: Benchmark) -> Machines:
    return Machines(row.cells, row.chips, row.watts, row.price_per_hour)


def _end_benchmark(
    row: Benchmark, to: BenchmarkState, reason: str, now: datetime, *, actor: str = "switchyard", **columns: Any
) -> None:
    _change_state(row, to, reason, now, actor=actor, progress={}, ended_at=now, **columns)


def _change_state(
    row: Benchmark, to: BenchmarkState, reason: str, now: datetime, *, actor: str = "switchyard", **columns: Any
) -> bool:
    moved = compare_and_set(
        Benchmark.objects.filter(pk=row.pk, state=row.state),
        event={
            "kind": f"benchmark.{to}",
            "message": f"{row} is {to}: {reason}",
            "tone": BENCHMARK_TONE[to],
            "actor": actor[:64],
            "deployment": row.deployment,
            "region": row.region,
            "detail": {"benchmark": row.pk, "version": row.version.reference},
        },
        now=now,
        state=to.value,
        reason=reason,
        seen_at=now,
        **columns,
    )
    if moved:
        row.state = to.value
        for name, value in columns.items():
            setattr(row, name, value)
        live.push("benchmarks", str(row.pk))
    return moved


def _record(row: Benchmark, what: str, message: str, now: datetime) -> None:
    event_record(
        kind=f"benchmark.{what}",
        message=message,
        now=now,
        actor=row.actor,
        deployment=row.deployment,
        region=row.region,
        detail={"benchmark": row.pk, "version": row.version.reference},
    )
    live.push("benchmarks", str(row.pk))
