"""Advances configuration searches: a draft, its validation, a rollout, a benchmark, the next draft. All progress is in
the database, so any process may be killed and another continues. It never decides what to measure next; the planner
does."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

from asgiref.sync import sync_to_async
from django.db import DatabaseError, close_old_connections, transaction

from kernel import clock
from kernel.leases import lease_release, lease_take, this_holder
from kernel.refusals import Conflict, InvalidInput
from models_registry.benchmarks.models import Benchmark, ConfigurationSearch, SearchCandidate, SearchTrial
from models_registry.benchmarks.planning.configuration_search import Cells, Spent, Trial, cells_of, plan_search, without
from models_registry.benchmarks.planning.goodput import GoodputRules, rules_at
from models_registry.benchmarks.planning.workload import BENCHMARK_OPEN, BenchmarkState
from models_registry.benchmarks.selectors import (
    SearchView,
    ServeRequest,
    Serving,
    ServingState,
    benchmark_serve,
    search_view,
)
from models_registry.benchmarks.services.benchmark import BOUNDS, BenchmarkRequest, benchmark_start
from models_registry.benchmarks.services.configuration_search import (
    RUNNING,
    candidate_refuse,
    choice_columns,
    search_end,
    search_found,
    search_note,
    trial_begin,
    trial_score,
)
from models_registry.versions.models import ModelVersion
from models_registry.versions.planning.lifecycle import ValidationState, VersionState
from models_registry.versions.services.drafts import COLUMNS, draft_create
from models_registry.versions.services.validation import validation_start

LEASE = "configuration-search"
LEASE_TTL_S = 12.0
LOOK_EVERY_S = 5.0
STEPS_AT_ONCE = 20
SERVES_WITHIN = timedelta(hours=1)
"""Limit for validation and rollout of one configuration, and for the final rollback."""

log = logging.getLogger(__name__)


class SearchRunner:
    def __init__(self, now: Callable[[], datetime] = clock.now, look_every_s: float = LOOK_EVERY_S) -> None:
        self._now = now
        self._look_every_s = look_every_s
        self._holder = this_holder()

    async def run(self, stopping: asyncio.Event) -> None:
        """Advance searches until `stopping` is set."""
        while not stopping.is_set():
            try:
                await sync_to_async(self.step, thread_sensitive=True)()
            except DatabaseError as error:
                log.warning("the database does not respond: %s", error)
            except Exception:
                log.exception("a search failed; trying again")
            try:
                await asyncio.wait_for(stopping.wait(), self._look_every_s)
            except TimeoutError:
                continue
        await sync_to_async(self._release, thread_sensitive=True)()

    def step(self) -> None:
        """Advance every search as far as possible."""
        close_old_connections()
        running = list(ConfigurationSearch.objects.filter(state=RUNNING).select_related("version").order_by("id"))
        if not running or lease_take(name=LEASE, holder=self._holder, ttl_s=LEASE_TTL_S, now=self._now()) is None:
            return
        for row in running:
            for _ in range(STEPS_AT_ONCE):
                row.refresh_from_db()
                if row.state != RUNNING or not search_advance(row, now=self._now()):
                    break

    def _release(self) -> None:
        lease_release(name=LEASE, holder=self._holder, now=self._now())


def search_advance(row: ConfigurationSearch, *, now: datetime) -> bool:
    """One step. Returns False if the search has to wait."""
    if row.ends_as:
        return _restore(row, now)
    going = SearchTrial.objects.filter(candidate__search=row, candidate__refused="", score=None)
    trial = going.select_related("candidate__version", "candidate__search__version", "benchmark").first()
    if trial is not None:
        return _advance_trial(row, trial, now)
    return _next_trial(row, search_view(row), now)


def _next_trial(row: ConfigurationSearch, view: SearchView, now: datetime) -> bool:
    spent = Spent(view.trials, (now - row.created_at).total_seconds())
    step = plan_search(without(view.choices, view.refused), view.predicted, view.measured, row.limits(), spent)
    if isinstance(step, Trial):
        trial_begin(view.candidates[step.choice], step, now=now)
        search_note(row, step.reason, now=now)
        return True
    best = view.candidates[step.choice] if step.choice is not None else None
    search_found(row, step, best, now=now)
    return True


def _advance_trial(row: ConfigurationSearch, trial: SearchTrial, now: datetime) -> bool:
    candidate = trial.candidate
    if trial.benchmark is not None:
        return _follow(row, trial, trial.benchmark, now)
    try:
        version = candidate.version or _draft(row, candidate, now)
    except (InvalidInput, Conflict) as refused:
        candidate_refuse(candidate, str(refused), now=now)
        return True
    if version.state == VersionState.DRAFT:
        return _validate(row, trial, version, now)
    cells = cells_of(candidate.as_choice()) or row.cells_before
    serving = _serve(row, version, cells, since=trial.begun_at, now=now)
    if serving.state is ServingState.REFUSED:
        candidate_refuse(candidate, serving.reason, now=now)
        return True
    if serving.state is ServingState.MOVING:
        return _wait_for(row, trial, serving.reason, now)
    return _measure(row, trial, version, now)


def _draft(row: ConfigurationSearch, candidate: SearchCandidate, now: datetime) -> ModelVersion:
    columns = choice_columns(row.version, candidate.as_choice(), row.instance_type)
    with transaction.atomic():  # an unrecorded draft would block the next process
        version = _existing_version(row, columns) or draft_create(
            model=row.version.model_id,
            version=f"{row.version.version[:40]}-s{row.pk}-{candidate.number}",
            based_on=row.version.reference,
            columns=columns,
            actor=row.actor,
            now=now,
        )
        SearchCandidate.objects.filter(pk=candidate.pk).update(version=version)
    return version


def _existing_version(row: ConfigurationSearch, columns: Mapping[str, Any]) -> ModelVersion | None:
    """A version with this configuration that exists already: the base, or a draft of the search that was measured with
    another number of cells."""
    if not columns:
        return row.version
    made = row.candidates.exclude(version=None).select_related("version")
    wanted = {name: columns.get(name, getattr(row.version, name)) for name in COLUMNS}
    known = (one.version for one in made if one.version is not None)
    return next((one for one in known if all(getattr(one, name) == value for name, value in wanted.items())), None)


def _validate(row: ConfigurationSearch, trial: SearchTrial, version: ModelVersion, now: datetime) -> bool:
    last = version.validations.order_by("-id").first()
    if last is None:
        validation_start(version_id=version.pk, actor=row.actor, now=now)
    elif last.state == ValidationState.FAILED:
        candidate_refuse(trial.candidate, f"{version.reference} is not valid: {last.reason}", now=now)
        return True
    return _wait_for(row, trial, f"{version.reference} is being validated", now)


def _serve(
    row: ConfigurationSearch, version: ModelVersion, cells: Cells | None, *, since: datetime, now: datetime
) -> Serving:
    return benchmark_serve(ServeRequest(row.deployment, row.region, version.reference, row.actor, since, now, cells))


def _measure(row: ConfigurationSearch, trial: SearchTrial, version: ModelVersion, now: datetime) -> bool:
    before = Benchmark.objects.filter(trial__candidate__search=row, goodput__isnull=False).order_by("-pk")
    like = before.filter(trial__candidate=trial.candidate).first() or before.first()
    usual = GoodputRules()
    rules = rules_at(trial.fidelity, {**{name: getattr(usual, name) for name in BOUNDS}, **row.rules}, BOUNDS)
    asked = BenchmarkRequest(
        version, row.deployment, row.workload, row.slo, row.region, row.seed, rules, like.goodput if like else None
    )
    try:
        with transaction.atomic():
            benchmark = benchmark_start(asked, actor=row.actor, now=now)
            SearchTrial.objects.filter(pk=trial.pk, benchmark=None).update(benchmark=benchmark)
    except Conflict as busy:
        return _wait(row, str(busy), now)
    except InvalidInput as refused:
        candidate_refuse(trial.candidate, str(refused), now=now)
    return True


def _follow(row: ConfigurationSearch, trial: SearchTrial, benchmark: Benchmark, now: datetime) -> bool:
    state = BenchmarkState(benchmark.state)
    if state in BENCHMARK_OPEN:
        return _wait(row, f"{trial}: {benchmark.reason}", now)
    if state is BenchmarkState.DONE:
        trial_score(trial, (benchmark.goodput or 0.0) / max(1, benchmark.chips))
    else:
        candidate_refuse(trial.candidate, f"benchmark {benchmark.pk} is {state}: {benchmark.reason}", now=now)
    return True


def _restore(row: ConfigurationSearch, now: datetime) -> bool:
    """Roll the deployment back to its original version, and end the search."""
    serving = _serve(row, row.version, row.cells_before, since=row.seen_at, now=now)
    if serving.state is ServingState.MOVING and now - row.seen_at <= SERVES_WITHIN:
        reason = f"{row.found}; {serving.reason}"
        ConfigurationSearch.objects.filter(pk=row.pk, state=RUNNING).update(reason=reason[:1000])
        return False
    note = f"the deployment does not serve {row.version.reference} again: {serving.reason}"
    search_end(row, "" if serving.state is ServingState.SERVES else note, now=now)
    return False


def _wait_for(row: ConfigurationSearch, trial: SearchTrial, reason: str, now: datetime) -> bool:
    if now - trial.begun_at > SERVES_WITHIN:
        candidate_refuse(trial.candidate, f"it was not served within an hour: {reason}", now=now)
        return True
    return _wait(row, f"{trial}: {reason}", now)


def _wait(row: ConfigurationSearch, reason: str, now: datetime) -> bool:
    search_note(row, reason, now=now)
    return False
