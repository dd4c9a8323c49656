"""Creates, edits, releases, retires and deletes models and versions, and admits engine options beyond the lists
(admins, with a reason, and a second approval if required). Each field of a draft must be valid on its own. A version
that is no longer a draft never changes again except for its state. Changes hold the version's row lock while they check
its users; new users take the same lock."""

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from django.db import IntegrityError, transaction

from accounts.models import Approval
from accounts.services.approval import ApprovalRequest, FleetAction, approval_request, requires_approval
from engine_agent.protocol.engine_options import is_agents_own, option_name, refused_option, refused_variable
from kernel import live
from kernel.events import event_record
from kernel.refusals import Conflict, InvalidInput
from kernel.tones import Tone
from kernel.transitions import compare_and_set
from models_registry.builds.selectors import wrong_build
from models_registry.instance_types.planner import InstanceShape, unknown_type_text
from models_registry.versions.models import EngineAllowance, Model, ModelVersion
from models_registry.versions.planning.engine_arguments import ENGINES, check_engine_options, render_version
from models_registry.versions.planning.lifecycle import (
    VERSION_TONE,
    BrokenRule,
    VersionState,
    check_draft,
    may_be_rolled_out,
    states_before,
)
from models_registry.versions.planning.spec import InvalidVersion, one_of
from models_registry.versions.selectors import engine_allowances, version_stated, version_uses

COLUMNS = (
    "engine", "engine_build", "artifact_uri", "artifact_digest", "context_length", "max_concurrency", "ready_timeout_s",
    "parallelism", "engine_options", "engine_env", "golden_prompts", "golden_waiver", "attention_heads", "kv_heads",
    "layers", "speculation", "quantization", "adapters", "roles", "by_type", "modalities",
)  # fmt: skip
"""Columns that a draft states; the registry sets all others."""


def model_create(*, name: str, description: str, actor: str, now: datetime) -> Model:
    """Create a model without versions. Raises Conflict if the name is taken."""
    try:
        with transaction.atomic():
            model = Model.objects.create(name=name, description=description, created_at=now)
            event_record(kind="model.created", message=f"{name} created by {actor}", now=now, actor=actor)
            live.push("models", name)
    except IntegrityError:
        raise Conflict(f"model {name!r} already exists") from None
    return model


def model_change(*, name: str, description: str, actor: str, now: datetime) -> Model:
    """Change the description of a model. Raises InvalidInput if the model does not exist."""
    with transaction.atomic():
        model = Model.objects.select_for_update().filter(name=name).first()
        if model is None:
            raise InvalidInput(field="name", rule="exists", message=f"model {name!r} does not exist; create it first")
        if model.description != description:
            model.description = description
            model.save(update_fields=["description"])
            event_record(
                kind="model.changed", message=f"description of {name} changed by {actor}", now=now, actor=actor
            )
            live.push("models", name)
    return model


def model_delete(*, name: str, actor: str, now: datetime) -> None:
    """Delete a model. Raises Conflict if it has versions."""
    with transaction.atomic():
        model = Model.objects.select_for_update().get(name=name)
        if versions := model.versions.count():
            raise Conflict(
                f"model {name} has {versions} versions; delete its drafts; other versions can only be retired"
            )
        model.delete()
        event_record(kind="model.deleted", message=f"{name} deleted by {actor}", now=now, actor=actor)
        live.push("models", name)


def draft_create(
    *, model: str, version: str, based_on: str, columns: Mapping[str, Any], actor: str, now: datetime
) -> ModelVersion:
    """Create a draft. Omitted columns come from the version `based_on` (`model@version`), if given. Raises InvalidInput
    for an unknown model or version, or a field that breaks a rule. Raises Conflict if the model has a version of this
    name."""
    if not Model.objects.filter(name=model).exists():
        raise InvalidInput(field="model", rule="exists", message=f"model {model!r} does not exist; create it first")
    made = ModelVersion(model_id=model, version=version, created_at=now, state_since=now)
    _set(made, {**_columns_of(based_on), **columns})
    made.reason = f"drafted by {actor}" + (f" from {based_on}" if based_on else "")
    try:
        with transaction.atomic():
            made.save(force_insert=True)
            _record(made, "drafted", actor=actor, now=now)
    except IntegrityError:
        raise Conflict(f"{model} already has a version {version!r}; names of versions are never reused") from None
    return made


def draft_change(
    *, version_id: int, columns: Mapping[str, Any], actor: str, now: datetime, revision: int | None = None
) -> ModelVersion:
    """Change a draft. `revision`: the one that the caller has read; rejected if it is not the current one. Raises
    InvalidInput for a field that breaks a rule. Raises Conflict if it is no longer a draft, is in use, or has changed
    since."""
    with transaction.atomic():
        row = draft_locked(version_id, "change")
        if revision is not None and revision != row.revision:
            raise Conflict(f"{row.reference} is at revision {row.revision}, not {revision}; read it again")
        changed = {name: value for name, value in columns.items() if getattr(row, name) != value}
        if not changed:
            return row
        _set(row, changed)
        row.revision += 1
        row.reason = f"changed by {actor}: {', '.join(changed)}"
        row.save(update_fields=[*changed, "revision", "reason"])
        _record(row, "changed", actor=actor, now=now, fields=sorted(changed))
    return row


def draft_delete(*, version_id: int, actor: str, now: datetime) -> None:
    """Delete a draft with its validations; only drafts are ever deleted. Raises Conflict if it is no longer a draft, or
    is in use."""
    with transaction.atomic():
        row = draft_locked(version_id, "delete")
        _record(row, "deleted", actor=actor, now=now)
        row.delete()


def draft_locked(version_id: int, action: str) -> ModelVersion:
    """The draft, locked until the transaction ends, so that it gets no new users. Raises Conflict if it was deleted, is
    no longer a draft, or is in use."""
    row = ModelVersion.objects.select_for_update().filter(pk=version_id).first()
    if row is None:
        raise Conflict("the version was deleted meanwhile")
    if row.state != VersionState.DRAFT:
        raise Conflict(f"{row.reference} is {row.state}; only a draft can be {action}d: base a new version on it")
    refuse_if_used(row, action)
    return row


def refuse_if_used(row: ModelVersion, action: str) -> None:
    """Requires the version's lock. Raises Conflict if it is in use; the text names its users."""
    if uses := version_uses(row.pk):
        raise Conflict(f"{row.reference} is in use by {', '.join(uses)}; it cannot be {action}d")


def _columns_of(reference: str) -> dict[str, Any]:
    if not reference:
        return {}
    row = version_stated(reference, field="based_on")
    return {name: getattr(row, name) for name in COLUMNS}


def _set(row: ModelVersion, columns: Mapping[str, Any]) -> None:
    for name, value in columns.items():
        setattr(row, name, value)
    spec = row.spec(engine_allowances())
    try:
        check_draft(spec)
    except BrokenRule as broken:
        raise InvalidInput(field=broken.field, rule=broken.rule, message=broken.message) from None
    if wrong := wrong_build(spec):
        raise InvalidInput(field="engine_build", rule="exists", message=wrong)


def _record(row: ModelVersion, what: str, *, actor: str, now: datetime, **detail: Any) -> None:
    event_record(
        kind=f"version.{what}",
        message=f"{row.reference} {what} by {actor}",
        tone=Tone.IDLE,
        now=now,
        actor=actor,
        detail={"version": row.reference, **detail},
    )
    live.push("models", row.reference)


def version_register(
    *, model: Model, version: str, machines: Mapping[str, InstanceShape], now: datetime, **columns: Any
) -> ModelVersion:
    """Store a version, with a name that is unused in the model, after rendering it for every instance type that it
    names. `machines`: existing instance types by name. `columns`: the other columns of `ModelVersion`. Raises
    InvalidVersion if it names no instance type or an unknown one, cannot be rendered, or has a disallowed option; the
    text names field, value and rule."""
    made = ModelVersion(model=model, version=version, created_at=now, **columns)
    spec = made.spec(engine_allowances())
    if not spec.parallelism:
        raise InvalidVersion(f"{spec.reference}: parallelism is empty; it must name an instance type")
    for name in spec.parallelism:
        if name not in machines:
            raise InvalidVersion(f"{spec.reference}: parallelism: {unknown_type_text(name, machines)}")
        check_engine_options(spec, name)
        render_version(spec, machines[name])
    made.save(force_insert=True)
    return made


def version_release(*, version_id: int, why: str, actor: str, now: datetime) -> ModelVersion:
    """Release a validated version, so that it can be rolled out. Raises InvalidInput if no reason is given. Raises
    Conflict if it is not validated, or another request was faster."""
    return _change_state(version_id, VersionState.RELEASED, "release", why, actor, now)


def version_retire(*, version_id: int, why: str, actor: str, now: datetime) -> ModelVersion:
    """Retire a version permanently. Raises InvalidInput if no reason is given. Raises Conflict if it is neither
    validated nor released, or in use, or another request was faster."""
    return _change_state(version_id, VersionState.RETIRED, "retire", why, actor, now)


def version_lock(*, version_id: int, allow_unreleased: bool) -> ModelVersion:
    """Lock a version for a new use until the transaction ends, so that it cannot be retired meanwhile. Raises Conflict
    if it is not released, or not even validated if `allow_unreleased`."""
    row = ModelVersion.objects.select_for_update().get(pk=version_id)
    if not may_be_rolled_out(VersionState(row.state), allow_unreleased=allow_unreleased):
        raise Conflict(f"{row.reference} is {row.state} now; it cannot be rolled out")
    return row


def _change_state(version_id: int, to: VersionState, action: str, why: str, actor: str, now: datetime) -> ModelVersion:
    if not why.strip():
        raise InvalidInput(field="why", rule="required", message=f"Give a reason: why should the version be {to}?")
    with transaction.atomic():
        row = ModelVersion.objects.select_for_update().get(pk=version_id)
        seen = VersionState(row.state)
        if seen not in states_before(to):
            needed = " or ".join(sorted(states_before(to)))
            raise Conflict(f"{row.reference} is {seen}; {action} needs one that is {needed}")
        if to is VersionState.RETIRED:
            refuse_if_used(row, action)
        reason = f"{to} by {actor}: {why.strip()}"
        version_move(row, to, reason=reason, actor=actor, now=now)
    row.refresh_from_db()
    return row


def version_move(
    row: ModelVersion, to: VersionState, *, reason: str, actor: str, now: datetime, **columns: object
) -> bool:
    """Compare and set the state of the version, with its event. Returns False if it has changed since it was read."""
    moved = compare_and_set(
        ModelVersion.objects.filter(pk=row.pk, state=row.state, revision=row.revision),
        event={
            "kind": f"version.{to}",
            "message": f"{row.reference} is {reason}",
            "tone": VERSION_TONE[to],
            "actor": actor,
            "detail": {"version": row.reference, "was": row.state},
        },
        now=now,
        state=to.value,
        reason=reason,
        state_since=now,
        revision=row.revision + 1,
        **columns,
    )
    if moved:
        live.push("models", row.reference)
    return moved


_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
_OPTION = re.compile(r"--[a-z0-9][a-z0-9-]*")


def engine_allowance_request(
    *, engine: str, name: str, why: str, actor: str, now: datetime
) -> EngineAllowance | Approval:
    """Allow an engine an option or a variable or, if it needs approval, request it. Raises InvalidInput for an unknown
    engine, an invalid name, one that only agents set, or no reason. Raises Conflict if it is already allowed."""
    name = _checked_name(engine, name)
    if not why.strip():
        raise InvalidInput(field="why", rule="required", message=f"Give a reason: why may {engine} get {name}?")
    if not requires_approval(WIDEN.name):
        return _allow(engine, name, why, actor, now)
    summary = f"allow engine {engine} {name}"
    arguments = {"engine": engine, "name": name, "why": why}
    return approval_request(WIDEN.name, ApprovalRequest(summary, arguments, actor, now, why))


@transaction.atomic
def engine_allowance_withdraw(*, allowance_id: int, actor: str, now: datetime) -> None:
    """Withdraw an allowance: it applies to new versions and new engines. Running engines keep it."""
    row = EngineAllowance.objects.select_for_update().get(pk=allowance_id)
    row.delete()
    _event("withdrawn", f"{row} is no longer allowed, withdrawn by {actor}", row, actor, now)


def _checked_name(engine: str, name: str) -> str:
    if engine not in ENGINES:
        raise InvalidInput(field="engine", rule="choice", message=f"engine is {engine!r}; {one_of(ENGINES, engine)}")
    is_variable = _VARIABLE.fullmatch(name) is not None
    known = name if is_variable else option_name(name)
    if not is_variable and not _OPTION.fullmatch(known):
        message = f"name is {name!r}; it must be an option (--trust-remote-code) or a variable (LD_PRELOAD)"
        raise InvalidInput(field="name", rule="name", message=message)
    if is_agents_own(known):
        raise InvalidInput(field="name", rule="allowed", message=f"{known} is set only by agents and cannot be allowed")
    refused = refused_variable(engine, known) if is_variable else refused_option(engine, known, None)
    if refused is None:
        raise Conflict(f"{known} is already allowed for engine {engine}")
    return known


@transaction.atomic
def _allow(engine: str, name: str, why: str, actor: str, now: datetime) -> EngineAllowance:
    row, created = EngineAllowance.objects.get_or_create(
        engine=engine, name=name, defaults={"why": why[:200], "actor": actor[:64], "created_at": now}
    )
    if not created:
        raise Conflict(f"{name} is already allowed for engine {engine}, by {row.actor}: {row.why}")
    _event("added", f"{row} allowed by {actor}: {why}", row, actor, now)
    return row


def _event(what: str, message: str, row: EngineAllowance, actor: str, now: datetime) -> None:
    event_record(
        kind=f"engine_allowance.{what}",
        message=message,
        tone=Tone.WARN if what == "added" else Tone.OK,
        now=now,
        actor=actor[:64],
        detail={"engine": row.engine, "name": row.name},
    )


def _perform(arguments: Mapping[str, Any], actor: str, now: datetime) -> str:
    return f"{_allow(now=now, actor=actor, **arguments)} is allowed"


WIDEN = FleetAction("widen-engine-options", "Allow an engine an option or variable beyond the lists", _perform)
