"""What an operator asks of a model version from its page: one form, one service, and back to the page. It decides
nothing but whether the version was named, where that is asked for."""

from collections.abc import Callable
from datetime import datetime

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST

from controlplane.dashboard.selectors.versions import FINAL, version_find
from kernel import clock
from kernel.access import Role, needs
from kernel.refusals import InvalidInput, Refusal
from models_registry.models import ModelVersion
from models_registry.services.draft import draft_delete
from models_registry.services.lifecycle import version_release, version_retire
from models_registry.services.validation import validation_start

LONGEST_WHY = 200

Service = Callable[[ModelVersion, str, str, datetime], object]

SERVICES: dict[str, Service] = {
    "validate": lambda row, why, actor, now: validation_start(version_id=row.pk, actor=actor, now=now),
    "release": lambda row, why, actor, now: version_release(version_id=row.pk, why=why, actor=actor, now=now),
    "retire": lambda row, why, actor, now: version_retire(version_id=row.pk, why=why, actor=actor, now=now),
    "delete": lambda row, why, actor, now: draft_delete(version_id=row.pk, actor=actor, now=now),
}


@never_cache
@needs(Role.OPERATOR)
@require_POST
def version_action(request: HttpRequest, key: str, action: str) -> HttpResponse:
    """Ask, and show the page again; what was refused is said on a page of its own."""
    service, version = SERVICES.get(action), version_find(key.replace("\x00", "\ufffd"))
    if service is None or version is None:
        raise Http404(f"There is no {action!r} for model version {key}.")
    try:
        _check_name(request, version, action)
        service(version, _word(request, "why"), request.user.get_username()[:64], clock.now())
    except Refusal as refused:
        context = {"reference": version.reference, "refused": str(refused)}
        return render(request, "dashboard/models/refused.html", context, status=409)
    if action == "delete":
        return redirect("model", key=version.model_id)
    return redirect("version", key=version.reference)


def _check_name(request: HttpRequest, version: ModelVersion, action: str) -> None:
    if action in FINAL and _word(request, "name") != version.reference:
        message = f"to {action} it, write its name, {version.reference}"
        raise InvalidInput(field="name", rule="named", message=message)


def _word(request: HttpRequest, name: str) -> str:
    return str(request.POST.get(name, "")).replace("\x00", "\ufffd")[:LONGEST_WHY].strip()
