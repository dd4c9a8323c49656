"""What people ask on the settings pages of accounts: tokens, sessions, users, groups, grants, approvals."""

from collections.abc import Callable
from typing import Any

from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_POST

from accounts.api.groups import ChangeGroupSerializer, CreateGroupSerializer, GiveSerializer
from accounts.api.tokens import CreateTokenSerializer
from accounts.api.users import CreateServiceAccountSerializer, CreateUserSerializer
from accounts.models import Approval, Grant, GroupRole
from accounts.permissions import require_human, require_may_reject, token_owner
from accounts.selectors import visible_sessions, visible_tokens
from accounts.services.approval import approval_approve, approval_reject, approval_rule_set
from accounts.services.grant import grant_give, grant_take
from accounts.services.group import group_change, group_create, group_delete
from accounts.services.login import Attempt, login_failure_record, login_wait_s
from accounts.services.session import session_end
from accounts.services.token import token_create_within, token_revoke
from accounts.services.user import password_change, service_account_create, user_change, user_create
from controlplane.dashboard.pages.settings_asks import actor, ask, checked, refused, shown, word, words
from kernel import clock
from kernel.access import Role, access_of, needs

View = Callable[..., HttpResponse]


def form(role: Role) -> Callable[[View], View]:
    """A form of the settings: by POST, for this role, never cached."""

    def decorate(view: View) -> View:
        return never_cache(
            needs(role)(require_POST(sensitive_post_parameters("password", "old_password", "new_password")(view)))
        )

    return decorate


@form(Role.VIEWER)
def token_new(request: HttpRequest) -> HttpResponse:
    """A token for oneself or, for admins, for a program; its text is shown once."""

    def make() -> HttpResponse:
        fields = ("name", "scope", "expires_in_days", "service_account")
        asked = checked(CreateTokenSerializer, {name: word(request, name) for name in fields})
        token, text = token_create_within(
            user=token_owner(request, asked.get("service_account", "")),
            name=asked["name"],
            days=asked["expires_in_days"],
            scope=asked["scope"],
            shown=None,
            actor=actor(request),
            now=clock.now(),
        )
        use = "Programs send it as Authorization: Bearer …; switchyard login takes it, too."
        return shown(request, "settings", what="API token", name=token.name, text=text, use=use)

    return ask(request, "settings", make)


@form(Role.VIEWER)
def token_end(request: HttpRequest, prefix: str) -> HttpResponse:
    token = get_object_or_404(visible_tokens(request.user, access_of(request)), prefix=_storable(prefix))
    return ask(request, "settings", lambda: token_revoke(token=token, actor=actor(request), now=clock.now()))


@form(Role.VIEWER)
def session_end_now(request: HttpRequest, session_id: int) -> HttpResponse:
    now = clock.now()
    session = get_object_or_404(visible_sessions(request.user, access_of(request), now), pk=session_id)
    return ask(request, "settings", lambda: session_end(session=session, actor=actor(request), now=now))


@form(Role.VIEWER)
def password_change_ask(request: HttpRequest) -> HttpResponse:
    """One's own password. Wrong old ones count as wrong logins do; a right one leads to the login."""
    user, now = get_object_or_404(User, pk=request.user.pk or 0), clock.now()
    attempt = Attempt(username=user.username, address=request.META.get("REMOTE_ADDR") or "")
    old, new = request.POST.get("old_password", ""), request.POST.get("new_password", "")[:128]
    if login_wait_s(attempt=attempt, now=now) > 0:
        return refused(request, "settings", "too many wrong passwords; try again in a few minutes", 429)
    if not user.check_password(old):
        login_failure_record(attempt=attempt, now=now)
        return refused(request, "settings", "the old password is not right", 403)
    return ask(request, "settings", lambda: password_change(user=user, new=new, now=now))


@form(Role.ADMIN)
def user_new(request: HttpRequest) -> HttpResponse:
    def make() -> object:
        given: dict[str, Any] = {"username": word(request, "username"), "groups": words(request, "groups")}
        given["password"] = request.POST.get("password", "")
        return user_create(actor=actor(request), now=clock.now(), **checked(CreateUserSerializer, given))

    return ask(request, "settings-users", make)


@form(Role.ADMIN)
def program_new(request: HttpRequest) -> HttpResponse:
    def make() -> object:
        given: dict[str, Any] = {name: word(request, name) for name in ("name", "description")}
        given["groups"] = words(request, "groups")
        asked = checked(CreateServiceAccountSerializer, given)
        return service_account_create(actor=actor(request), now=clock.now(), **asked)

    return ask(request, "settings-users", make)


@form(Role.ADMIN)
def user_change_ask(request: HttpRequest, username: str) -> HttpResponse:
    """Groups, password, or whether active: what the form says it is about, and nothing else."""
    user = get_object_or_404(User, username=_storable(username))
    changes: dict[str, Callable[[], dict[str, Any]]] = {
        "groups": lambda: {"groups": words(request, "groups")},
        "password": lambda: {"password": request.POST.get("password", "")[:128]},
        "active": lambda: {"active": word(request, "active") == "yes"},
    }
    what = changes.get(word(request, "what"), dict)()
    return ask(
        request,
        "settings-users",
        lambda: user_change(username=user.username, actor=actor(request), now=clock.now(), **what),
    )


@form(Role.ADMIN)
def group_new(request: HttpRequest) -> HttpResponse:
    def make() -> object:
        asked = checked(CreateGroupSerializer, {name: word(request, name) for name in ("name", "role", "claim")})
        return group_create(actor=actor(request), now=clock.now(), **asked)

    return ask(request, "settings-groups", make)


@form(Role.ADMIN)
def group_change_ask(request: HttpRequest, name: str) -> HttpResponse:
    group = get_object_or_404(GroupRole, group__name=_storable(name))

    def change() -> object:
        role = checked(ChangeGroupSerializer, {"role": word(request, "role")}).get("role")
        claim = word(request, "claim")[:256]
        return group_change(name=group.group.name, role=role, claim=claim, actor=actor(request), now=clock.now())

    return ask(request, "settings-groups", change)


@form(Role.ADMIN)
def group_delete_ask(request: HttpRequest, name: str) -> HttpResponse:
    group = get_object_or_404(GroupRole, group__name=_storable(name))
    return ask(
        request,
        "settings-groups",
        lambda: group_delete(name=group.group.name, actor=actor(request), now=clock.now()),
    )


@form(Role.ADMIN)
def grant_new(request: HttpRequest) -> HttpResponse:
    def give() -> object:
        asked = checked(GiveSerializer, {name: word(request, name) for name in ("deployment", "user", "group")})
        return grant_give(actor=actor(request), now=clock.now(), **asked)

    return ask(request, "settings-groups", give)


@form(Role.ADMIN)
def grant_take_ask(request: HttpRequest, grant_id: int) -> HttpResponse:
    grant = get_object_or_404(Grant.objects.select_related("user", "group"), pk=grant_id)
    return ask(request, "settings-groups", lambda: grant_take(grant=grant, actor=actor(request), now=clock.now()))


@form(Role.ADMIN)
def approval_approve_ask(request: HttpRequest, approval_id: int) -> HttpResponse:
    require_human(request)
    row = get_object_or_404(Approval, pk=approval_id)
    return ask(
        request, "approvals", lambda: approval_approve(approval_id=row.pk, actor=actor(request), now=clock.now())
    )


@form(Role.VIEWER)
def approval_reject_ask(request: HttpRequest, approval_id: int) -> HttpResponse:
    row = get_object_or_404(Approval, pk=approval_id)
    require_may_reject(request, row)
    why = word(request, "why")[:200]
    return ask(
        request,
        "approvals",
        lambda: approval_reject(approval_id=row.pk, actor=actor(request), now=clock.now(), why=why),
    )


@form(Role.ADMIN)
def approval_rule_ask(request: HttpRequest, name: str) -> HttpResponse:
    required = word(request, "required") == "yes"
    return ask(
        request,
        "approvals",
        lambda: approval_rule_set(name=name, required=required, actor=actor(request), now=clock.now()),
    )


def _storable(text: str) -> str:
    return text.replace("\x00", "\ufffd")
