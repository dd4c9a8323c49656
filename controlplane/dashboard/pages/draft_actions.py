"""Drafts in the browser: base one on a version, and edit what it says. Each is one form and one service; what a field
may say is for the registry, as in the API."""

from typing import Any

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from controlplane.dashboard.selectors.drafts import NESTED, NUMBERS, TEXTS, draft_fields, read_fields
from controlplane.dashboard.selectors.versions import version_find
from kernel import clock
from kernel.access import Role, needs
from kernel.refusals import InvalidInput, Refusal
from models_registry.api.version_requests import CreateDraftSerializer, EditDraftSerializer
from models_registry.models import ModelVersion
from models_registry.planning.lifecycle import VersionState
from models_registry.services.draft import draft_change, draft_create

LONGEST_FIELD = 100_000
FIELDS = ("engine", *TEXTS, *NUMBERS, *NESTED)


@never_cache
@needs(Role.OPERATOR)
@require_POST
def draft_new(request: HttpRequest, key: str) -> HttpResponse:
    """A draft that says the same as this version, to be edited."""
    base = _found(key)
    asked = {"model": base.model_id, "version": _word(request, "version"), "based_on": base.reference}
    try:
        checked = CreateDraftSerializer(data=asked)
        if not checked.is_valid():
            raise InvalidInput(field="version", rule="valid", message=_first(checked.errors))
        draft = draft_create(
            model=base.model_id,
            version=checked.validated_data["version"],
            based_on=base.reference,
            columns={},
            actor=_actor(request),
            now=clock.now(),
        )
    except Refusal as refused:
        context = {"reference": base.reference, "refused": str(refused)}
        return render(request, "dashboard/models/refused.html", context, status=409)
    return redirect("draft-edit", key=draft.reference)


@never_cache
@needs(Role.OPERATOR)
@require_http_methods(["GET", "HEAD", "POST"])
def draft_edit(request: HttpRequest, key: str) -> HttpResponse:
    """The form of a draft; asked by POST, change it. What is wrong stands at its field."""
    version = _found(key)
    if request.method != "POST":
        if version.state != VersionState.DRAFT:
            return redirect("version", key=version.reference)
        return _form(request, version, {}, {}, 200)
    written = {name: _word(request, name) for name in FIELDS}
    said, errors = read_fields(written)
    if not errors:
        errors = _change(request, version, said)
    if not errors:
        return redirect("version", key=version.reference)
    return _form(request, version, written, errors, 409)


def _change(request: HttpRequest, version: ModelVersion, said: dict[str, Any]) -> dict[str, str]:
    """By field, why it was not changed; "" for reasons that concern no field. Empty: it was changed."""
    checked = EditDraftSerializer(data={**said, "revision": _word(request, "revision") or None})
    if not checked.is_valid():
        return {field: _first({field: error}) for field, error in checked.errors.items()}
    columns = dict(checked.validated_data)
    revision = columns.pop("revision", None)
    try:
        draft_change(version_id=version.pk, columns=columns, revision=revision, actor=_actor(request), now=clock.now())
    except InvalidInput as wrong:
        field = wrong.field.partition(".")[0]
        return {field if field in FIELDS else "": str(wrong)}
    except Refusal as refused:
        return {"": str(refused)}
    return {}


def _form(
    request: HttpRequest, version: ModelVersion, written: dict[str, str], errors: dict[str, str], status: int
) -> HttpResponse:
    general = [said for field, said in errors.items() if field not in FIELDS]
    context = {
        "version": version,
        "revision": _word(request, "revision") or version.revision,
        "fields": draft_fields(version, written, errors),
        "refused": ". ".join(general) or ("Some fields are wrong; nothing was changed" if errors else ""),
    }
    return render(request, "dashboard/models/edit.html", context, status=status)


def _found(key: str) -> ModelVersion:
    version = version_find(key.replace("\x00", "\ufffd"))
    if version is None:
        raise Http404(f"There is no model version {key}.")
    return version


def _first(errors: Any) -> str:
    """The first thing that a serializer says, with the place inside the field."""
    if isinstance(errors, dict):
        field, said = next(iter(errors.items()))
        inside = _first(said)
        return f"{field}: {inside}" if isinstance(said, dict) else inside
    if isinstance(errors, list):
        return next((_first(said) for said in errors if said), "is wrong")
    return str(errors)


def _word(request: HttpRequest, name: str) -> str:
    return str(request.POST.get(name, "")).replace("\x00", "\ufffd")[:LONGEST_FIELD]


def _actor(request: HttpRequest) -> str:
    return request.user.get_username()[:64]
