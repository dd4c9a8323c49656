"""What an operator asks of application keys from their pages: make one, limit, rotate and revoke it, and whether one is
required. Each is one form and one service; nothing is decided here but whether the key was named."""

from collections.abc import Callable
from datetime import datetime
from typing import Any

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from engine_agent.protocol.states import ServingClass
from fleet.models import Deployment
from fleet.planning.states import choices
from kernel import clock
from kernel.access import Role, needs
from kernel.refusals import InvalidInput, Refusal
from traffic.api.key import ChangeKeySerializer, CreateKeySerializer
from traffic.models import ApplicationKey
from traffic.planning.key import LIMITS
from traffic.services.key import key_change, key_create, key_revoke, key_rotate, keys_require

LONGEST_TEXT = 200
ACTIONS = ("limit", "rotate", "revoke")
FORM_FIELDS = ("name", "tenant", "serving_class", *LIMITS, "expires_at")


@never_cache
@needs(Role.OPERATOR)
@require_http_methods(["GET", "HEAD", "POST"])
def key_new(request: HttpRequest) -> HttpResponse:
    """A form; asked by POST, the new key on a page of its own, once."""
    if request.method != "POST":
        return _form(request, {"serving_class": ServingClass.REALTIME.value}, "", 200)
    asked = {name: _word(request, name) for name in FORM_FIELDS}
    given: dict[str, Any] = {name: text for name, text in asked.items() if text}
    given["deployments"] = request.POST.getlist("deployments")
    try:
        checked = CreateKeySerializer(data=given)
        if not checked.is_valid():
            raise _first_error(checked.errors)
        new = key_create(actor=_actor(request), now=clock.now(), **checked.validated_data)
    except Refusal as refused:
        return _form(request, {**asked, "deployments": given["deployments"]}, str(refused), 409)
    return _shown(request, new.key, new.text)


@never_cache
@needs(Role.OPERATOR)
@require_POST
def key_action(request: HttpRequest, key: str, action: str) -> HttpResponse:
    """Ask, and show the page again; what was refused is said on a page of its own."""
    row = ApplicationKey.objects.filter(prefix=key.replace("\x00", "\ufffd")).first()
    if row is None or action not in ACTIONS:
        raise Http404(f"There is no {action!r} for key {key!r}.")
    actor, now = _actor(request), clock.now()
    try:
        if action == "rotate":
            new = key_rotate(prefix=row.prefix, actor=actor, now=now)
            return _shown(request, new.key, new.text)
        ACT[action](request, row, actor, now)
    except Refusal as refused:
        context = {"key": row, "refused": str(refused)}
        return render(request, "dashboard/keys/refused.html", context, status=409)
    return redirect("key", key=row.prefix)


@never_cache
@needs(Role.ADMIN)
@require_POST
def keys_require_ask(request: HttpRequest) -> HttpResponse:
    """Require keys, or no longer; to require them one writes so."""
    required = request.POST.get("required") == "yes"
    if required and _word(request, "confirm") != "require keys":
        refused = "to refuse everybody without a key, write: require keys"
        return render(request, "dashboard/keys/refused.html", {"key": None, "refused": refused}, status=409)
    keys_require(required=required, actor=_actor(request), now=clock.now(), why=_word(request, "why"))
    return redirect("keys")


def _limit(request: HttpRequest, key: ApplicationKey, actor: str, now: datetime) -> None:
    checked = ChangeKeySerializer(data={name: _word(request, name) or "0" for name in LIMITS})
    if not checked.is_valid():
        raise _first_error(checked.errors)
    key_change(prefix=key.prefix, actor=actor, now=now, **checked.validated_data)


def _revoke(request: HttpRequest, key: ApplicationKey, actor: str, now: datetime) -> None:
    if _word(request, "confirm") != key.name:
        raise InvalidInput(field="confirm", rule="named", message=f"to revoke it, write its name, {key.name}")
    key_revoke(prefix=key.prefix, actor=actor, now=now, why=_word(request, "why"))


ACT: dict[str, Callable[[HttpRequest, ApplicationKey, str, datetime], None]] = {"limit": _limit, "revoke": _revoke}


def _form(request: HttpRequest, asked: dict[str, Any], refused: str, status: int) -> HttpResponse:
    context = {
        "asked": asked,
        "refused": refused,
        "deployments": Deployment.objects.order_by("name").values_list("name", flat=True),
        "classes": choices(ServingClass),
    }
    return render(request, "dashboard/keys/new.html", context, status=status)


def _shown(request: HttpRequest, key: ApplicationKey, text: str) -> HttpResponse:
    return render(request, "dashboard/keys/shown.html", {"key": key, "text": text})


def _first_error(errors: Any) -> InvalidInput:
    field, said = next(iter(errors.items()))
    words = said[0] if isinstance(said, list) else said
    return InvalidInput(field=field, rule="valid", message=f"{field.replace('_', ' ')}: {words}")


def _word(request: HttpRequest, name: str) -> str:
    return str(request.POST.get(name, "")).replace("\x00", "\ufffd")[:LONGEST_TEXT].strip()


def _actor(request: HttpRequest) -> str:
    return request.user.get_username()[:64]
