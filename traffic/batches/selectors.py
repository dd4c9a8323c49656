"""Reads files, batches, measured rates and the room that the plan of the day leaves to batches. It never writes.
Tenants see only their own files and batches (I15)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db.models import Count, F, OuterRef, Q, QuerySet, Subquery, Sum
from django.db.models.functions import Coalesce
from msgspec import convert

from engine_agent.protocol.load_messages import BatchLoad
from engine_agent.protocol.states import ServingClass
from fleet.autoscaling.models import ScalingState
from fleet.autoscaling.selectors import Place, place_plans
from fleet.capacity.planning.view import PlacePlan, batch_seconds, batch_time_s
from fleet.cells.models import CellMember
from fleet.deployments.models import Deployment
from fleet.load.selectors import load_in_short
from fleet.nodes.models import holds_since
from fleet.reconcile.planning.states import CellState
from traffic.batch_sinks.models import BatchDelivery
from traffic.batches.models import OPEN_STATES, Batch, BatchRange, StoredFile
from traffic.batches.planning.batch import BATCH_ID, RESERVE, STAMPS, BatchJob, BatchState, Tally, estimated_end
from traffic.batches.planning.pacing import AtRiskPolicy, PacedBatch, PaceStep
from traffic.files.planner import FILE_ID, FileFacts
from traffic.keys.models import ApplicationKey
from traffic.region_shares.selectors.traffic import traffic_policies
from traffic.routing.models import RoutingTable
from traffic.routing.selectors import UnreadableTable, table_message
from traffic.tenants.planner import unix_seconds


def stored_file_of(tenant: str, file_id: str, now: datetime) -> StoredFile | None:
    if not FILE_ID.fullmatch(file_id):
        return None
    return StoredFile.objects.filter(id=file_id, tenant=tenant, expires_at__gt=now).first()


def stored_files(tenant: str, now: datetime, purpose: str | None) -> "QuerySet[StoredFile]":
    rows = StoredFile.objects.filter(tenant=tenant, expires_at__gt=now)
    return rows.filter(purpose=purpose) if purpose else rows


def batch_files(batch: Batch, now: datetime) -> dict[str, StoredFile]:
    """Returns the results and errors that a batch has and that have not expired."""
    ids = {"results": batch.output_file_id, "errors": batch.error_file_id}
    rows = StoredFile.objects.filter(tenant=batch.tenant, expires_at__gt=now).in_bulk(
        [key for key in ids.values() if key]
    )
    return {name: rows[key] for name, key in ids.items() if key in rows}


def stored_of_tenant(tenant: str) -> tuple[int, int]:
    """Returns the number of a tenant's files and their bytes, from an index only."""
    totals = StoredFile.objects.filter(tenant=tenant).order_by().aggregate(n=Count("pk"), size=Sum("bytes"))
    return totals["n"], totals["size"] or 0


def file_facts(file: StoredFile) -> FileFacts:
    return FileFacts(file.id, file.bytes, file.filename, file.purpose, file.created_at, file.expires_at)


@dataclass(frozen=True)
class BatchBudgets:
    """`served` maps requested names to deployments; `line_s` is the seconds per line in a place, as requests took there
    without queueing. Places where that is unknown, or without a fresh plan, have no budget."""

    now: datetime
    plans: Mapping[Place, PlacePlan] = field(default_factory=dict)
    served: Mapping[str, str] = field(default_factory=dict)
    line_s: Mapping[Place, float] = field(default_factory=dict)

    def rate(self, region: str, model: str, until: datetime) -> float | None:
        """Returns the mean lines per second until then, or None if unknown."""
        within_s = (until - self.now).total_seconds()
        found = self._place_budget(region, model)
        if found is None or within_s <= 0:
            return None
        plan, line_s = found
        return batch_seconds(plan, self.now, within_s) / line_s / within_s

    def time_s(self, region: str, model: str, lines: int) -> float | None:
        """Returns the seconds in which these lines have room, with a reserve, or None if unknown."""
        found = self._place_budget(region, model)
        return batch_time_s(found[0], self.now, lines * found[1] / RESERVE) if found else None

    def _place_budget(self, region: str, model: str) -> tuple[PlacePlan, float] | None:
        place = (self.served.get(model, ""), region)
        plan, line_s = self.plans.get(place), self.line_s.get(place)
        return (plan, line_s) if plan is not None and plan.budget and line_s else None


def batch_budgets(now: datetime) -> BatchBudgets:
    """For all models: one query without a plan, four with one."""
    plans = place_plans(now)
    if not plans:
        return BatchBudgets(now)
    names = {name for name, _ in plans}
    rows = list(Deployment.objects.filter(name__in=names).select_related("model_version"))
    return BatchBudgets(now, plans, served_names(rows), line_times(names))


def served_names(deployments: Iterable[Deployment]) -> dict[str, str]:
    """Maps names to deployments: a deployment's own name outranks the name of its model."""
    rows = sorted(deployments, key=lambda row: row.name, reverse=True)
    return {row.model_version.model_id: row.name for row in rows} | {row.name: row.name for row in rows}


def line_times(deployments: Iterable[str]) -> dict[Place, float]:
    """Seconds per request without queueing, by place, as the autoscaler measured them."""
    rows = ScalingState.objects.filter(place__deployment__in=list(deployments)).select_related("place")
    found = {(row.place.deployment_id, row.place.region_id): row.load.get("service_s") for row in rows}
    return {place: float(seconds) for place, seconds in found.items() if seconds}


MEASURED_SINCE = timedelta(days=7)
HEARD_WITHIN = timedelta(seconds=15)
MEASURED_LINES = 50
"""A batch with fewer lines says nothing about its model's speed."""


def batch_of(tenant: str, batch_id: str) -> Batch | None:
    return Batch.objects.filter(id=batch_id, tenant=tenant).first() if BATCH_ID.fullmatch(batch_id) else None


def batches_of(tenant: str) -> "QuerySet[Batch]":
    return Batch.objects.filter(tenant=tenant)


def open_batches(tenant: str) -> int:
    return Batch.objects.filter(tenant=tenant, state__in=OPEN_STATES).count()


def tallies(batches: Iterable[Batch]) -> dict[str, Tally]:
    """Returns lines with an outcome, by batch; of open batches the sum over their ranges."""
    found = {batch.id: Tally(batch.completed, batch.failed, batch.input_tokens, batch.cached_tokens,
                             batch.output_tokens, batch.reasoning_tokens) for batch in batches}  # fmt: skip
    rows = BatchRange.objects.filter(batch__in=list(found)).order_by().values("batch")
    for row in rows.annotate(completed=Sum("completed"), failed=Sum("failed")):
        found[row["batch"]] = Tally(row["completed"], row["failed"])
    return found


def deliveries_of(batches: Iterable[Batch]) -> dict[str, list[dict[str, Any]]]:
    """Returns the deliveries to sinks by batch, in one query."""
    found: dict[str, list[dict[str, Any]]] = {batch.id: [] for batch in batches}
    for row in BatchDelivery.objects.filter(batch__in=list(found)).order_by("id"):
        shown = {"name": row.sink_id, "status": row.state, "lines": row.lines, "dead_letters": row.dead}
        found[str(row.batch_id)].append({**shown, "reason": row.reason or None})
    return found


def batch_json(
    batch: Batch, tally: Tally, *, now: datetime, deliveries: Iterable[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Returns OpenAI's object; times are Unix seconds. `switchyard` has fields beyond OpenAI's."""
    shown: dict[str, Any] = {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model or None,
        "errors": {"object": "list", "data": batch.errors} if batch.errors else None,
        "input_file_id": batch.input_file_id,  # always a text for OpenAI's client
        "completion_window": "24h",
        "status": batch.state,
        "output_file_id": batch.output_file_id or None,
        "error_file_id": batch.error_file_id or None,
        "created_at": unix_seconds(batch.created_at),
        "expires_at": unix_seconds(batch.expires_at),
    }
    shown |= {column: unix_seconds(getattr(batch, column)) for column in STAMPS.values()}
    remaining = batch.lines - tally.completed - tally.failed
    rate = _lines_per_s(batch, tally, now)
    return shown | {
        "request_counts": {
            "total": batch.lines if batch.in_progress_at else 0,
            "completed": tally.completed,
            "failed": tally.failed,
        },
        "usage": tally.usage_json(),
        "metadata": batch.metadata or None,
        "switchyard": {
            "completion_window": batch.window,
            "lines_by_model": batch.lines_by_model,
            "validated_lines": batch.validated_lines,
            "priority": batch.priority,
            "input_uri": batch.input_uri or None,
            "input_etag": batch.input_etag or None,
            "output_uri": batch.output_uri or None,
            "sinks": list(deliveries),
            "deadline_at_risk_at": unix_seconds(batch.at_risk_at),
            "warnings": _batch_warnings(batch),
            "serving_class": served_as(batch).value,
            "lines_per_s": round(rate, 3) if rate else None,
            "estimated_end_at": unix_seconds(estimated_end(remaining, rate, now)) if _is_in_progress(batch) else None,
        },
    }


def batch_jobs(now: datetime, rates: dict[str, float]) -> list[BatchJob]:
    """Returns models of batches with unleased lines. `rates` is by `region model`."""
    running = BatchRange.objects.filter(
        done=False, batch__state=BatchState.IN_PROGRESS.value, batch__expires_at__gt=now
    ).order_by()
    rows = running.values(
        "batch_id", "model", "batch__tenant", "batch__region_id", "batch__expires_at", "batch__priority"
    ).annotate(
        remaining=Sum(F("lines") - F("completed") - F("failed")),
        free=Count("pk", filter=Q(leased_until=None) | Q(leased_until__lte=now)),
    )
    budgets = batch_budgets(now)
    return [_batch_job(row, rates, budgets) for row in rows.filter(free__gt=0)]


def _batch_job(row: Mapping[str, Any], rates: dict[str, float], budgets: BatchBudgets) -> BatchJob:
    """Uses the rate that the plan of the day leaves until the deadline, or else the present one."""
    region, model, expires_at = row["batch__region_id"], row["model"], row["batch__expires_at"]
    planned = budgets.rate(region, model, expires_at)
    rate = rates.get(f"{region} {model}", 0.0) if planned is None else planned
    return BatchJob(
        row["batch_id"],
        row["batch__tenant"],
        region,
        model,
        row["remaining"],
        expires_at,
        row["batch__priority"],
        rate,
    )


@dataclass(frozen=True, slots=True)
class ModelWork:
    """Lines of a model of a batch without an outcome."""

    batch: Batch
    model: str
    remaining: int


def open_work(batches: Iterable[Batch]) -> list[ModelWork]:
    """Returns the lines without an outcome of open batches, by model; estimates while a batch is validated."""
    known = {batch.id: batch for batch in batches}
    rows = BatchRange.objects.filter(batch__in=list(known)).order_by().values("batch_id", "model")
    done = {
        (row["batch_id"], row["model"]): row["done"] for row in rows.annotate(done=Sum(F("completed") + F("failed")))
    }
    return [
        ModelWork(batch, model, max(0, lines - done.get((batch.id, model), 0)))
        for batch in known.values()
        for model, lines in batch.lines_by_model.items()
    ]


def measured_rate(region: str, model: str, now: datetime) -> float:
    """Returns the lines per second of a model in recent batches, from the slower half of them; 0 if unknown."""
    recent = Batch.objects.filter(
        region=region, lines_by_model__has_key=model, finalizing_at__gt=now - MEASURED_SINCE, lines__gte=MEASURED_LINES
    ).filter(state=BatchState.COMPLETED.value)
    rows = recent.order_by("-finalizing_at").values_list("lines_by_model", "in_progress_at", "finalizing_at")[:20]
    rates = sorted(
        models[model] / max((ended - began).total_seconds(), 1.0) for models, began, ended in rows if began and ended
    )
    return rates[(len(rates) - 1) // 2] if rates else 0.0


def lines_ahead(region: str, model: str) -> int:
    """Returns the lines without an outcome in all open batches of a model."""
    rows = Batch.objects.filter(region=region, lines_by_model__has_key=model, state__in=OPEN_STATES)
    return sum(work.remaining for work in open_work(rows) if work.model == model)


@dataclass(frozen=True, slots=True)
class BatchStanding:
    """Progress of a batch. `share` of its lines is 0 to 1; the rate covers its whole run, None before it."""

    completed: int
    failed: int
    lines_per_s: float | None
    estimated_end_at: datetime | None
    share: float

    @property
    def percent(self) -> int:
        return int(self.share * 100)


def batches_described() -> "QuerySet[Batch]":
    """Returns all batches, annotated with `ranges_completed` and `ranges_failed`."""
    totals = BatchRange.objects.filter(batch=OuterRef("pk")).order_by().values("batch")
    return Batch.objects.annotate(
        ranges_completed=Coalesce(Subquery(totals.annotate(n=Sum("completed")).values("n")), 0),
        ranges_failed=Coalesce(Subquery(totals.annotate(n=Sum("failed")).values("n")), 0),
    )


def batch_standing(batch: Batch, now: datetime) -> BatchStanding:
    tally = Tally(batch.completed + batch.ranges_completed, batch.failed + batch.ranges_failed)  # type: ignore[attr-defined]
    done = tally.completed + tally.failed
    rate = _lines_per_s(batch, tally, now)
    end_at = estimated_end(batch.lines - done, rate, now) if _is_in_progress(batch) else None
    share = done / batch.lines if batch.lines else 0.0
    return BatchStanding(tally.completed, tally.failed, round(rate, 3) if rate else None, end_at, share)


def batches_by_state() -> list[dict[str, Any]]:
    rows = Batch.objects.filter(state__in=OPEN_STATES).order_by().values("state")
    return [dict(row) for row in rows.annotate(n=Count("pk"))]


STEP_FIELDS = {PaceStep.RAISE: "raised_at", PaceStep.ASK: "cells_asked_at", PaceStep.TELL: "at_risk_at"}
"""Column with the time of each step."""


def batches_paced(now: datetime, rates: Mapping[str, float]) -> list[PacedBatch]:
    """Returns batches in progress with the policy of their model's deployment, or the installation's."""
    batches = list(Batch.objects.filter(state=BatchState.IN_PROGRESS.value, expires_at__gt=now))
    if not batches:
        return []
    done, policies = tallies(batches), _at_risk_policies({name for batch in batches for name in batch.lines_by_model})
    usual = AtRiskPolicy(settings.BATCH_AT_RISK)
    modest = set(
        ApplicationKey.objects.filter(
            prefix__in={batch.key for batch in batches}, serving_class=ServingClass.BATCH.value
        ).values_list("prefix", flat=True)
    )
    return [
        replace(
            _paced_batch(batch, done[batch.id], rates, now),
            policy=_strongest_policy((policies.get(name, usual) for name in batch.lines_by_model), usual),
            may_raise=batch.key not in modest,
        )
        for batch in batches
    ]


def _strongest_policy(policies: Iterable[AtRiskPolicy], usual: AtRiskPolicy) -> AtRiskPolicy:
    """Of a batch with several models: the policy that does most."""
    return max(policies, key=list(AtRiskPolicy).index, default=usual)


def _paced_batch(batch: Batch, done: Tally, rates: Mapping[str, float], now: datetime) -> PacedBatch:
    """The rate counts from the last step, to show whether that helped."""
    answered = done.completed + done.failed
    began_at = batch.in_progress_at or batch.created_at
    since = batch.paced_at or began_at
    seconds = (now - since).total_seconds()
    rate = max(0, answered - batch.paced_done) / seconds if seconds > 0 else 0.0
    of_late = sum(rates.get(f"{batch.region_id} {name}", 0.0) for name in batch.lines_by_model)
    return PacedBatch(
        id=batch.id,
        began_at=began_at,
        expires_at=batch.expires_at,
        remaining=batch.lines - answered,
        rate=rate if batch.paced_at else rate or of_late,
        taken=frozenset(step for step, field in STEP_FIELDS.items() if getattr(batch, field) is not None),
        since=since,
        done=answered,
    )


def _at_risk_policies(models: set[str]) -> dict[str, AtRiskPolicy]:
    stated = {
        name: policy.batch_at_risk for name, policy in traffic_policies().items() if policy.batch_at_risk is not None
    }
    if not stated:
        return {}
    served = served_names(Deployment.objects.select_related("model_version"))
    return {model: stated[served[model]] for model in models if served.get(model) in stated}


def _batch_warnings(batch: Batch) -> list[dict[str, Any]]:
    if batch.at_risk_at is None:
        return []
    message = "At its present rate the batch misses its deadline. Unfinished lines are reported as expired."
    return [{"code": "deadline_at_risk", "message": message}]


def served_as(batch: Batch) -> ServingClass:
    return ServingClass.NEAR_REALTIME if batch.raised_at else ServingClass.BATCH


def _is_in_progress(batch: Batch) -> bool:
    return batch.state == BatchState.IN_PROGRESS.value


def _lines_per_s(batch: Batch, tally: Tally, now: datetime) -> float:
    began, ended = batch.in_progress_at, batch.finalizing_at or batch.cancelling_at or now
    seconds = (ended - began).total_seconds() if began else 0.0
    return (tally.completed + tally.failed) / seconds if seconds > 0 else 0.0


def batch_loads(cells: Iterable[str], now: datetime) -> list[BatchLoad | None]:
    """Returns the recent batch load of these cells as leaders report it; None for a cell without a report."""
    names = list(cells)
    leaders = CellMember.objects.filter(holds_since(now - HEARD_WITHIN, "node__report__"), cell_id__in=names, rank=0)
    rows = leaders.values_list("cell_id", "node__report__cell", "node__report__load")
    heard = {cell: load_in_short(stored).batch for cell, reported, stored in rows if stored and reported == cell}
    return [heard.get(cell) for cell in names]


def batch_totals(now: datetime) -> dict[tuple[str, str], BatchLoad]:
    """Returns recent batch requests and windows of ready cells, by region and deployment."""
    leaders = CellMember.objects.filter(
        holds_since(now - HEARD_WITHIN, "node__report__"), rank=0, cell__state=CellState.READY.value
    ).filter(node__report__cell=F("cell_id"))
    found: dict[tuple[str, str], BatchLoad] = {}
    for region, deployment, stored in leaders.values_list(
        "cell__region_id", "cell__deployment_id", "node__report__load__batch"
    ):
        each = convert(stored or {}, BatchLoad)
        known = found.get((region, deployment), BatchLoad())
        found[region, deployment] = BatchLoad(
            known.running + each.running, known.waiting + each.waiting, known.window + each.window
        )
    return found


def ready_cells(region: str, model: str) -> list[str]:
    """Returns cells that take new requests for a model, by the newest table of its region; none if that is
    unreadable."""
    table = RoutingTable.objects.filter(region_id=region).order_by("-revision").first()
    if table is None:
        return []
    try:
        message = table_message(table)
    except UnreadableTable:
        return []
    split = {name for split in message.splits if split.model == model for name in split.shares}
    pools = [pool for pool in message.pools if model in pool.models or pool.name in split]
    return [cell.cell for pool in pools for cell in pool.cells if not cell.drain]
