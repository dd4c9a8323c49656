"""Actions: what pages let their users change. Each is declared once: the noun that it changes, the role that it takes,
its fields, the predicted effect, the one service that it calls, and where it leads.

Here is what all of them share: login and role, the typed name where the action is dangerous, refusals, approvals that
are pending, and the forms themselves. Nothing is decided here; the service decides, writes its events and is audited.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Generic, TypeVar
from urllib.parse import urlencode

from django.contrib.auth.views import redirect_to_login
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseNotAllowed, QueryDict
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters
from rest_framework import serializers

from accounts.models import Approval
from accounts.permissions import FactorNeeded
from controlplane.dashboard.fragments import Context, View
from kernel import clock
from kernel.access import Role, require
from kernel.refusals import Busy, InvalidInput, Refusal

T = TypeVar("T")
MAX_TEXT = 500
MAX_SECRET = 128
SECRETS = ("password", "old_password", "new_password", "one_time_code", "credential", "secret")


@dataclass(frozen=True, slots=True)
class Submission:
    """A form as a browser sent it: by POST to carry an action out, by GET to preview it."""

    request: HttpRequest
    now: datetime

    @property
    def is_post(self) -> bool:
        return self.request.method == "POST"

    @property
    def fields(self) -> QueryDict:
        return self.request.POST if self.is_post else self.request.GET

    @property
    def actor(self) -> str:
        """The user, as event rows name them."""
        return self.request.user.get_username()[:64]

    def text(self, name: str, default: str = "", longest: int = MAX_TEXT) -> str:
        """A field without surrounding blanks and of a bounded length."""
        return str(self.fields.get(name, default))[:longest].strip()

    def texts(self, name: str) -> list[str]:
        """All values of a field that may have several."""
        return [text[:MAX_TEXT] for text in self.fields.getlist(name)]

    def secret(self, name: str) -> str:
        return str(self.fields.get(name, ""))[:MAX_SECRET]

    def valid(self, serializer: type[serializers.Serializer[Any]], *names: str, **values: Any) -> dict[str, Any]:
        """Fields as the API's serializer validates them: those named, and further `values`. Empty ones are left out.

        Raises:
            InvalidInput: the first field that breaks a rule.
        """
        values = {name: self.text(name) for name in names} | values
        checked = serializer(data={name: value for name, value in values.items() if value not in ("", None)})
        if checked.is_valid():
            return dict(checked.validated_data)
        field, errors = next(iter(checked.errors.items()))
        message = errors[0] if isinstance(errors, list) else errors
        raise InvalidInput(field=str(field), rule="valid", message=f"{str(field).replace('_', ' ')}: {message}")


@dataclass(frozen=True, slots=True)
class Target(Generic[T]):
    """What an action changes. `find` loads it by the URL's arguments and raises Http404 where there is none.

    `name` is what it is called on screens, `url` the page that shows it, `deployment` whose grants count ("": none).
    """

    noun: str
    find: Callable[..., T]
    name: Callable[[T], str]
    url: Callable[[T], str]
    deployment: Callable[[T], str] = lambda thing: ""


def page_target(page: str, name: str = "the settings") -> Target[Any]:
    """For actions that lead back to the page of this URL name; they get the URL's argument, or None, and look it up."""
    return Target(
        noun=page,
        find=lambda **arguments: next(iter(arguments.values()), None),
        name=lambda argument: name,
        url=lambda argument: reverse(page),
    )


@dataclass(frozen=True, slots=True)
class Field:
    """An input of an action's form. `kind` is its HTML type; a hidden one has no label."""

    name: str
    label: str = ""
    kind: str = "text"
    value: str | int = ""
    required: bool = False
    least: int | None = None
    most: int | None = None


WHY = Field("why", "Reason")
REQUIRED_WHY = replace(WHY, required=True)


@dataclass(frozen=True, slots=True)
class Confirmation:
    """A form that carries an action out, as `dashboard/action_confirm.html` draws it. `typed`: the text that must be
    typed to confirm, "" where nothing must."""

    name: str
    label: str
    url: str
    effect: str
    submit: str
    fields: tuple[Field, ...] = ()
    typed: str = ""


Run = Callable[[Submission, T], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Action(Generic[T]):
    """One change. `run` calls the service. If it returns a response, that is sent; an approval leads to the approvals;
    anything else leads back to the target's page.

    `typed`: what a user must type to confirm, for dangerous ones. `submit`: the button, by default label and name.
    """

    target: Target[T]
    run: Run[T]
    name: str = ""
    label: str = ""
    role: Role = Role.OPERATOR
    typed: Callable[[T], str] | None = None
    submit: str = ""
    fields: tuple[Field, ...] = ()

    def confirmation(self, thing: T, url: str, effect: str, fields: tuple[Field, ...] | None = None) -> Confirmation:
        """The form of this action on a page; `fields` where they depend on the thing."""
        return Confirmation(
            name=self.name,
            label=self.label,
            url=url,
            effect=effect,
            submit=self.submit or f"{self.label} {self.target.name(thing)}",
            fields=self.fields if fields is None else fields,
            typed=self.typed(thing) if self.typed else "",
        )


@dataclass(frozen=True, slots=True)
class ActionMenu:
    """The actions that a page offers now; `deployment` as in `Target`. `note`: why there are none, or are not more."""

    confirmations: tuple[Confirmation, ...]
    note: str = ""
    deployment: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionPage(Generic[T]):
    """A page for an action whose effect is predicted from its form: GET shows the prediction, POST acts.

    `context` fills the template whatever was sent. `predict` adds the prediction and may refuse. `deployment` names the
    deployment of the form, where the target has none.
    """

    action: Action[T]
    template: str
    context: Callable[[Submission, T], Context]
    predict: Callable[[Submission, T], Context] = lambda form, thing: {}
    deployment: Callable[[Submission], str] = lambda form: ""


def action_view(*actions: Action[T]) -> View:
    """The view of one action, or of several whose URL names one in its argument `action`."""
    by_name = {action.name: action for action in actions}

    @never_cache
    @sensitive_post_parameters(*SECRETS)
    def view(request: HttpRequest, **arguments: Any) -> HttpResponse:
        name = arguments.pop("action", actions[0].name)
        action = by_name.get(name, actions[0])
        if not request.user.is_authenticated:
            return redirect_to_login(request.get_full_path())
        if request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        thing = _find(request, action, arguments)
        if name not in by_name:
            raise Http404(f"There is no action {name!r} for this {action.target.noun}.")
        try:
            return _act(action, Submission(request, clock.now()), thing)
        except FactorNeeded:
            return _to_confirmation(action.target.url(thing))
        except Busy as busy:
            response = refused(request, action.target, thing, str(busy), 503)
            response.headers["Retry-After"] = str(math.ceil(busy.retry_after_s))
            return response
        except Refusal as refusal:
            return refused(request, action.target, thing, str(refusal))

    return view


def action(target: Target[T], role: Role = Role.OPERATOR) -> Callable[[Run[T]], View]:
    """Decorates what calls the service: the view of an action whose form is part of a page's own template."""

    def decorate(run: Run[T]) -> View:
        return action_view(Action(target=target, run=run, role=role))

    return decorate


def action_page_view(page: ActionPage[T]) -> View:
    """The view of an action that has its page. Refusals are shown there, above the form."""
    action = page.action

    @never_cache
    @sensitive_post_parameters(*SECRETS)
    def view(request: HttpRequest, **arguments: Any) -> HttpResponse:
        if not request.user.is_authenticated:
            return redirect_to_login(request.get_full_path())
        form = Submission(request, clock.now())
        thing = _find(request, action, arguments, page.deployment(form))
        if request.method not in {"GET", "HEAD", "POST"}:
            return HttpResponseNotAllowed(["GET", "HEAD", "POST"])
        try:
            return _act_or_predict(page, form, thing)
        except FactorNeeded:
            return _to_confirmation(request.path)

    return view


def _act_or_predict(page: ActionPage[T], form: Submission, thing: T) -> HttpResponse:
    reason = ""
    if form.is_post:
        try:
            return _act(page.action, form, thing)
        except Refusal as refusal:
            reason = str(refusal)
    context = page.context(form, thing)
    try:
        context |= page.predict(form, thing)
    except Refusal as refusal:
        reason = reason or str(refusal)
    context["refused"] = reason
    return render(form.request, page.template, context, status=409 if reason else 200)


def _to_confirmation(url: str) -> HttpResponse:
    """Where a second factor is asked for; then back. What was typed is typed again."""
    return redirect(f"{reverse('factor-confirm')}?{urlencode({'next': url})}")


def refused(request: HttpRequest, target: Target[T], thing: T, reason: str, status: int = 409) -> HttpResponse:
    context = {"refused": reason, "back": target.name(thing), "url": target.url(thing)}
    return render(request, "dashboard/action_refused.html", context, status=status)


def secret_shown(request: HttpRequest, *, what: str, name: str, text: str, use: str, url: str) -> HttpResponse:
    """A new secret, for the only time."""
    context = {"what": what, "name": name, "text": text, "use": use, "url": url}
    return render(request, "dashboard/secret.html", context)


def _find(request: HttpRequest, action: Action[T], arguments: dict[str, Any], deployment: str = "") -> T:
    """The target, for those who may change it.

    Raises:
        PermissionDenied: the caller may not, whether it exists or not.
        Http404: there is none.
    """
    try:
        thing = action.target.find(**arguments)
    except Http404:
        require(request, action.role, deployment)
        raise
    require(request, action.role, action.target.deployment(thing) or deployment)
    return thing


def _act(action: Action[T], form: Submission, thing: T) -> HttpResponse:
    """Carry it out, and lead on.

    Raises:
        Refusal: nothing was changed.
    """
    wanted = action.typed(thing) if action.typed else ""
    if wanted and (typed := form.text("confirm")) != wanted:
        raise InvalidInput(field="confirm", rule="named", message=f"type {wanted} to confirm; {typed!r} was typed")
    result = action.run(form, thing)
    if isinstance(result, HttpResponse):
        return result
    return redirect("approvals" if isinstance(result, Approval) else action.target.url(thing))
