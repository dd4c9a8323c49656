"""Audits all changing requests: each runs in one transaction with its record, so no view can omit it. Refusals for lack
of rights are recorded as well. A form that is sent twice changes things once.

It must be the last middleware: its `process_view` calls the view itself."""

from collections.abc import Callable, Mapping
from http import HTTPStatus
from inspect import iscoroutinefunction
from typing import Any, TypeVar

from asgiref.sync import async_to_sync
from django.db import transaction
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, RawPostDataException
from django.shortcuts import render
from django.urls import Resolver404, resolve
from rest_framework.exceptions import APIException

from audit.models import Outcome, Proof
from audit.row_capture import Changes, RowCapture
from audit.services import Act, Actor, audit_record, denial_record, request_actor
from audit.signals import RequestLogin, current_login, login_recording
from kernel import clock
from kernel.models import IdempotentAnswer
from kernel.outside_transaction import RequestWork, RunOutsideTransaction, begin_run
from kernel.rest.idempotency import SUBMISSION, IdempotentRequest, form_submission, submission_find, submission_store

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
DENIALS = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN})
KEPT_REFUSALS = DENIALS | {HTTPStatus.TOO_MANY_REQUESTS}
"""Rows that views write before these responses are kept, because they count attempts. Every other refusal rolls
back."""
LOGIN_DENIALS = {"login-failed": "wrong password", "factor-failed": "wrong second factor"}
REASON_FIELDS = ("why", "reason")
VERBS = {"update": "change", "partial_update": "change", "destroy": "delete", "new": "create"}
NOUNS = {"version": "model-version"}
"""Pages have shorter names for some nouns than the API."""
PAGES = {
    "evacuate": "evacuation.create",
    "override-end": "override.end",
    "agents-enrol": "agent.enrol",
    "join-refused": "machine.refuse",
    "agent-cache": "compile-cache.create",
}
LONGEST_KEPT_BODY = 256 * 1024
"""Bytes: the limit of the API's parser."""
MOST_RUNS = 5
"""Runs of one request. A new password takes three: one for the old hash and one for the new."""
KEYS = ("id", "prefix", "name", "key")
"""Fields of a response that name the created object; the first one present counts."""

View = Callable[..., HttpResponse]
V = TypeVar("V", bound=Callable[..., Any])


def audit_exempt(reason: str) -> Callable[[V], V]:
    """Exempts a view whose unsafe requests change nothing in the control plane: no transaction and no record.

    For views that stream or wait. A view that merely writes nothing needs no exemption."""

    def declare(view: V) -> V:
        view.audit_exempt = reason  # type: ignore[attr-defined]  # read below, by name
        return view

    return declare


def exemption(view: Any) -> str:
    """The reason why a view is exempt; "" if it is not."""
    of_action = getattr(view, "initkwargs", {}).get("audit_exempt", "")
    return str(
        getattr(view, "audit_exempt", "") or of_action or getattr(getattr(view, "cls", None), "audit_exempt", "")
    )


class AuditMiddleware:
    """One transaction and one record for each unsafe request."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        with login_recording() as login:
            response = self.get_response(request)
            if response.status_code in DENIALS:
                _record_denial(request, response)
            elif login and request.method in SAFE_METHODS:
                _record(request, response, Changes(), login)  # an identity provider sends users back with GET
        return response

    def process_view(
        self, request: HttpRequest, view: View, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> HttpResponse | None:
        """Runs the view of an unsafe request inside a transaction."""
        login = current_login()
        if request.method in SAFE_METHODS or login is None or exemption(view):
            return None
        call = async_to_sync(view) if iscoroutinefunction(view) else view
        # Views without Django's CSRF check read their bodies themselves.
        submission = None if getattr(view, "csrf_exempt", False) else form_submission(request)
        if not _is_body_kept(request):
            return self._run(request, call, login, submission, args, kwargs)
        outside = RequestWork()
        for _ in range(MOST_RUNS):
            try:
                with begin_run(outside):
                    return self._run(request, call, login, submission, args, kwargs)
            except RunOutsideTransaction as wanted:
                wanted.work()
        raise RuntimeError(f"{request.path} needs more work outside its transaction after {MOST_RUNS} runs")

    def _run(
        self,
        request: HttpRequest,
        call: View,
        login: RequestLogin,
        submission: IdempotentRequest | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> HttpResponse:
        with transaction.atomic():
            if submission and (answer := submission_find(submission, clock.now())):
                return _repeated(request, answer)
            capture = RowCapture()
            capture.start()
            response: HttpResponse = call(request, *args, **kwargs)
            refused = response.status_code >= HTTPStatus.BAD_REQUEST
            if refused and response.status_code not in KEPT_REFUSALS:
                transaction.set_rollback(True)
                return response
            changes = capture.finish()
            if not refused and (changes or login):
                _record(request, response, changes, login)
            if submission and changes and not refused:
                location = response.headers.get("Location", "")
                submission_store(submission, status=response.status_code, location=location, now=clock.now())
        return response


def _repeated(request: HttpRequest, answer: IdempotentAnswer) -> HttpResponse:
    """The answer to a form that was sent again: where the first one led, without doing its work again."""
    if answer.body is not None:
        return HttpResponseRedirect(bytes(answer.body).decode())
    return render(request, "409.html", {"done_at": answer.created_at}, status=HTTPStatus.CONFLICT)


def _is_body_kept(request: HttpRequest) -> bool:
    """Whether a request can run again: its body is read and kept, unless it is long or of unknown length."""
    length = request.META.get("CONTENT_LENGTH") or "0"
    if "HTTP_TRANSFER_ENCODING" in request.META or not length.isascii() or not length.isdigit():
        return False
    try:
        return int(length) <= LONGEST_KEPT_BODY and len(request.body) <= LONGEST_KEPT_BODY
    except RawPostDataException:  # a form that was read before, and stays too
        return True


def _record(request: HttpRequest, response: HttpResponse, changes: Changes, login: RequestLogin) -> None:
    """Record a change as the last step of its transaction."""
    actor = request_actor(request)
    if login:
        _record_login(request, changes, login, actor.proof if actor else Proof.SESSION)
        return
    action, thing = _action_and_object(request, response)
    if actor is not None and actor.proof is Proof.JOIN_TOKEN:
        thing = f"agent/{actor.name}"
    act = Act(
        action=action,
        object=thing,
        about=changes.objects,
        reason=_reason(request, response),
        changes={"asked": _body(request, response), "rows": changes.rows, "events": changes.events},
    )
    audit_record(actor=actor or Actor("anonymous", Proof.SESSION), act=act, now=clock.now())


def _record_login(request: HttpRequest, changes: Changes, login: RequestLogin, proof: Proof) -> None:
    """Record a login, logout, wrong password or wrong second factor, without the input."""
    denied = LOGIN_DENIALS.get(login.action, "")
    act = Act(
        action="login" if denied else login.action,
        outcome=Outcome.DENIED if denied else Outcome.DONE,
        object=f"user/{login.username}",
        about=changes.objects,
        reason=denied,
        changes={"rows": changes.rows, "events": changes.events},
    )
    actor = Actor(login.username, proof, str(request.META.get("REMOTE_ADDR") or ""))
    audit_record(actor=actor, act=act, now=clock.now())


def _record_denial(request: HttpRequest, response: HttpResponse) -> None:
    """Record a refused attempt if its actor is known; of equal attempts only the first ones in a minute."""
    if (actor := request_actor(request)) is not None:
        action, thing = _action_and_object(request, response)
        act = Act(action=action, outcome=Outcome.DENIED, object=thing, reason=_denial_reason(response))
        denial_record(actor=actor, act=act, now=clock.now())


def _action_and_object(request: HttpRequest, response: HttpResponse) -> tuple[str, str]:
    """Returns the action and its object as `noun/key`, the same for the API and for pages."""
    match = request.resolver_match
    if match is None:
        return f"{str(request.method).lower()} {request.path}"[:96], ""
    drf = getattr(response, "renderer_context", None) or {}
    view = drf.get("view")
    if (basename := getattr(view, "basename", None)) is not None:
        action = _api_action(str(basename), str(getattr(view, "action", None) or request.method).lower())
    else:
        action = _page_action(match.url_name or match.route, match.kwargs)
    if request.method in SAFE_METHODS and "." not in action:
        action = f"{action}.read"
    key = _key_of(match.kwargs) or _key_in_body(getattr(response, "data", None)) or _key_in_location(response)
    return action, f"{action.partition('.')[0]}/{key}" if key else ""


def _api_action(basename: str, action: str) -> str:
    """`rollout.pause` of the view set `rollout` and its action `pause`."""
    return f"{basename}.{VERBS.get(action, action.replace('_', '-'))}"


def _page_action(url_name: str, arguments: Mapping[str, Any]) -> str:
    """`rollout.pause` of the page `rollout-action` with the argument `pause`; `key.create` of `key-new`."""
    if url_name in PAGES:
        return PAGES[url_name]
    noun, _, verb = url_name.rpartition("-")
    if verb == "action" and "action" in arguments:
        verb = str(arguments["action"])
    return f"{NOUNS.get(noun, noun)}.{VERBS.get(verb, verb)}" if noun else url_name


def _key_of(arguments: Mapping[str, Any]) -> str:
    """Returns the key of the object in a URL's arguments, or ""."""
    return next((str(value) for name, value in arguments.items() if name not in {"action", "kind"}), "")


def _key_in_body(data: Any) -> str:
    """Returns the key of the created object from a response of the API."""
    if not isinstance(data, dict):
        return ""
    return str(next((data[name] for name in KEYS if isinstance(data.get(name), str | int)), ""))


def _key_in_location(response: HttpResponse) -> str:
    """Returns the key of the created object, to which pages redirect."""
    try:
        return _key_of(resolve(response.headers.get("Location", "").partition("?")[0]).kwargs)
    except Resolver404:
        return ""


def _body(request: HttpRequest, response: HttpResponse) -> dict[str, Any]:
    drf = (getattr(response, "renderer_context", None) or {}).get("request")
    try:
        body = drf.data if drf is not None else request.POST
    except APIException:  # one that the view never read
        return {}
    if hasattr(body, "lists"):
        found = {name: values if len(values) > 1 else values[0] for name, values in body.lists() if values}
        return {name: value for name, value in found.items() if name != SUBMISSION}
    return dict(body) if isinstance(body, Mapping) else {}


def _reason(request: HttpRequest, response: HttpResponse) -> str:
    body = _body(request, response)
    return next((str(body[name]) for name in REASON_FIELDS if isinstance(body.get(name), str) and body[name]), "")


def _denial_reason(response: HttpResponse) -> str:
    data = getattr(response, "data", None)
    detail = data.get("detail", "") if isinstance(data, Mapping) else ""
    return str(detail) or response.reason_phrase
