"""The settings: the user's tokens and sessions; users, groups, approvals, webhooks and fault rules for those who may
see them; and the actions of their forms. Fragments with forms have no topics, so that a refetch never discards input.
"""

from collections.abc import Callable
from typing import Any

from django.contrib.auth.models import User
from django.http import Http404, HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.urls import reverse

from accounts.api.tokens import CreateTokenSerializer
from accounts.api.users import (
    ChangeGroupSerializer,
    CreateServiceAccountSerializer,
    GiveSerializer,
)
from accounts.models import Approval, Grant, GroupRole
from accounts.oidc import Finding
from accounts.permissions import require_fresh_factor, require_human, require_may_reject, token_owner
from accounts.selectors import visible_sessions, visible_tokens
from accounts.services.account_change import account_change
from accounts.services.approval import approval_approve, approval_reject, approval_rule_set
from accounts.services.login import Attempt, attempt_count, attempt_forget
from accounts.services.session import session_end
from accounts.services.token import token_create_within, token_revoke
from accounts.services.user import password_change
from controlplane.dashboard.actions import Submission, action, page_target, refused, secret_shown
from controlplane.dashboard.fragments import Fragment, Load, Page
from controlplane.dashboard.lists import List
from controlplane.dashboard.settings import data as read
from controlplane.dashboard.settings import lists
from controlplane.dashboard.settings.single_sign_on import sign_on_view, tested
from controlplane.dashboard.settings.wizards import webhook_secret_shown
from fleet.faults.api import SetModeSerializer
from fleet.faults.models import FaultRule
from fleet.faults.planning.views import SETTABLE_RULES, Rule, RuleMode
from fleet.faults.services.watch import fault_rule_set
from fleet.webhooks.api import ChangeWebhookSerializer
from fleet.webhooks.models import Webhook
from fleet.webhooks.planner import WebhookFormat
from fleet.webhooks.services import (
    webhook_change,
    webhook_delete,
    webhook_secret_rotate,
    webhook_test,
    webhook_try,
)
from kernel.access import Role, access_of
from kernel.refusals import InvalidInput
from models_registry.versions.api.version_requests import AllowSerializer
from models_registry.versions.models import EngineAllowance
from models_registry.versions.services.drafts import engine_allowance_request, engine_allowance_withdraw

MAX_CLAIM = 256
MAX_REASON = 200


def _settings_fragment(name: str, title: str, load: Load, *topics: str) -> Fragment:
    return Fragment(f"settings-{name}", title, topics, f"dashboard/settings/{name}.html", load)


def _list_fragment(listed: List[Any], name: str, title: str, *topics: str) -> Fragment:
    return _settings_fragment(name, title, listed.page, *topics)


def _page(title: str, role: Role, *fragments: Fragment, lists: tuple[List[Any], ...]) -> Page:
    tabs = _settings_fragment("tabs", "", lambda request: title)
    return Page(section="settings", title="Settings", fragments=(tabs, *fragments), role=role, lists=lists)


SETTINGS = _page(
    "You",
    Role.VIEWER,
    _settings_fragment("me", "You", lambda request: read.own_access(request.caller)),
    _settings_fragment("factors", "Second factor", lambda request: read.factors_view(request.caller)),
    _list_fragment(lists.TOKEN_LIST, "tokens", "API tokens"),
    _list_fragment(lists.SESSION_LIST, "sessions", "Sessions", "sessions"),
    lists=(lists.TOKEN_LIST, lists.SESSION_LIST),
)
USERS = _page(
    "Users",
    Role.ADMIN,
    _list_fragment(read.USER_LIST, "users", "Users"),
    _list_fragment(read.SERVICE_ACCOUNT_LIST, "service-accounts", "Service accounts"),
    lists=(read.USER_LIST, read.SERVICE_ACCOUNT_LIST),
)
GROUPS = _page(
    "Groups",
    Role.ADMIN,
    _list_fragment(read.GROUP_LIST, "groups", "Groups"),
    _list_fragment(lists.GRANT_LIST, "grants", "Grants for one deployment"),
    lists=(read.GROUP_LIST, lists.GRANT_LIST),
)
SINGLE_SIGN_ON = _page(
    "Single sign-on",
    Role.ADMIN,
    _settings_fragment("single-sign-on", "Single sign-on", lambda request: sign_on_view()),
    lists=(),
)
APPROVALS = _page(
    "Approvals",
    Role.VIEWER,
    _list_fragment(lists.PENDING_LIST, "pending", "Pending", "approvals"),
    _list_fragment(lists.APPROVAL_RULE_LIST, "approval-rules", "Two-person approval"),
    _list_fragment(lists.DECIDED_LIST, "decided", "Decided", "approvals"),
    lists=(lists.PENDING_LIST, lists.APPROVAL_RULE_LIST, lists.DECIDED_LIST),
)
WEBHOOKS = _page(
    "Webhooks",
    Role.VIEWER,
    _list_fragment(lists.WEBHOOK_LIST, "webhooks", "Webhooks"),
    _list_fragment(read.DELIVERY_LIST, "deliveries", "Deliveries", "events", "webhooks"),
    lists=(lists.WEBHOOK_LIST, read.DELIVERY_LIST),
)
ALLOWANCES = _page(
    "Allowances",
    Role.VIEWER,
    _list_fragment(lists.ALLOWANCE_LIST, "allowances", "Engine options beyond the lists"),
    lists=(lists.ALLOWANCE_LIST,),
)
FAULT_RULES = _page(
    "Rules",
    Role.VIEWER,
    _list_fragment(lists.FAULT_RULE_LIST, "fault-rules", "Fault rules"),
    lists=(lists.FAULT_RULE_LIST,),
)

OWN = page_target("settings")
TRY_SECRET = "a test from the form"  # noqa: S105 - the webhook has its own secret once it exists
LOGGED_IN = "logged in"
"""Key under which wrong old passwords are counted, separate from failed logins."""
USERS_PAGE = page_target("settings-users")
GROUPS_PAGE = page_target("settings-groups")
APPROVALS_PAGE = page_target("approvals")
WEBHOOKS_PAGE = page_target("settings-webhooks")
ALLOWANCES_PAGE = page_target("settings-allowances")
RULES_PAGE = page_target("settings-rules")


@action(OWN, Role.VIEWER)
def token_new(form: Submission, _: None) -> HttpResponse:
    """Create a token for oneself or, for admins, for a service account; its text is shown once."""
    require_fresh_factor(form.request, form.now)
    fields = form.valid(CreateTokenSerializer, "name", "scope", "expires_in_days", "service_account")
    token, text = token_create_within(
        user=token_owner(form.request, fields.get("service_account", "")),
        name=fields["name"],
        days=fields["expires_in_days"],
        scope=fields["scope"],
        shown=None,
        actor=form.actor,
        now=form.now,
    )
    use = "Send it as Authorization: Bearer …, or give it to switchyard login."
    url = reverse("settings")
    return secret_shown(form.request, what="API token", name=token.name, text=text, use=use, url=url)


@action(OWN, Role.VIEWER)
def token_revoke_action(form: Submission, prefix: str) -> None:
    tokens = visible_tokens(form.request.user, access_of(form.request))
    token_revoke(token=get_object_or_404(tokens, prefix=prefix), actor=form.actor, now=form.now)


@action(OWN, Role.VIEWER)
def session_end_action(form: Submission, session_id: int) -> None:
    sessions = visible_sessions(form.request.user, access_of(form.request), form.now)
    session_end(session=get_object_or_404(sessions, pk=session_id), actor=form.actor, now=form.now)


@action(OWN, Role.VIEWER)
def password_change_action(form: Submission, _: None) -> HttpResponse | None:
    """Changes the user's password. Wrong old passwords are counted; success leads to the login."""
    require_fresh_factor(form.request, form.now)
    user = get_object_or_404(User.objects.select_for_update(), pk=form.request.user.pk or 0)
    attempt = Attempt(username=user.username, address="", device=LOGGED_IN)
    if attempt_count(attempt=attempt, now=form.now) > 0:
        return refused(form.request, OWN, None, "too many wrong passwords; try again in a few minutes", 429)
    if not (user.password and user.has_usable_password()):
        return refused(form.request, OWN, None, "you have no password here: you log in with the identity provider", 403)
    if not user.check_password(form.secret("old_password")):
        return refused(form.request, OWN, None, "the old password is wrong", 403)
    attempt_forget(attempt=attempt, at=form.now)
    password_change(user=user, new=form.secret("new_password"), now=form.now)
    return None


@action(USERS_PAGE, Role.ADMIN)
def service_account_new(form: Submission, _: None) -> object:
    fields = form.valid(CreateServiceAccountSerializer, "name", "description", groups=form.texts("groups"))
    return account_change("create service account", actor=form.actor, now=form.now, **fields)


def _stored_groups(username: str) -> dict[str, object]:
    names = User.objects.filter(username=username).values_list("groups__name", flat=True)
    return {"groups": ", ".join(sorted(name for name in names if name))}


@action(USERS_PAGE, Role.ADMIN, present=_stored_groups)
def user_change_action(form: Submission, username: str) -> object:
    """Changes groups, password, second factors or the active flag: only what the form's `what` names."""
    user = get_object_or_404(User, username=username)
    what = form.text("what")
    if what in {"password", "factors"}:
        require_fresh_factor(form.request, form.now)
    if what == "factors":
        return account_change("remove second factors", username=user.username, actor=form.actor, now=form.now)
    changes: dict[str, Callable[[], dict[str, Any]]] = {
        "groups": lambda: {"groups": form.texts("groups")},
        "password": lambda: {"password": form.secret("password")},
        "active": lambda: {"active": form.text("active") == "yes"},
    }
    change = changes.get(what, dict)()
    return account_change("change user", username=user.username, actor=form.actor, now=form.now, **change)


def _stored_group(name: str) -> dict[str, object]:
    row = GroupRole.objects.filter(group__name=name).first()
    return {"role": row.role, "claim": row.claim} if row else {}


@action(GROUPS_PAGE, Role.ADMIN, present=_stored_group)
def group_change_action(form: Submission, name: str) -> object:
    role = form.valid(ChangeGroupSerializer, "role").get("role")
    claim = form.text("claim", longest=MAX_CLAIM)
    return account_change("change group", name=_group(name), role=role, claim=claim, actor=form.actor, now=form.now)


@action(GROUPS_PAGE, Role.ADMIN)
def group_delete_action(form: Submission, name: str) -> object:
    return account_change("delete group", name=_group(name), actor=form.actor, now=form.now)


def _group(name: str) -> str:
    return get_object_or_404(GroupRole, group__name=name).group.name


@action(GROUPS_PAGE, Role.ADMIN)
def grant_new(form: Submission, _: None) -> object:
    fields = form.valid(GiveSerializer, "deployment", "user", "group")
    return account_change("give grant", actor=form.actor, now=form.now, **fields)


@action(GROUPS_PAGE, Role.ADMIN)
def grant_revoke_action(form: Submission, grant_id: int) -> object:
    grant = get_object_or_404(Grant, pk=grant_id)
    return account_change("take grant", grant_id=grant.pk, actor=form.actor, now=form.now)


@action(APPROVALS_PAGE, Role.ADMIN)
def approval_approve_action(form: Submission, approval_id: int) -> None:
    require_human(form.request)
    require_fresh_factor(form.request, form.now)
    approval = get_object_or_404(Approval, pk=approval_id)
    approval_approve(approval_id=approval.pk, actor=form.actor, now=form.now)


@action(APPROVALS_PAGE, Role.VIEWER)
def approval_reject_action(form: Submission, approval_id: int) -> None:
    approval = get_object_or_404(Approval, pk=approval_id)
    require_may_reject(form.request, approval)
    why = form.text("why", longest=MAX_REASON)
    approval_reject(approval_id=approval.pk, actor=form.actor, now=form.now, why=why)


@action(APPROVALS_PAGE, Role.ADMIN)
def approval_rule_action(form: Submission, name: str) -> None:
    required = form.text("required") == "yes"
    approval_rule_set(name=name, required=required, actor=form.actor, now=form.now)


@action(WEBHOOKS_PAGE, Role.ADMIN)
def webhook_try_action(form: Submission, _: None) -> HttpResponse:
    """Sends a test message to the typed receiver, or without a URL to that of the named webhook, and shows the
    answer."""
    url, hook = form.text("url"), Webhook.objects.filter(name=form.text("name")).first()
    if not url and hook is None:
        return tested(form.request, [Finding("There is no URL yet.", is_ok=False)], WEBHOOKS_PAGE.url(None))
    secret = hook.secret if hook is not None and not url else TRY_SECRET
    try:
        fields = form.valid(ChangeWebhookSerializer, url=url or (hook.url if hook else ""), format=form.text("format"))
    except InvalidInput as invalid:
        return tested(form.request, [Finding(f"{invalid}.", is_ok=False)], WEBHOOKS_PAGE.url(None))
    kind = WebhookFormat(fields.get("format", WebhookFormat.JSON))
    sent = webhook_try(url=fields["url"], kind=kind, secret=secret, actor=form.actor, now=form.now)
    answer = f"The receiver answered {sent.status}." if sent.delivered else f"Not delivered: {sent.reason}."
    return tested(form.request, [Finding(answer, is_ok=sent.delivered)], WEBHOOKS_PAGE.url(None))


@action(WEBHOOKS_PAGE)
def webhook_test_action(form: Submission, name: str) -> None:
    webhook_test(name=_webhook(name), actor=form.actor, now=form.now)


@action(WEBHOOKS_PAGE, Role.ADMIN)
def webhook_switch_action(form: Submission, name: str) -> None:
    enabled = form.text("enabled") == "yes"
    webhook_change(name=_webhook(name), actor=form.actor, now=form.now, enabled=enabled)


@action(WEBHOOKS_PAGE, Role.ADMIN)
def webhook_rotate_action(form: Submission, name: str) -> HttpResponse:
    hook = webhook_secret_rotate(name=_webhook(name), actor=form.actor, now=form.now)
    return webhook_secret_shown(form.request, hook)


@action(WEBHOOKS_PAGE, Role.ADMIN)
def webhook_delete_action(form: Submission, name: str) -> None:
    webhook_delete(name=_webhook(name), actor=form.actor, now=form.now)


def _webhook(name: str) -> str:
    return get_object_or_404(Webhook, name=name).name


@action(ALLOWANCES_PAGE, Role.ADMIN)
def allowance_new(form: Submission, _: None) -> HttpResponse | None:
    """Allow an option or a variable, or request the approval that it needs."""
    fields = form.valid(AllowSerializer, "engine", "name", "why")
    row = engine_allowance_request(actor=form.actor, now=form.now, **fields)
    return redirect("approvals") if isinstance(row, Approval) else None


@action(ALLOWANCES_PAGE, Role.ADMIN)
def allowance_withdraw_action(form: Submission, id: int) -> None:
    row = get_object_or_404(EngineAllowance, pk=id)
    engine_allowance_withdraw(allowance_id=row.pk, actor=form.actor, now=form.now)


def _stored_mode(name: str) -> dict[str, object]:
    row = FaultRule.objects.filter(pk=name).first()
    return {"mode": row.mode if row else RuleMode.ON.value}


@action(RULES_PAGE, Role.ADMIN, present=_stored_mode)
def fault_rule_action(form: Submission, name: str) -> None:
    if name not in SETTABLE_RULES:
        raise Http404(f"There is no rule {name!r}.")
    mode = RuleMode(form.valid(SetModeSerializer, "mode")["mode"])
    fault_rule_set(rule=Rule(name), mode=mode, actor=form.actor, now=form.now, why="")
