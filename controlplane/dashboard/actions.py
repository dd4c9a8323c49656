"""Actions: the changes that pages offer. Each is declared once: its noun, role, fields, predicted effect, service and
next page. This module does what all share: the menu in a page's head, the page with an action's form, login and role,
the typed confirmation of dangerous actions, errors, and pending approvals. It never decides or writes; the service does
both and is audited."""

import math
from collections.abc import Callable, Mapping
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
from controlplane.dashboard.templatetags.form_guards import seen_text
from kernel import clock
from kernel.access import Access, Role, require
from kernel.decoding import decode_json
from kernel.refusals import Busy, Conflict, InvalidInput, Refusal

T = TypeVar("T")
MAX_TEXT = 500
MAX_SECRET = 128
MAX_SEEN = 20_000
"""Characters of the stored values that a form was opened with."""
SECRETS = ("password", "old_password", "new_password", "one_time_code", "credential", "secret", "client_secret")


@dataclass(frozen=True, slots=True)
class Submission:
    """A submitted form: POST carries an action out, GET previews it."""

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
        return self.request.user.get_username()[:64]

    def text(self, name: str, default: str = "", longest: int = MAX_TEXT) -> str:
        """A field without surrounding spaces, of limited length."""
        return str(self.fields.get(name, default))[:longest].strip()

    def texts(self, name: str) -> list[str]:
        """All values of a field with several."""
        return [text[:MAX_TEXT] for text in self.fields.getlist(name)]

    def secret(self, name: str) -> str:
        return str(self.fields.get(name, ""))[:MAX_SECRET]

    def valid(self, serializer: type[serializers.Serializer[Any]], *names: str, **values: Any) -> dict[str, Any]:
        """The named fields and further `values`, validated by the API's serializer. Empty ones are left out. Raises
        InvalidInput for the first field that breaks a rule."""
        values = {name: self.text(name) for name in names} | values
        checked = serializer(data={name: value for name, value in values.items() if value not in ("", None)})
        if checked.is_valid():
            return dict(checked.validated_data)
        field, errors = next(iter(checked.errors.items()))
        message = errors[0] if isinstance(errors, list) else errors
        raise InvalidInput(field=str(field), rule="valid", message=f"{str(field).replace('_', ' ')}: {message}")


@dataclass(frozen=True, slots=True)
class Target(Generic[T]):
    """The object that an action changes. `find` loads it by the URL's arguments or raises Http404.

    `name` is its name on screens, `url` its page, `deployment` the one whose grants count ("": none). `action_url`: the
    URL of the action with this name, for actions in menus."""

    noun: str
    find: Callable[..., T]
    name: Callable[[T], str]
    url: Callable[[T], str]
    deployment: Callable[[T], str] = lambda thing: ""
    action_url: Callable[[T, str], str] = lambda thing, name: ""


def page_target(page: str, name: str = "the settings") -> Target[Any]:
    """For actions that return to the page of this URL name; they load the object by the URL's argument, or by None."""
    return Target(
        noun=page,
        find=lambda **arguments: next(iter(arguments.values()), None),
        name=lambda argument: name,
        url=lambda argument: reverse(page),
    )


@dataclass(frozen=True, slots=True)
class Field:
    """An input of an action's form. `kind` is its HTML type, or `textarea` for text of several lines with `most`
    characters, or `select` with `options`, each a value and a label. A hidden one has no label, and a checkbox sends
    its value if it is `checked`."""

    name: str
    label: str = ""
    kind: str = "text"
    value: str | int = ""
    required: bool = False
    least: int | None = None
    most: int | None = None
    step: str = ""
    checked: bool = False
    options: tuple[tuple[str, str], ...] = ()

    @property
    def stored(self) -> str | int:
        """The value that it sends without a change by the user."""
        return self.value if self.kind != "checkbox" or self.checked else ""


EDITED = frozenset({"text", "textarea", "number", "select", "checkbox", "date", "datetime-local", "url"})
"""Kinds of fields that can show a stored value."""
WHY = Field("why", "Reason")
REQUIRED_WHY = replace(WHY, required=True)


@dataclass(frozen=True, slots=True)
class Confirmation:
    """A form that carries an action out, rendered by `dashboard/action_confirm.html`. `typed`: the text that the user
    must type to confirm, "" for none; `confirmed`: what the user typed before a refusal. `seen`: the stored values that
    the form shows, "" for none."""

    name: str
    label: str
    url: str
    effect: str
    submit: str
    fields: tuple[Field, ...] = ()
    typed: str = ""
    confirmed: str = ""
    seen: str = ""

    def with_values_of(self, form: Submission) -> "Confirmation":
        """With the values of this form. A link may fill fields, but never the confirmation."""
        fields = tuple(_filled(field, form) for field in self.fields)
        return replace(self, fields=fields, confirmed=form.text("confirm") if form.is_post else "")


def _filled(field: Field, form: Submission) -> Field:
    if field.kind == "checkbox":
        return replace(field, checked=field.name in form.fields) if form.is_post else field
    longest = (field.most or MAX_TEXT) if field.kind == "textarea" else MAX_TEXT
    return replace(field, value=form.text(field.name, str(field.value), longest)) if field.kind != "password" else field


Run = Callable[[Submission, T], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Action(Generic[T]):
    """A change. `run` calls the service. A returned response is sent; an approval leads to the approvals; other results
    lead back to the target's page.

    `typed`: the text that confirms a dangerous action. `submit`: the button's label, default: label and name. `fields`:
    of its form, or a function of the object.

    `effect`: predicts the effect of an action with a separate form; None if the form is part of a page.
    `why_not`: why it is impossible now, or "". `words`: other words that find it. `present`: stored values that the
    form edits, by field; a form that was opened with other ones is refused. Default: those of its `fields`."""

    target: Target[T]
    run: Run[T]
    name: str = ""
    label: str = ""
    role: Role = Role.OPERATOR
    typed: Callable[[T], str] | None = None
    submit: str = ""
    fields: tuple[Field, ...] | Callable[[T], tuple[Field, ...]] = ()
    effect: Callable[[T, datetime], str] | None = None
    why_not: Callable[[T], str] = lambda thing: ""
    words: tuple[str, ...] = ()
    present: Callable[[T], Mapping[str, object]] | None = None

    def stored(self, thing: T) -> Mapping[str, object]:
        """The stored values that the form edits; empty if it edits none."""
        if self.present is not None:
            return self.present(thing)
        if not callable(self.fields):
            return {}
        return {field.name: field.stored for field in self.fields(thing) if field.kind in EDITED}

    def confirmation(self, thing: T, url: str, effect: str, fields: tuple[Field, ...] | None = None) -> Confirmation:
        """The form of this action on a page; `fields` if they depend on the page's form."""
        stored = self.stored(thing)
        if fields is None:
            fields = self.fields(thing) if callable(self.fields) else self.fields
        return Confirmation(
            name=self.name,
            label=self.label,
            url=url,
            effect=effect,
            submit=self.submit or f"{self.label} {self.target.name(thing)}",
            fields=fields,
            typed=self.typed(thing) if self.typed else "",
            seen=seen_text(stored) if stored else "",
        )

    def menu_item(self, thing: T, access: Access) -> "MenuItem":
        url, deployment = self.target.action_url(thing, self.name), self.target.deployment(thing)
        return menu_item(self.label, url, access, self.role, deployment, self.why_not(thing))


@dataclass(frozen=True, slots=True)
class MenuItem:
    """An action in the menu of a page. `why_not`: why this user cannot take it now, or ""; `is_denied`: for lack of a
    role."""

    label: str
    url: str
    why_not: str = ""
    is_denied: bool = False


@dataclass(frozen=True, slots=True)
class ActionMenu:
    items: tuple[MenuItem, ...]

    @property
    def read_only(self) -> str:
        """Why the user can take none of the actions, or ""."""
        return f"Read-only. {self.items[0].why_not}" if self.items and all(one.is_denied for one in self.items) else ""


def menu_item(
    label: str, url: str, access: Access, role: Role = Role.OPERATOR, deployment: str = "", why_not: str = ""
) -> MenuItem:
    """An action at this URL for users with this role; `deployment` as in `Target`."""
    on = f" on {deployment}" if deployment else ""
    denied = "" if access.may(role, deployment) else f"It needs the {role} role{on}."
    return MenuItem(label, url, denied or why_not, is_denied=bool(denied))


def action_menu(thing: T, access: Access, *actions: Action[T]) -> ActionMenu:
    """The menu of the page about this object."""
    return ActionMenu(tuple(each.menu_item(thing, access) for each in actions))


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionPage(Generic[T]):
    """A page for an action whose effect is predicted from its form: GET shows the prediction, POST acts.

    `context` fills the template in both cases. `predict` adds the prediction and may raise a refusal. `deployment`
    names the deployment in the form, if the target has none."""

    action: Action[T]
    template: str
    context: Callable[[Submission, T], Context]
    predict: Callable[[Submission, T], Context] = lambda form, thing: {}
    deployment: Callable[[Submission], str] = lambda form: ""


def action_view(*actions: Action[T]) -> View:
    """The view of one action, or of several whose URL names one in its argument `action`. GET shows the form of an
    action that predicts its effect; a refusal shows it again with what was typed."""
    by_name = {action.name: action for action in actions}

    @never_cache
    @sensitive_post_parameters(*SECRETS)
    def view(request: HttpRequest, **arguments: Any) -> HttpResponse:
        name = arguments.pop("action", actions[0].name)
        action = by_name.get(name, actions[0])
        if not request.user.is_authenticated:
            return redirect_to_login(request.get_full_path())
        methods = ["GET", "HEAD", "POST"] if action.effect else ["POST"]
        if request.method not in methods:
            return HttpResponseNotAllowed(methods)
        thing = _find(request, action, arguments)
        if name not in by_name:
            raise Http404(f"There is no action {name!r} for this {action.target.noun}.")
        form = Submission(request, clock.now())
        try:
            return _run_action(action, form, thing) if form.is_post else _form_page(action, form, thing)
        except FactorNeeded:
            return to_confirmation(request.path if action.effect else action.target.url(thing))
        except Busy as busy:
            response = _refused_form(action, form, thing, str(busy), 503)
            response.headers["Retry-After"] = str(math.ceil(busy.retry_after_s))
            return response
        except Refusal as refusal:
            return _refused_form(action, form, thing, str(refusal), 409)

    return view


def _form_page(action: Action[T], form: Submission, thing: T, reason: str = "", status: int = 200) -> HttpResponse:
    effect = action.effect(thing, form.now) if action.effect else ""
    confirmation = action.confirmation(thing, form.request.path, effect).with_values_of(form)
    context = {
        "confirmation": confirmation,
        "refused": reason,
        "why_not": "" if reason else action.why_not(thing),
        "name": action.target.name(thing),
        "back": action.target.url(thing),
    }
    return render(form.request, "dashboard/action.html", context, status=status)


def _refused_form(action: Action[T], form: Submission, thing: T, reason: str, status: int) -> HttpResponse:
    if action.effect:
        return _form_page(action, form, thing, reason, status)
    return refused(form.request, action.target, thing, reason, status)


def action(
    target: Target[T], role: Role = Role.OPERATOR, present: Callable[[T], Mapping[str, object]] | None = None
) -> Callable[[Run[T]], View]:
    """Decorator for a function that calls the service: the view of an action whose form is in a page's template.
    `present`: as in `Action`; the template has `{% seen %}`."""

    def decorate(run: Run[T]) -> View:
        return action_view(Action(target=target, run=run, role=role, present=present))

    return decorate


def action_page_view(page: ActionPage[T]) -> View:
    """The view of an action with its own page. Refusals are shown there, above the form."""
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
            return to_confirmation(request.path)

    return view


def _act_or_predict(page: ActionPage[T], form: Submission, thing: T) -> HttpResponse:
    reason = ""
    if form.is_post:
        try:
            return _run_action(page.action, form, thing)
        except Refusal as refusal:
            reason = str(refusal)
    context = page.context(form, thing)
    try:
        context |= page.predict(form, thing)
    except Refusal as refusal:
        reason = reason or str(refusal)
    context["refused"] = reason
    return render(form.request, page.template, context, status=409 if reason else 200)


def to_confirmation(url: str) -> HttpResponse:
    """Redirects to the second factor and back. The user types the confirmation again."""
    return redirect(f"{reverse('factor-confirm')}?{urlencode({'next': url})}")


def refused(request: HttpRequest, target: Target[T], thing: T, reason: str, status: int = 409) -> HttpResponse:
    context = {"refused": reason, "back": target.name(thing), "url": target.url(thing)}
    return render(request, "dashboard/action_refused.html", context, status=status)


def secret_shown(request: HttpRequest, *, what: str, name: str, text: str, use: str, url: str) -> HttpResponse:
    """Shows a new secret, only once."""
    context = {"what": what, "name": name, "text": text, "use": use, "url": url}
    return render(request, "dashboard/secret.html", context)


def _find(request: HttpRequest, action: Action[T], arguments: dict[str, Any], deployment: str = "") -> T:
    """The target, for users who may change it. Raises PermissionDenied if the user may not, whether it exists or not.
    Raises Http404 if it does not exist."""
    try:
        thing = action.target.find(**arguments)
    except Http404:
        require(request, action.role, deployment)
        raise
    require(request, action.role, action.target.deployment(thing) or deployment)
    return thing


def refuse_newer(form: Submission, changed_at: datetime, now_is: str, sent: str) -> None:
    """For a form whose fields choose the object, with `{% opened %}`. Raises Conflict if the object has changed since
    the form was opened. `now_is`: a clause about the object and who changed it; `sent`: the value in the form."""
    try:
        opened = datetime.fromisoformat(form.text("opened"))
    except ValueError:
        return
    if opened.tzinfo is not None and changed_at > opened:
        raise Conflict(f"{now_is} while this form was open, so nothing was overwritten; you sent {sent}")


def _refuse_stale(action: Action[T], form: Submission, thing: T) -> None:
    """Raises Conflict if stored values have changed since the form was opened: it would overwrite them unseen."""
    try:
        seen = decode_json(form.text("seen", longest=MAX_SEEN) or "{}")
    except ValueError:
        seen = {}
    if not isinstance(seen, dict) or not seen:
        return
    stored = decode_json(seen_text(action.stored(thing)))
    changed = []
    for name, now in stored.items():
        sent, then = ", ".join(form.texts(name)), str(seen.get(name, now))[:MAX_TEXT]
        if now not in {then, sent}:
            field = name.replace("_", " ")
            changed.append(f"{field} is {now or 'empty'} now; it was {then or 'empty'}, and you sent {sent or 'empty'}")
    if changed:
        raise Conflict(f"changed while this form was open, so nothing was overwritten: {'; '.join(changed)}")


def _run_action(action: Action[T], form: Submission, thing: T) -> HttpResponse:
    """Carry out the action, and redirect. Raises Refusal, and then nothing was changed."""
    _refuse_stale(action, form, thing)
    wanted = action.typed(thing) if action.typed else ""
    if wanted and (typed := form.text("confirm")) != wanted:
        raise InvalidInput(field="confirm", rule="named", message=f"type {wanted} to confirm; you typed {typed!r}")
    result = action.run(form, thing)
    if isinstance(result, HttpResponse):
        return result
    return redirect("approvals" if isinstance(result, Approval) else action.target.url(thing))
