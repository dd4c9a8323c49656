"""Writes models and drafts. A draft may say what it likes as long as every field by itself makes sense; from
`validated` on nothing here changes a version any more."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from django.db import IntegrityError, transaction

from kernel import live
from kernel.events import event_record
from kernel.refusals import Conflict, InvalidInput
from kernel.tones import Tone
from models_registry.models import Model, ModelVersion
from models_registry.planning.engine_arguments import check_engine_options, render_version
from models_registry.planning.instance_types import InstanceShape
from models_registry.planning.lifecycle import VersionState
from models_registry.planning.version_checks import BrokenRule, check_draft
from models_registry.planning.version_spec import InvalidVersion
from models_registry.selectors.engine_allowance import engine_allowances
from models_registry.selectors.fleet_hooks import version_uses
from models_registry.selectors.model import version_stated

COLUMNS = (
    "engine", "artifact_uri", "artifact_digest", "context_length", "max_concurrency", "ready_timeout_s", "parallelism",
    "engine_options", "engine_env", "golden_prompts", "golden_waiver", "attention_heads", "kv_heads", "layers",
    "speculation", "quantization", "adapters", "roles", "by_type",
)  # fmt: skip
"""What a draft says; everything else of the row is the registry's own."""


def model_create(*, name: str, description: str, actor: str, now: datetime) -> Model:
    """Add a model, without versions.

    Raises:
        Conflict: the name is taken.
    """
    try:
        with transaction.atomic():
            model = Model.objects.create(name=name, description=description, created_at=now)
            event_record(kind="model.created", message=f"{name} created by {actor}", now=now, actor=actor)
            live.push("models", name)
    except IntegrityError:
        raise Conflict(f"there is a model {name!r} already") from None
    return model


def model_change(*, name: str, description: str, actor: str, now: datetime) -> Model:
    """Change the description of a model.

    Raises:
        InvalidInput: there is no such model.
    """
    with transaction.atomic():
        model = Model.objects.select_for_update().filter(name=name).first()
        if model is None:
            raise InvalidInput(field="name", rule="exists", message=f"there is no model {name!r}; create it first")
        if model.description != description:
            model.description = description
            model.save(update_fields=["description"])
            event_record(kind="model.changed", message=f"{name} described anew by {actor}", now=now, actor=actor)
            live.push("models", name)
    return model


def model_delete(*, name: str, actor: str, now: datetime) -> None:
    """Remove a model.

    Raises:
        Conflict: it has versions.
    """
    with transaction.atomic():
        model = Model.objects.select_for_update().get(name=name)
        if versions := model.versions.count():
            raise Conflict(f"model {name} has {versions} versions; delete its drafts; other versions stay readable")
        model.delete()
        event_record(kind="model.deleted", message=f"{name} deleted by {actor}", now=now, actor=actor)
        live.push("models", name)


def draft_create(
    *, model: str, version: str, based_on: str, columns: Mapping[str, Any], actor: str, now: datetime
) -> ModelVersion:
    """Add a draft. What `columns` leave unsaid comes from the version `based_on` (`model@version`), if it names one.

    Raises:
        InvalidInput: an unknown model or version, or a field that breaks a rule.
        Conflict: the model has a version of this name.
    """
    if not Model.objects.filter(name=model).exists():
        raise InvalidInput(field="model", rule="exists", message=f"there is no model {model!r}; create it first")
    made = ModelVersion(model_id=model, version=version, created_at=now, state_since=now)
    _set(made, {**_columns_of(based_on), **columns})
    made.reason = f"drafted by {actor}" + (f" from {based_on}" if based_on else "")
    try:
        with transaction.atomic():
            made.save(force_insert=True)
            _record(made, "drafted", actor=actor, now=now)
    except IntegrityError:
        raise Conflict(f"{model} has a version {version!r} already; versions never change their meaning") from None
    return made


def draft_change(
    *, version_id: int, columns: Mapping[str, Any], actor: str, now: datetime, revision: int | None = None
) -> ModelVersion:
    """Change what a draft says. `revision`: the one that was looked at, refused if it is not the present one.

    Raises:
        InvalidInput: a field that breaks a rule.
        Conflict: it is no draft any more, is in use, or has changed since it was looked at.
    """
    with transaction.atomic():
        row = draft_locked(version_id, "change")
        if revision is not None and revision != row.revision:
            raise Conflict(f"{row.reference} is at revision {row.revision}, not {revision}; look at it again")
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
    """Remove a draft, with its validations. Nothing else of the registry is ever removed.

    Raises:
        Conflict: it is no draft any more, or is in use.
    """
    with transaction.atomic():
        row = draft_locked(version_id, "delete")
        _record(row, "deleted", actor=actor, now=now)
        row.delete()


def draft_locked(version_id: int, action: str) -> ModelVersion:
    """The draft, locked until the transaction ends, so that nothing begins to use it meanwhile.

    Raises:
        Conflict: it is gone, is no draft any more, or is in use.
    """
    row = ModelVersion.objects.select_for_update().filter(pk=version_id).first()
    if row is None:
        raise Conflict("the version is gone: it was deleted meanwhile")
    if row.state != VersionState.DRAFT:
        raise Conflict(f"{row.reference} is {row.state}; only a draft can be {action}d: base a new version on it")
    refuse_if_used(row, action)
    return row


def refuse_if_used(row: ModelVersion, action: str) -> None:
    """To be called while the version is locked.

    Raises:
        Conflict: it is in use; the text names by whom.
    """
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
    try:
        check_draft(row.spec(engine_allowances()))
    except BrokenRule as broken:
        raise InvalidInput(field=broken.field, rule=broken.rule, message=broken.message) from None


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
    """Store a version after rendering it for every instance type that it names.

    Args:
        model: what it is a version of.
        version: its name, which the model does not have yet.
        machines: the instance types that there are, by name.
        now: when it is made.
        columns: the other columns of `ModelVersion`.

    Raises:
        InvalidVersion: it names no instance type, or one that there is not, or cannot be rendered for one, or
            gives its engine what it may not be given; the text
            names field, value and rule.
    """
    made = ModelVersion(model=model, version=version, created_at=now, **columns)
    spec = made.spec(engine_allowances())
    if not spec.parallelism:
        raise InvalidVersion(f"{spec.reference}: parallelism is empty; it must name an instance type")
    for name in spec.parallelism:
        if name not in machines:
            raise InvalidVersion(
                f"{spec.reference}: parallelism names instance type {name!r}; there are {', '.join(sorted(machines))}"
            )
        check_engine_options(spec, name)
        render_version(spec, machines[name])
    made.save(force_insert=True)
    return made
