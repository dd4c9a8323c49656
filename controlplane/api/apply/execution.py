"""Carries out a plan's steps in one transaction, through the same services as single actions. A preview does the same
and rolls back, so that it rejects exactly what applying would reject; predictions start from the state that it has
read. It never does more than the plan's steps."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import groupby
from typing import Any

from django.contrib.auth.models import User
from django.db import DatabaseError, connection, transaction

from accounts.models import Approval
from accounts.services.account_change import account_change
from accounts.services.user import HashedPassword, password_check
from controlplane.api.apply.planning import (
    ORDER,
    Action,
    Document,
    Kind,
    Objection,
    Plan,
    Step,
    plan_documents,
    revision_of,
)
from controlplane.api.apply.present import present_of
from controlplane.forecast_budget import require_time
from controlplane.what_if import HasTime, hourly_costs
from fleet.autoscaling.planning.policy import Cells
from fleet.deployments.models import Deployment
from fleet.deployments.services.deployments import (
    cells_stated,
    deployment_change,
    deployment_create,
    deployment_scale_or_request,
    deployments_change,
    deployments_scale_or_request,
)
from fleet.faults.planning.views import Rule, RuleMode
from fleet.faults.services.watch import fault_rule_set
from fleet.quotas.models import Quota
from fleet.quotas.services import quota_set
from fleet.reconcile.planning.snapshot import FleetView
from fleet.reconcile.selectors.snapshot import fleet_view
from fleet.regions.services import region_change, region_create
from fleet.rollouts.services import rollout_propose, rollout_start_or_request
from fleet.webhooks.services import webhook_change, webhook_create
from kernel.refusals import Conflict, InvalidInput
from models_registry.imports.services.imports import import_start
from models_registry.instance_types.services import instance_type_change, instance_type_create
from models_registry.versions.models import ModelVersion
from models_registry.versions.selectors import version_by_reference, version_stated
from models_registry.versions.services.drafts import draft_change, draft_create, model_change, model_create
from models_registry.versions.services.validation import validation_start
from traffic.batch_schedules.services.schedules import batch_schedule_change, batch_schedule_create
from traffic.batch_sinks.services.sinks import batch_sink_change, batch_sink_create
from traffic.region_shares.selectors.expected_load import ExpectedLoad, expected_load
from traffic.region_shares.services.overrides import traffic_policies_change, traffic_policy_change

APPLY_LOCK = 0x5357_4150
"""PostgreSQL advisory lock: one apply at a time."""


@dataclass(frozen=True, slots=True)
class Requester:
    """Who requested it, why, and when. `only_previews`: everything is rolled back, so nothing is hashed. `has_time`:
    whether a preview may continue."""

    actor: str
    why: str
    now: datetime
    only_previews: bool = False
    has_time: HasTime = lambda: True


@dataclass(frozen=True, slots=True)
class ApplyResult:
    """`waiting`: steps that a second admin must approve. `fleet` and `load`: the fleet and its expected load after the
    steps of a preview; None if they were not requested. `hourly_usd`: cost of the machines of each changed deployment
    after the steps, if requested."""

    plan: Plan
    revision: str
    waiting: tuple[Approval, ...]
    fleet: FleetView | None = None
    load: ExpectedLoad | None = None
    hourly_usd: Mapping[str, float | None] = field(default_factory=dict)


class NotPossible(Exception):
    """The documents break rules. Nothing was changed."""

    def __init__(self, objections: Sequence[Objection]) -> None:
        super().__init__("; ".join(objection.message for objection in objections))
        self.objections = tuple(objections)


def documents_preview(
    *,
    documents: Sequence[Document],
    requester: Requester,
    with_fleet: bool = True,
    with_load: bool = False,
    with_cost: bool = False,
    has_time: HasTime = lambda: True,
) -> ApplyResult:
    """Predict the result of applying these documents. Changes nothing. `with_fleet`: also read the fleet after the
    steps, which takes about a second in a large one; `with_load`: also its expected load then; `with_cost`: also the
    cost of the changed deployments. Raises NotPossible if documents break rules, and lists all violations. Raises
    Conflict if a document conflicts with the current state, InvalidInput if the steps take longer than `has_time`."""
    with transaction.atomic():
        try:
            outcome = _execute(documents, replace(requester, only_previews=True, has_time=has_time))
            if with_fleet:
                outcome = replace(outcome, fleet=fleet_view(now=requester.now))
            if with_load:
                outcome = replace(outcome, load=expected_load(requester.now))
            if with_cost:
                outcome = replace(outcome, hourly_usd=hourly_costs(outcome.plan.deployments, requester.now))
        finally:
            transaction.set_rollback(True)
    return outcome


def documents_apply(*, documents: Sequence[Document], requester: Requester, revision: str) -> ApplyResult:
    """Apply the missing changes in one transaction. `revision`: that of the reviewed plan; empty: there was none.
    Raises NotPossible if documents break rules, and lists all violations. Raises Conflict if the state has changed
    since the plan was made, or a document conflicts with it."""
    with transaction.atomic():
        _lock_deployments(documents)
        return _execute(documents, requester, revision)


def _lock_deployments(documents: Sequence[Document]) -> None:
    """Locks out other applies and changes of these deployments until the transaction ends."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [APPLY_LOCK])
    names = sorted({one.name for one in documents if one.kind in {Kind.DEPLOYMENT, Kind.TRAFFIC_POLICY}})
    list(Deployment.objects.select_for_update().filter(name__in=names).order_by("name"))


def _execute(documents: Sequence[Document], requester: Requester, revision: str = "") -> ApplyResult:
    present = present_of(documents)
    current = revision_of(present)
    if revision and revision != current:
        raise Conflict(
            "the objects of these documents have changed since the plan was made: the revision was "
            f"{revision} and is {current}; make a new plan and review it"
        )
    plan = plan_documents(documents, present)
    waiting = None if plan.objections else _run_together(plan.steps, requester)
    if waiting is None:
        waiting = _run_one_by_one(plan, requester)
    return ApplyResult(plan, current, tuple(waiting))


def _run_together(steps: Sequence[Step], requester: Requester) -> list[Approval] | None:
    """All steps within one savepoint, which saves two to eight queries a step. Returns None, and undoes all of them, if
    one fails."""
    if not steps:
        return []
    try:
        with transaction.atomic(), _one_savepoint():
            waiting: list[Approval] = []
            for several in _batches(steps):
                _require_time(steps, requester)
                waiting += _run_batch(several, requester)
            return None if transaction.get_rollback() else waiting
    except (InvalidInput, Conflict, DatabaseError):
        return None


def _batches(steps: Sequence[Step]) -> Iterator[list[Step]]:
    """The steps in their order, but first the changes of all deployments and then all scalings, so that each is one
    batch: the steps of one deployment do not depend on those of another."""

    def batch(step: Step) -> tuple[bool, int, int]:
        stage = _DEPLOYMENT_STAGES.get(step.action, 0) if step.document.kind is Kind.DEPLOYMENT else 0
        return step.action is Action.ROLL_OUT, ORDER[step.document.kind], stage

    for _, several in groupby(sorted(steps, key=batch), key=lambda step: (step.document.kind, step.action)):
        yield list(several)


_DEPLOYMENT_STAGES = {Action.CHANGE: 1, Action.SCALE: 2}


def _run_batch(steps: Sequence[Step], requester: Requester) -> list[Approval]:
    """Steps of one kind and action, together if there is a service for several."""
    by_name = {step.document.name: step.arguments for step in steps}
    actor, now = requester.actor, requester.now
    match steps[0].document.kind, steps[0].action:
        case Kind.DEPLOYMENT, Action.CHANGE:
            deployments_change(changes=by_name, actor=actor, now=now)
            return []
        case Kind.DEPLOYMENT, Action.SCALE:
            wanted = {name: _cells(arguments) for name, arguments in by_name.items()}
            scaled = deployments_scale_or_request(wanted=wanted, actor=actor, now=now)
            return [one for one in scaled.values() if isinstance(one, Approval)]
        case Kind.TRAFFIC_POLICY, Action.CHANGE:
            _check_deployments_exist(by_name)
            traffic_policies_change(stated=by_name, actor=actor, now=now)
            return []
    done = [_run(step, requester) for step in steps if _require_time(steps, requester)]
    return [one for one in done if one is not None]


def _require_time(steps: Sequence[Step], requester: Requester) -> bool:
    """Raises InvalidInput if a preview took too long, else returns True."""
    require_time(requester.has_time, "documents", f"a preview of {len(steps)} steps")
    return True


@contextmanager
def _one_savepoint() -> Iterator[None]:
    """Nested `atomic` blocks create no savepoints, as with a database that has none. After an error in one, only the
    block around this one can roll back."""
    connection.savepoint = lambda: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        del connection.savepoint


def _run_one_by_one(plan: Plan, requester: Requester) -> list[Approval]:
    """Each step within its own savepoint, to collect all errors. Raises NotPossible if there are any."""
    objections = list(plan.objections)
    waiting: list[Approval] = []
    for step in plan.steps:
        _require_time(plan.steps, requester)
        with _collect_errors(step, objections), transaction.atomic():
            done = _run(step, requester)
            waiting += [done] if done is not None else []
    if objections:
        raise NotPossible(objections)
    return waiting


def _run(step: Step, requester: Requester) -> Approval | None:
    return _SERVICES[step.document.kind, step.action](step, requester)


@contextmanager
def _collect_errors(step: Step, objections: list[Objection]) -> Iterator[None]:
    """Continues after an error, so that one response lists all errors."""
    try:
        yield
    except InvalidInput as wrong:
        objections.append(Objection(step.document, f"spec.{_document_field(wrong.field)}", wrong.rule, str(wrong)))
    except Conflict as conflict:
        objections.append(Objection(step.document, "", "conflict", str(conflict)))


def _document_field(field: str) -> str:
    """Services and documents use different names for some fields."""
    first, dot, rest = field.partition(".")
    return {"version": "model_version", "policy": "update_policy"}.get(first, first) + dot + rest


def _create_instance_type(step: Step, requester: Requester) -> None:
    instance_type_create(
        name=step.document.name, actor=requester.actor, now=requester.now, why=requester.why, **step.arguments
    )


def _change_instance_type(step: Step, requester: Requester) -> None:
    instance_type_change(
        name=step.document.name, actor=requester.actor, now=requester.now, why=requester.why, **step.arguments
    )


def _create_region(step: Step, requester: Requester) -> None:
    region_create(name=step.document.name, columns=step.arguments, actor=requester.actor, now=requester.now)


def _change_region(step: Step, requester: Requester) -> None:
    region_change(name=step.document.name, columns=step.arguments, actor=requester.actor, now=requester.now)


def _set_quota(step: Step, requester: Requester) -> None:
    team, _, place = step.document.name.partition(":")
    kind, _, region = place.partition(":")
    before = Quota.objects.filter(name=step.document.name).values("machines", "borrow_most").first()
    columns: dict[str, Any] = {**(before or {}), **step.arguments}
    quota_set(
        team=team, instance_type=kind, region=region, actor=requester.actor, now=requester.now, **columns
    )  # fmt: skip


def _create_model(step: Step, requester: Requester) -> None:
    description = step.arguments.get("description", "")
    model_create(name=step.document.name, description=description, actor=requester.actor, now=requester.now)


def _change_model(step: Step, requester: Requester) -> None:
    description = step.arguments["description"]
    model_change(name=step.document.name, description=description, actor=requester.actor, now=requester.now)


def _start_import(step: Step, requester: Requester) -> None:
    name = step.document.name
    if version_by_reference(ModelVersion.objects.all(), name) is not None:
        raise Conflict(f"model version {name} exists already; import it under another version")
    import_start(draft=name, actor=requester.actor, now=requester.now, **step.arguments)


def _create_version(step: Step, requester: Requester) -> None:
    model, _, version = step.document.name.partition("@")
    columns = {name: value for name, value in step.arguments.items() if name != "based_on"}
    based_on = step.arguments.get("based_on", "")
    draft_create(
        model=model, version=version, based_on=based_on, columns=columns, actor=requester.actor, now=requester.now
    )  # fmt: skip


def _change_version(step: Step, requester: Requester) -> None:
    version = version_by_reference(ModelVersion.objects.all(), step.document.name)
    if version is None:
        raise Conflict(f"{step.document.name} was deleted meanwhile")
    draft_change(version_id=version.pk, columns=step.arguments, actor=requester.actor, now=requester.now)


def _validate_version(step: Step, requester: Requester) -> None:
    version = version_stated(step.document.name, field="")
    validation_start(version_id=version.pk, actor=requester.actor, now=requester.now)


def _create_deployment(step: Step, requester: Requester) -> None:
    columns: dict[str, Any] = {name: value for name, value in step.arguments.items() if name != "regions"}
    cells = cells_stated(step.arguments["regions"])
    deployment_create(name=step.document.name, cells=cells, actor=requester.actor, now=requester.now, **columns)


def _change_deployment(step: Step, requester: Requester) -> None:
    deployment_change(name=step.document.name, actor=requester.actor, now=requester.now, **step.arguments)


def _scale(step: Step, requester: Requester) -> Approval | None:
    scaled = deployment_scale_or_request(
        name=step.document.name, cells=_cells(step.arguments), actor=requester.actor, now=requester.now
    )  # fmt: skip
    return scaled if isinstance(scaled, Approval) else None


def _cells(arguments: Mapping[str, Any]) -> dict[str, Cells]:
    stated: Mapping[str, Any] = arguments["regions"]
    return cells_stated({"region": region, "cells": cells} for region, cells in stated.items())


def _roll_out(step: Step, requester: Requester) -> Approval | None:
    proposal = rollout_propose(deployment=step.document.name, policy={}, **step.arguments)
    started = rollout_start_or_request(proposal=proposal, actor=requester.actor, now=requester.now, why=requester.why)
    return started if isinstance(started, Approval) else None


def _lay_down(step: Step, requester: Requester) -> None:
    _check_deployments_exist([step.document.name])
    traffic_policy_change(
        deployment=step.document.name, stated=step.arguments, actor=requester.actor, now=requester.now
    )


def _create_batch_sink(step: Step, requester: Requester) -> None:
    batch_sink_create(name=step.document.name, actor=requester.actor, now=requester.now, **step.arguments)


def _change_batch_sink(step: Step, requester: Requester) -> None:
    batch_sink_change(name=step.document.name, actor=requester.actor, now=requester.now, **step.arguments)


def _create_batch_schedule(step: Step, requester: Requester) -> None:
    batch_schedule_create(name=step.document.name, actor=requester.actor, now=requester.now, **step.arguments)


def _change_batch_schedule(step: Step, requester: Requester) -> None:
    batch_schedule_change(name=step.document.name, actor=requester.actor, now=requester.now, **step.arguments)


def _check_deployments_exist(names: Collection[str]) -> None:
    there = set(Deployment.objects.filter(name__in=names).values_list("name", flat=True))
    if unknown := next((name for name in names if name not in there), ""):
        message = f"deployment {unknown!r} does not exist; a traffic policy has the name of its deployment"
        raise InvalidInput(field="", rule="exists", message=message)


def _set_rule(step: Step, requester: Requester) -> None:
    mode = RuleMode(step.arguments["mode"])
    fault_rule_set(
        rule=Rule(step.document.name), mode=mode, actor=requester.actor, now=requester.now, why=requester.why
    )


def _change_account(change: str, requester: Requester, **fields: Any) -> Approval | None:
    made = account_change(change, actor=requester.actor, now=requester.now, why=requester.why, **fields)
    return made if isinstance(made, Approval) else None


def _create_group(step: Step, requester: Requester) -> Approval | None:
    return _change_account("create group", requester, name=step.document.name, **step.arguments)


def _change_group(step: Step, requester: Requester) -> Approval | None:
    return _change_account("change group", requester, name=step.document.name, **step.arguments)


def _create_user(step: Step, requester: Requester) -> Approval | None:
    fields = {name: value for name, value in step.arguments.items() if name != "active"}
    if password := fields.get("password"):
        fields["password"] = _password(password, step, requester)
    made = _change_account("create user", requester, username=step.document.name, **fields)
    if made is None and step.arguments.get("active") is False:
        return _change_account("change user", requester, username=step.document.name, active=False)
    return made


def _password(text: str, step: Step, requester: Requester) -> str:
    """The password, or in a preview a stand-in, because hashing takes a tenth of a second."""
    if not requester.only_previews:
        return text
    password_check(text, User(username=step.document.name, email=step.arguments.get("email", "")))
    return HashedPassword("preview")


def _change_user(step: Step, requester: Requester) -> Approval | None:
    if "password" in step.arguments:
        raise Conflict(f"{step.document.name} exists already; its page sets another password")
    return _change_account("change user", requester, username=step.document.name, **step.arguments)


def _set_identity_provider(step: Step, requester: Requester) -> Approval | None:
    return _change_account("set identity provider", requester, **step.arguments)


def _create_webhook(step: Step, requester: Requester) -> None:
    webhook_create(name=step.document.name, actor=requester.actor, now=requester.now, **step.arguments)


def _change_webhook(step: Step, requester: Requester) -> None:
    webhook_change(name=step.document.name, actor=requester.actor, now=requester.now, **step.arguments)


_SERVICES: Mapping[tuple[Kind, Action], Callable[[Step, Requester], Approval | None]] = {
    (Kind.INSTANCE_TYPE, Action.CREATE): _create_instance_type,
    (Kind.INSTANCE_TYPE, Action.CHANGE): _change_instance_type,
    (Kind.REGION, Action.CREATE): _create_region,
    (Kind.REGION, Action.CHANGE): _change_region,
    (Kind.QUOTA, Action.CREATE): _set_quota,
    (Kind.QUOTA, Action.CHANGE): _set_quota,
    (Kind.MODEL, Action.CREATE): _create_model,
    (Kind.MODEL, Action.CHANGE): _change_model,
    (Kind.MODEL_IMPORT, Action.CREATE): _start_import,
    (Kind.MODEL_VERSION, Action.CREATE): _create_version,
    (Kind.MODEL_VERSION, Action.CHANGE): _change_version,
    (Kind.MODEL_VERSION, Action.VALIDATE): _validate_version,
    (Kind.DEPLOYMENT, Action.CREATE): _create_deployment,
    (Kind.DEPLOYMENT, Action.CHANGE): _change_deployment,
    (Kind.DEPLOYMENT, Action.SCALE): _scale,
    (Kind.DEPLOYMENT, Action.ROLL_OUT): _roll_out,
    (Kind.TRAFFIC_POLICY, Action.CHANGE): _lay_down,
    (Kind.BATCH_SINK, Action.CREATE): _create_batch_sink,
    (Kind.BATCH_SINK, Action.CHANGE): _change_batch_sink,
    (Kind.BATCH_SCHEDULE, Action.CREATE): _create_batch_schedule,
    (Kind.BATCH_SCHEDULE, Action.CHANGE): _change_batch_schedule,
    (Kind.FAULT_RULE, Action.CHANGE): _set_rule,
    (Kind.GROUP, Action.CREATE): _create_group,
    (Kind.GROUP, Action.CHANGE): _change_group,
    (Kind.USER, Action.CREATE): _create_user,
    (Kind.USER, Action.CHANGE): _change_user,
    (Kind.IDENTITY_PROVIDER, Action.CHANGE): _set_identity_provider,
    (Kind.WEBHOOK, Action.CREATE): _create_webhook,
    (Kind.WEBHOOK, Action.CHANGE): _change_webhook,
}
