"""Starts, updates and ends configuration searches, and records their trials. Each change is compare-and-set on the
state. It never measures; the process that does finds a cancellation at its next update."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.db import IntegrityError, transaction

from kernel import live
from kernel.events import event_record
from kernel.refusals import Conflict, InvalidInput
from kernel.tones import Tone
from models_registry.benchmarks.models import Benchmark, ConfigurationSearch, SearchCandidate, SearchTrial
from models_registry.benchmarks.planning.configuration_search import (
    CELLS,
    Cells,
    Choice,
    InvalidVaried,
    Searched,
    Standing,
    TooMany,
    Trial,
    cells_count,
    cells_of,
    choice_text,
    choices_of,
    is_apart,
    parse_varied,
    varied_columns,
)
from models_registry.benchmarks.planning.workload import BENCHMARK_OPEN, BENCHMARK_TONE, BenchmarkState
from models_registry.benchmarks.selectors import BenchmarkTarget, NoTarget, benchmark_target, candidate_rows
from models_registry.benchmarks.services.benchmark import (
    BenchmarkRequest,
    benchmark_cancel,
    benchmark_rules,
    readable_use,
)
from models_registry.instance_types.selectors import instance_shapes
from models_registry.versions.models import ModelVersion
from models_registry.versions.planning.engine_arguments import render_version
from models_registry.versions.planning.lifecycle import BrokenRule, VersionState, check_draft
from models_registry.versions.planning.roles import apart_objection
from models_registry.versions.planning.spec import InvalidVersion
from models_registry.versions.selectors import engine_allowances
from models_registry.versions.services.drafts import draft_delete, version_retire

MOST_TRIALS = 200
MOST_HOURS = 7 * 24.0
RUNNING = BenchmarkState.RUNNING.value


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """A requested search; see `ConfigurationSearch`. An empty `region` means the deployment's only one."""

    version: ModelVersion
    deployment: str
    varied: Mapping[str, Any]
    workload: str
    slo: str
    region: str = ""
    seed: int = 0
    rules: Mapping[str, Any] = field(default_factory=dict)
    most_trials: int = 40
    most_hours: float = 12.0


def search_start(asked: SearchRequest, *, actor: str, now: datetime) -> ConfigurationSearch:
    """Start a search around the version that a deployment serves. The deployment must have no other users: its versions
    are rolled out one by one, and finally the original one. Raises InvalidInput if an input cannot be read, no
    configuration is possible, or the deployment serves another version or several regions. Raises Conflict if the
    deployment has a running search."""
    request = BenchmarkRequest(asked.version, asked.deployment, asked.workload, asked.slo, asked.region)
    workload, slo = readable_use(request)
    benchmark_rules(asked.rules)
    _check_limits(asked)
    varied, choices = _varied(asked.varied)
    target = _target(asked)
    cells_before = _cells_before(target, is_varied=CELLS in varied)
    refused = {
        place: _too_many_cells(choice, cells_before) or _draft_objection(asked.version, choice, target.instance_type)
        for place, choice in enumerate(choices)
    }
    if all(refused.values()):
        message = f"none of {len(choices)} configurations is possible: {refused[0]}"
        raise InvalidInput(field="varied", rule="possible", message=message)
    try:
        with transaction.atomic():
            row = ConfigurationSearch.objects.create(
                version=asked.version, deployment=asked.deployment, region=target.region,
                instance_type=target.instance_type, workload=workload, slo=slo, seed=asked.seed,
                varied={name: list(values) for name, values in varied.items()}, rules=dict(asked.rules),
                cells_before=cells_before, most_trials=asked.most_trials, most_hours=asked.most_hours,
                reason=f"{len(choices)} configurations", actor=actor[:64], created_at=now, seen_at=now,
            )  # fmt: skip
            SearchCandidate.objects.bulk_create(
                SearchCandidate(
                    search=row, number=place + 1, choice=[list(pair) for pair in choice], refused=refused[place]
                )
                for place, choice in enumerate(choices)
            )
            _record(row, "started", f"{row} of {len(choices)} configurations requested by {actor}", now, actor)
    except IntegrityError:
        raise Conflict(f"a search of {asked.deployment} is running; cancel it or wait") from None
    return row


def _check_limits(asked: SearchRequest) -> None:
    for name, value, most in (
        ("most_trials", asked.most_trials, MOST_TRIALS),
        ("most_hours", asked.most_hours, MOST_HOURS),
    ):
        if not 0 < value <= most:
            message = f"{name} is {value:g}; it must be above 0 and at most {most:g}"
            raise InvalidInput(field=name, rule="range", message=message)


def _varied(stated: Mapping[str, Any]) -> tuple[dict[str, tuple[Any, ...]], tuple[Choice, ...]]:
    try:
        varied = parse_varied(stated)
        return varied, choices_of(varied)
    except (InvalidVaried, TooMany) as wrong:
        raise InvalidInput(field="varied", rule="readable", message=str(wrong)) from None


def _target(asked: SearchRequest) -> BenchmarkTarget:
    try:
        target = benchmark_target(asked.deployment, asked.region)
    except NoTarget as wrong:
        raise InvalidInput(field="deployment", rule="serves", message=str(wrong)) from None
    if target.version_id != asked.version.pk:
        message = f"{asked.deployment} does not serve {asked.version.reference}; name the version that it serves"
        raise InvalidInput(field="version", rule="serves", message=message)
    if len(target.regions) > 1:
        listed = ", ".join(target.regions)
        message = (
            f"{asked.deployment} has cells in {listed}, and a rollout changes all of them; use a deployment "
            "of one region"
        )
        raise InvalidInput(field="deployment", rule="alone", message=message)
    return target


def _cells_before(target: BenchmarkTarget, *, is_varied: bool) -> Cells | None:
    """The cells to restore at the end; None if they stay unchanged: they are mixed, or the load decides."""
    if not is_varied:
        return target.stated if target.split else None
    if target.stated is None:
        message = (
            f"cells are varied, but the number or roles of cells of {target.deployment} in {target.region} "
            "follow its load; state a number (switchyard scale) and roles=stated first"
        )
        raise InvalidInput(field="varied", rule="stated", message=message)
    return target.stated


def _too_many_cells(choice: Choice, before: Cells | None) -> str:
    """Why a configuration has more cells than its deployment; empty if it does not."""
    cells = cells_of(choice)
    if cells is None or before is None or cells_count(cells) <= cells_count(before):
        return ""
    return f"{choice_text(choice)} needs {cells_count(cells)} cells, but the deployment has {cells_count(before)}"


def _draft_objection(base: ModelVersion, choice: Choice, instance_type: str) -> str:
    """Why no draft can be made of a configuration; empty if one can."""
    spec, machine = (
        _changed_version(base, choice, instance_type).spec(engine_allowances()),
        instance_shapes()[instance_type],
    )
    try:
        check_draft(spec)
        render_version(spec, machine)
    except (BrokenRule, InvalidVersion) as wrong:
        return str(wrong)
    return apart_objection(spec, machine) if is_apart(choice) else ""


def _changed_version(base: ModelVersion, choice: Choice, instance_type: str) -> ModelVersion:
    """An unsaved copy of the base with the choice's changes."""
    copy = ModelVersion.objects.get(pk=base.pk)
    for name, value in choice_columns(base, choice, instance_type).items():
        setattr(copy, name, value)
    return copy


def choice_columns(base: ModelVersion, choice: Choice, instance_type: str) -> dict[str, Any]:
    return varied_columns(base.spec(), choice, instance_type)


def search_cancel(*, search_id: int, actor: str, now: datetime) -> ConfigurationSearch:
    """Cancel a search: measuring stops, and the deployment rolls back to its original version. Raises Conflict if it
    has ended, or is ending."""
    with transaction.atomic():
        row = ConfigurationSearch.objects.select_for_update().get(pk=search_id)
        if row.state != RUNNING or row.ends_as:
            raise Conflict(f"search {row.pk} is already {'ending' if row.state == RUNNING else row.state}")
        going = Benchmark.objects.filter(trial__candidate__search=row, state__in=[one.value for one in BENCHMARK_OPEN])
        for benchmark in going:
            benchmark_cancel(benchmark_id=benchmark.pk, actor=actor, now=now)
        row.ends_as, row.found, row.seen_at = BenchmarkState.CANCELLED.value, f"cancelled by {actor}", now
        row.save(update_fields=["ends_as", "found", "seen_at"])
        _record(row, "cancelled", f"{row} cancelled by {actor}", now, actor)
    return row


def search_note(row: ConfigurationSearch, reason: str, *, now: datetime) -> bool:
    """Store the current step. Returns False if the search has ended."""
    noted = ConfigurationSearch.objects.filter(pk=row.pk, state=RUNNING).update(reason=reason[:1000], seen_at=now)
    if noted and row.reason != reason:
        live.push("benchmarks", str(row.pk))
    return bool(noted)


def trial_begin(candidate: SearchCandidate, trial: Trial, *, now: datetime) -> SearchTrial:
    """Record the start of a trial. Idempotent."""
    row, _ = SearchTrial.objects.get_or_create(candidate=candidate, fidelity=trial.fidelity, defaults={"begun_at": now})
    live.push("benchmarks", str(candidate.search_id))
    return row


def trial_score(trial: SearchTrial, score: float) -> None:
    SearchTrial.objects.filter(pk=trial.pk, score=None).update(score=score)
    live.push("benchmarks", str(trial.candidate.search_id))


def candidate_refuse(candidate: SearchCandidate, why: str, *, now: datetime) -> None:
    """Mark a configuration that cannot be measured; its earlier scores no longer count."""
    with transaction.atomic():
        SearchCandidate.objects.filter(pk=candidate.pk).update(refused=why[:1000] or "it could not be measured")
        what = f"{candidate} ({choice_text(candidate.as_choice())}) cannot be measured: {why[:500]}"
        _record(candidate.search, "refused", what, now)


def search_found(row: ConfigurationSearch, found: Searched, best: SearchCandidate | None, *, now: datetime) -> None:
    """Store the result and start the rollback; measuring is over."""
    ends_as = BenchmarkState.DONE if best is not None else BenchmarkState.FAILED
    text = f"{choice_text(best.as_choice())}: {found.reason}" if best is not None else found.reason
    with transaction.atomic():
        rows = ConfigurationSearch.objects.filter(pk=row.pk, state=RUNNING, ends_as="")
        if rows.update(ends_as=ends_as.value, found=text, best=best, seen_at=now):
            _record(row, "found", f"{row}: {text}", now)


def search_end(row: ConfigurationSearch, note: str, *, now: datetime) -> None:
    """End the search once the deployment serves its original version; `note`: why it does not. Of the search's drafts
    only the best stays."""
    state = BenchmarkState(row.ends_as)
    with transaction.atomic():
        rows = ConfigurationSearch.objects.filter(pk=row.pk, state=RUNNING)
        if not rows.update(state=state.value, ended_at=now, seen_at=now):
            return
        kept = _retire_losers(row, now)
        reason = "; ".join(filter(None, (row.found, note, kept)))
        ConfigurationSearch.objects.filter(pk=row.pk).update(reason=reason[:1000])
        _record(row, str(state), f"{row} is {state}: {reason}", now)


def _retire_losers(row: ConfigurationSearch, now: datetime) -> str:
    """Retire the search's drafts except the best, each with its result; drafts that were never valid are deleted.
    Returns those that failed, with the reason."""
    rows = candidate_rows(row)
    best = next((one.candidate.version_id for one in rows if one.is_best), None)
    left = {row.version_id, best, None}
    kept = []
    for one in rows:
        version = one.candidate.version
        if version is None or version.pk in left:
            continue
        left.add(version.pk)
        why = "it was not measured" if one.standing is Standing.WAITING else one.reason
        try:
            if version.state == VersionState.DRAFT:
                draft_delete(version_id=version.pk, actor="switchyard", now=now)
            elif version.state == VersionState.VALIDATED:  # not one that was released meanwhile
                why = f"{row} ended without choosing it: {why}"
                version_retire(version_id=version.pk, why=why, actor="switchyard", now=now)
        except Conflict as used:
            kept.append(str(used))
    return "; ".join(kept)


def _record(row: ConfigurationSearch, what: str, message: str, now: datetime, actor: str = "switchyard") -> None:
    tones = {str(state): tone for state, tone in BENCHMARK_TONE.items()}
    event_record(
        kind=f"search.{what}",
        message=message,
        now=now,
        actor=actor[:64],
        deployment=row.deployment,
        region=row.region,
        detail={"search": row.pk, "version": row.version.reference},
        tone=tones.get(what, Tone.MOVING),
    )
    live.push("benchmarks", str(row.pk))
