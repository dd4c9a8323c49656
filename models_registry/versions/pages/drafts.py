"""The form of a draft: creates a draft from a version and edits its fields, validated as in the API. Services do the
changes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods

from controlplane.dashboard.actions import Submission, action
from kernel import clock
from kernel.access import Role, needs
from kernel.decoding import decode_json
from kernel.refusals import InvalidInput, Refusal
from models_registry.versions.api.version_requests import (
    ChangeDraftSerializer,
    CreateDraftSerializer,
    EditDraftSerializer,
)
from models_registry.versions.models import ModelVersion
from models_registry.versions.pages.views import VERSION_TARGET
from models_registry.versions.planning.engine_arguments import ENGINES
from models_registry.versions.planning.lifecycle import VersionState
from models_registry.versions.services.drafts import draft_change, draft_create

NUMBERS = (
    "context_length",
    "max_concurrency",
    "ready_timeout_s",
    "attention_heads",
    "kv_heads",
    "layers",
)
TEXTS = ("engine_build", "artifact_uri", "artifact_digest", "golden_waiver")
NESTED = (
    "parallelism", "engine_options", "engine_env", "quantization", "speculation", "adapters", "roles", "by_type",
    "golden_prompts",
)  # fmt: skip
OPTIONAL = frozenset({"attention_heads", "kv_heads", "layers"})


class FieldKind(StrEnum):
    CHOICE = "choice"
    TEXT = "text"
    NUMBER = "number"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class DraftField:
    """`text`: the current content; `options`: the values of a choice."""

    name: str
    kind: FieldKind
    text: str
    help: str
    error: str = ""
    options: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return self.name.replace("_", " ").capitalize()

    @property
    def lines(self) -> int:
        return min(16, max(2, self.text.count("\n") + 1))


def draft_fields(
    version: ModelVersion, texts: Mapping[str, str] | None = None, errors: Mapping[str, str] | None = None
) -> tuple[DraftField, ...]:
    """Fields of the version, or with the submitted `texts`; `errors` by field."""
    kinds = {"engine": FieldKind.CHOICE}
    kinds |= dict.fromkeys(TEXTS, FieldKind.TEXT) | dict.fromkeys(NUMBERS, FieldKind.NUMBER)
    kinds |= dict.fromkeys(NESTED, FieldKind.JSON)
    declared = ChangeDraftSerializer().fields
    return tuple(
        DraftField(
            name=name,
            kind=kind,
            text=texts[name] if texts and name in texts else _field_text(getattr(version, name), kind),
            help=str(declared[name].help_text or ""),
            error=(errors or {}).get(name, ""),
            options=tuple(ENGINES) if kind is FieldKind.CHOICE else (),
        )
        for name, kind in kinds.items()
    )


def parse_fields(texts: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The submitted values in the form of the API, and JSON errors by field."""
    values: dict[str, Any] = {}
    errors: dict[str, str] = {}
    for name, text in texts.items():
        if name in NESTED:
            try:
                values[name] = decode_json(text)
            except ValueError as error:
                errors[name] = f"not valid JSON: {error}"
        elif name in OPTIONAL and not text.strip():
            values[name] = None
        else:
            values[name] = text.strip()
    return values, errors


def _field_text(value: Any, kind: FieldKind) -> str:
    if kind is FieldKind.JSON:
        return json.dumps(value, indent=2, ensure_ascii=False)
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return "" if value is None else str(value)


MAX_FIELD = 100_000
FIELDS = ("engine", *TEXTS, *NUMBERS, *NESTED)


@action(VERSION_TARGET)
def draft_new(form: Submission, base: ModelVersion) -> HttpResponse:
    """Create a draft with the configuration of this version, for editing."""
    data = {"model": base.model_id, "version": form.text("version"), "based_on": base.reference}
    serializer = CreateDraftSerializer(data=data)
    if not serializer.is_valid():
        raise InvalidInput(field="version", rule="valid", message=_first_error(serializer.errors))
    draft = draft_create(
        model=base.model_id,
        version=serializer.validated_data["version"],
        based_on=base.reference,
        columns={},
        actor=form.actor,
        now=form.now,
    )
    return redirect("draft-edit", key=draft.reference)


@never_cache
@needs(Role.OPERATOR)
@require_http_methods(["GET", "HEAD", "POST"])
def draft_edit(request: HttpRequest, key: str) -> HttpResponse:
    """Show the form of a draft; on POST, save it. Errors are shown at their fields."""
    version = VERSION_TARGET.find(key)
    form = Submission(request, clock.now())
    if not form.is_post:
        if version.state != VersionState.DRAFT:
            return redirect("version", key=version.reference)
        return _form_page(form, version, {}, {}, 200)
    texts = {name: str(form.fields.get(name, ""))[:MAX_FIELD] for name in FIELDS}
    values, errors = parse_fields(texts)
    errors = errors or _save(form, version, values)
    if errors:
        return _form_page(form, version, texts, errors, 409)
    return redirect("version", key=version.reference)


def _save(form: Submission, version: ModelVersion, values: dict[str, Any]) -> dict[str, str]:
    """Returns errors by field, "" for errors without a field, or None if the draft was saved."""
    serializer = EditDraftSerializer(data={**values, "revision": form.text("revision") or None})
    if not serializer.is_valid():
        return {field: _first_error({field: error}) for field, error in serializer.errors.items()}
    columns = dict(serializer.validated_data)
    revision = columns.pop("revision", None)
    try:
        draft_change(version_id=version.pk, columns=columns, revision=revision, actor=form.actor, now=form.now)
    except InvalidInput as invalid:
        field = invalid.field.partition(".")[0]
        return {field if field in FIELDS else "": str(invalid)}
    except Refusal as refusal:
        return {"": str(refusal)}
    return {}


def _form_page(
    form: Submission, version: ModelVersion, texts: dict[str, str], errors: dict[str, str], status: int
) -> HttpResponse:
    general = [error for field, error in errors.items() if field not in FIELDS]
    context = {
        "version": version,
        "revision": form.text("revision") or version.revision,
        "fields": draft_fields(version, texts, errors),
        "refused": ". ".join(general) or ("Nothing was saved: some fields are invalid" if errors else ""),
    }
    return render(form.request, "models_registry/versions/edit.html", context, status=status)


def _first_error(errors: Any) -> str:
    """The first error of a serializer, with its path inside the field."""
    if isinstance(errors, dict):
        field, nested = next(iter(errors.items()))
        text = _first_error(nested)
        return f"{field}: {text}" if isinstance(nested, dict) else text
    if isinstance(errors, list):
        return next((_first_error(error) for error in errors if error), "is invalid")
    return str(errors)
