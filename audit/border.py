"""The border at which changes are audited: every unsafe request runs in one transaction with its record, whichever view
answers it, so that no endpoint can forget to. Refusals are recorded too. It decides nothing about who may.

It must be the last middleware: its `process_view` calls the view itself.
"""

from collections.abc import Callable, Mapping
from http import HTTPStatus
from inspect import iscoroutinefunction
from typing import Any

from asgiref.sync import async_to_sync
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.urls import Resolver404, resolve
from rest_framework.exceptions import APIException

from audit.models import Outcome, Proof
from audit.names import api_action, key_in, key_of, noun_of, page_action
from audit.senders import sender_of
from audit.services.record import Act, Actor, audit_record
from audit.watching import watching
from kernel import clock
from kernel.trail import Trail, keep_trail, trail

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
DENIALS = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN})
KEPT_REFUSALS = DENIALS | {HTTPStatus.TOO_MANY_REQUESTS}
"""What these answers wrote stays: it counts attempts. Every other refusal promises that nothing was changed."""
REASON_FIELDS = ("why", "reason")

View = Callable[..., HttpResponse]


class AuditBorder:
    """The middleware."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        with keep_trail() as kept:
            response = self.get_response(request)
            if response.status_code in DENIALS:
                _record_denial(request, response)
            elif kept.said and request.method in SAFE_METHODS:
                _record(request, response, kept)  # a login through somebody else's page comes back as GET
        return response

    def process_view(
        self, request: HttpRequest, view: View, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> HttpResponse | None:
        """Answers an unsafe request inside its transaction; leaves all others alone."""
        kept = trail()
        if request.method in SAFE_METHODS or kept is None or reason_not_audited(view):
            return None
        call = async_to_sync(view) if iscoroutinefunction(view) else view
        with transaction.atomic(), watching(kept):
            response: HttpResponse = call(request, *args, **kwargs)
            if response.status_code >= HTTPStatus.BAD_REQUEST:
                transaction.set_rollback(response.status_code not in KEPT_REFUSALS)
            elif kept.changed:
                _record(request, response, kept)
        return response


def reason_not_audited(view: Any) -> str:
    """Why a view declared that its unsafe requests are not audited (kernel.trail); "" if it did not."""
    return str(getattr(view, "not_audited", "") or getattr(getattr(view, "cls", None), "not_audited", ""))


def _record(request: HttpRequest, response: HttpResponse, kept: Trail) -> None:
    """One record of a change, as the last step of its transaction."""
    said = kept.said
    action, thing = _asked_for(request, response)
    actor = sender_of(request)
    if actor is not None and actor.proof is Proof.JOIN_TOKEN:
        thing = f"agent/{actor.name}"
    if said:
        proof = actor.proof if actor else Proof.SESSION
        action, thing = said["what"], f"user/{said['name']}"
        actor = Actor(said["name"], proof, str(request.META.get("REMOTE_ADDR") or ""))
    denied = said.get("what") == "login-failed"
    act = Act(
        action="login" if denied else action,
        outcome=Outcome.DENIED if denied else Outcome.DONE,
        object=thing,
        about=kept.objects,
        reason="wrong password" if denied else _reason(request, response),
        changes={"asked": {} if said else _body(request, response), "rows": kept.rows, "events": kept.events},
    )
    audit_record(actor=actor or Actor("anonymous", Proof.SESSION), act=act, now=clock.now())


def _record_denial(request: HttpRequest, response: HttpResponse) -> None:
    """One record of an attempt that was refused, if it is known whose it was."""
    if (actor := sender_of(request)) is not None:
        action, thing = _asked_for(request, response)
        act = Act(action=action, outcome=Outcome.DENIED, object=thing, reason=_why_denied(response))
        audit_record(actor=actor, act=act, now=clock.now())


def _asked_for(request: HttpRequest, response: HttpResponse) -> tuple[str, str]:
    """The action, and its object as `noun/key`."""
    match = request.resolver_match
    if match is None:
        return f"{str(request.method).lower()} {request.path}"[:96], ""
    drf = getattr(response, "renderer_context", None) or {}
    view = drf.get("view")
    if (basename := getattr(view, "basename", None)) is not None:
        action = api_action(str(basename), str(getattr(view, "action", None) or request.method).lower())
    else:
        action = page_action(match.url_name or match.route, match.kwargs)
    if request.method in SAFE_METHODS and "." not in action:
        action = f"{action}.read"
    key = key_of(match.kwargs) or key_in(getattr(response, "data", None)) or _key_in_location(response)
    return action, f"{noun_of(action)}/{key}" if key else ""


def _key_in_location(response: HttpResponse) -> str:
    """Pages that made something lead to it."""
    try:
        return key_of(resolve(response.headers.get("Location", "").partition("?")[0]).kwargs)
    except Resolver404:
        return ""


def _body(request: HttpRequest, response: HttpResponse) -> dict[str, Any]:
    drf = (getattr(response, "renderer_context", None) or {}).get("request")
    try:
        given = drf.data if drf is not None else request.POST
    except APIException:  # a body that the view never asked for
        return {}
    if hasattr(given, "lists"):
        return {name: values if len(values) > 1 else values[0] for name, values in given.lists() if values}
    return dict(given) if isinstance(given, Mapping) else {}


def _reason(request: HttpRequest, response: HttpResponse) -> str:
    body = _body(request, response)
    return next((str(body[name]) for name in REASON_FIELDS if isinstance(body.get(name), str) and body[name]), "")


def _why_denied(response: HttpResponse) -> str:
    data = getattr(response, "data", None)
    said = data.get("detail", "") if isinstance(data, Mapping) else ""
    return str(said) or response.reason_phrase
