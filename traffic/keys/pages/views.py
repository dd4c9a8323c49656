"""Views of application keys: the list, one key with its actions, the form for a new one, and the key policy."""

from datetime import datetime
from typing import Any

from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import get_object_or_404
from django.urls import reverse

from controlplane.dashboard.actions import (
    REQUIRED_WHY,
    WHY,
    Action,
    ActionMenu,
    ActionPage,
    Confirmation,
    Field,
    Submission,
    Target,
    action,
    action_menu,
    action_page_view,
    action_view,
    page_target,
    secret_shown,
)
from controlplane.dashboard.charts import Chart
from controlplane.dashboard.choices import choose, choose_labelled
from controlplane.dashboard.events import marked
from controlplane.dashboard.fragments import Context, Filter, Fragment, Page, PageRequest, found_or_404
from engine_agent.protocol.states import ServingClass
from fleet.deployments.models import Deployment
from fleet.reconcile.planning.states import choices
from fleet.requests.models import RequestSample
from fleet.requests.pages import FAILED_SHOWN
from kernel import clock
from kernel.access import Role
from traffic.keys.api import ChangeKeySerializer, CreateKeySerializer
from traffic.keys.models import ApplicationKey
from traffic.keys.pages.data import (
    INGRESS_KEYS_LIST,
    KEY_LIST,
    TENANT_GRANT_LIST,
    TENANT_WEBHOOK_LIST,
    KeyDetail,
    KeyUse,
    PolicyView,
    key_chart,
    key_find,
    key_tenants,
    key_use,
    policy_view,
    tenant_chart,
    usage_rows,
)
from traffic.keys.planner import LIMITS, KeyState
from traffic.keys.selectors import failed_requests_of
from traffic.keys.services import key_change, key_create, key_revoke, key_rotate, keys_require
from traffic.tenants.api import CreateTenantGrantSerializer, CreateTenantWebhookSerializer
from traffic.tenants.models import TenantGrant, TenantWebhook
from traffic.tenants.services import (
    NewSecret,
    tenant_grant_create,
    tenant_grant_withdraw,
    tenant_webhook_create,
    tenant_webhook_remove,
    tenant_webhook_rotate,
)
from traffic.usage.api.costs import ChangeBudgetSerializer
from traffic.usage.models import Budget
from traffic.usage.planning.counting import BudgetUnit
from traffic.usage.services.budgets import budget_change, budget_create, budget_delete

FORM_FIELDS = ("name", "tenant", "serving_class", *LIMITS, "expires_at")
LIMIT_EFFECT = "Ingresses apply it within seconds. 0 means no limit. Each region counts separately."
ORIGINS_EFFECT = "Pages of these origins may use the key from a browser, where their users can read it."
ROTATE_EFFECT = (
    "A new key with the same limits is shown once. Both share the spend limit. This one expires within 24 hours."
)
SPEND_EFFECT = (
    "Counts charges for tokens from the first of the month (UTC). 50, 80 and 100 per cent open an incident. "
    "An empty limit removes it."
)
HOW_TO_VERIFY = "Its receiver checks messages by client.webhooks.unwrap(body, headers, secret=…) of OpenAI's client."
HOW_TO_USE = "Send it as Authorization: Bearer …, or as the api_key of an OpenAI client."


def _filter(request: PageRequest) -> Filter:
    options = (("", "all"), *choices(KeyState))
    state = choose_labelled(request, "state", options)
    tenant = choose(request, "tenant", "every tenant", key_tenants())
    return Filter(text_label="Name, tenant or sw_…", text_name="q", text=request.text("q"), choices=(state, tenant))


def _key_policy_view(request: PageRequest) -> tuple[PolicyView, Confirmation]:
    policy = policy_view(request.now)
    action = SERVE_WITHOUT_KEYS if policy.required else REQUIRE_KEYS
    return policy, action.confirmation(None, reverse("keys-require"), policy.effect)


def _key_detail(request: PageRequest) -> KeyDetail:
    return found_or_404(key_find(request.key, request.now), f"key {request.key!r}")


def _actions(request: PageRequest) -> ActionMenu:
    return action_menu(request.once(_key_detail).row.key, request.caller.access, *KEY_ACTIONS)


def _use(request: PageRequest) -> KeyUse | None:
    return key_use(request.once(_key_detail).row.key)


def _key_usage(request: PageRequest) -> tuple[dict[str, Any], ...]:
    return usage_rows(request.now, key=request.once(_key_detail).row.key.prefix)


def _key_failed(request: PageRequest) -> tuple[RequestSample, ...]:
    prefix = request.once(_key_detail).row.key.prefix
    return tuple(failed_requests_of(request.now, key=prefix)[:FAILED_SHOWN])


def _key_chart(request: PageRequest) -> tuple[Chart, ...]:
    return marked([key_chart(request.once(_key_detail).row.key.prefix, request.now)])


def _tenant_chart(request: PageRequest) -> tuple[Chart, ...]:
    chart = tenant_chart(request.now)
    return marked([chart] if chart.series else [])


def _tenant_usage(request: PageRequest) -> tuple[dict[str, Any], ...]:
    return usage_rows(request.now, tenant=request.once(_key_detail).row.key.tenant)


KEYS = Page(
    section="keys",
    title="Keys",
    charts=True,
    fragments=(
        Fragment("keys-table", "", ("keys", "usage"), "traffic/keys/table.html", KEY_LIST.page),
        Fragment("keys-usage", "Usage, last 48 hours", ("usage",), "dashboard/charts/several.html", _tenant_chart),
        Fragment(
            "keys-grants",
            "Grants of tenants",
            ("keys",),
            "traffic/keys/grants.html",
            TENANT_GRANT_LIST.page,
        ),
        Fragment(
            "keys-webhooks",
            "Webhooks of tenants",
            ("keys",),
            "traffic/keys/webhooks.html",
            TENANT_WEBHOOK_LIST.page,
        ),
        Fragment("keys-policy", "Key policy", ("keys", "traffic"), "traffic/keys/policy.html", _key_policy_view),
        Fragment(
            "keys-ingresses",
            "Keys on ingresses",
            ("keys", "traffic"),
            "traffic/keys/ingresses.html",
            INGRESS_KEYS_LIST.page,
        ),
    ),
    narrow=_filter,
    lists=(KEY_LIST, TENANT_GRANT_LIST, TENANT_WEBHOOK_LIST, INGRESS_KEYS_LIST),
)

KEY = Page(
    section="keys",
    title="",
    actions=_actions,
    charts=True,
    fragments=(
        Fragment("key", "", ("keys:{key}", "usage"), "traffic/keys/key.html", _key_detail),
        Fragment("key-use", "Use it", (), "traffic/keys/use.html", _use),
        Fragment("key-chart", "Usage, last 48 hours", ("usage",), "dashboard/charts/several.html", _key_chart),
        Fragment("key-usage", "Requests, by hour", ("usage",), "traffic/keys/usage.html", _key_usage),
        Fragment("key-failed", "Failed requests, 24 h", ("usage",), "traffic/keys/key_failed.html", _key_failed),
        Fragment("key-tenant", "Tenant usage by hour", ("usage",), "traffic/keys/tenant.html", _tenant_usage),
    ),
)


def _find_key(key: str) -> ApplicationKey:
    return found_or_404(ApplicationKey.objects.filter(prefix=key).first(), f"key {key!r}")


def _change_limits(form: Submission, key: ApplicationKey) -> None:
    limits = form.valid(ChangeKeySerializer, **{name: form.text(name) or "0" for name in LIMITS})
    key_change(prefix=key.prefix, actor=form.actor, now=form.now, **limits)


def _limit_fields(key: ApplicationKey) -> tuple[Field, ...]:
    labels = {
        "requests_per_min": "Requests/min",
        "tokens_per_min": "Tokens/min",
        "max_concurrent": "Concurrent",
    }
    return tuple(Field(name, label, "number", getattr(key, name), least=0) for name, label in labels.items())


def _set_origins(form: Submission, key: ApplicationKey) -> None:
    fields = form.valid(ChangeKeySerializer, allowed_origins=form.text("allowed_origins").split())
    key_change(prefix=key.prefix, actor=form.actor, now=form.now, **fields)


def _origin_fields(key: ApplicationKey) -> tuple[Field, ...]:
    return (Field("allowed_origins", "Origins, separated by blanks", value=" ".join(key.allowed_origins)),)


def _set_spend_limit(form: Submission, key: ApplicationKey) -> None:
    """Creates, changes or removes the key's budget in US dollars."""
    there = Budget.objects.filter(key=key.budget_key, unit=BudgetUnit.USD.value).first()
    if not form.text("limit"):
        if there is not None:
            budget_delete(budget_id=there.pk, actor=form.actor, now=form.now)
        return
    fields = form.valid(ChangeBudgetSerializer, "limit", hard_stop=form.text("hard_stop") == "yes")
    if there is None:
        budget_create(key=key.prefix, unit=BudgetUnit.USD.value, **fields, actor=form.actor, now=form.now)
    else:
        budget_change(budget_id=there.pk, **fields, actor=form.actor, now=form.now)


def _spend_fields(key: ApplicationKey) -> tuple[Field, ...]:
    detail = key_find(key.prefix, clock.now())
    budget = detail.spend_limit if detail else None
    limit = f"{budget.limit.normalize():f}" if budget else ""
    stops = budget is None or budget.hard_stop
    return (
        Field("limit", "US dollars a month", "number", limit, step="0.01"),
        Field("hard_stop", "Refuse the key at 100 per cent", "checkbox", "yes", checked=stops),
    )


def _rotate_key(form: Submission, key: ApplicationKey) -> HttpResponse:
    new = key_rotate(prefix=key.prefix, actor=form.actor, now=form.now)
    return _new_key_page(form.request, new.key, new.text)


def _revoke_key(form: Submission, key: ApplicationKey) -> None:
    key_revoke(prefix=key.prefix, actor=form.actor, now=form.now, why=form.text("why"))


def _new_key_page(request: HttpRequest, key: ApplicationKey, text: str) -> HttpResponse:
    url = reverse("key", args=(key.prefix,))
    return secret_shown(request, what="Key", name=key.name, text=text, use=HOW_TO_USE, url=url)


TARGET = Target(
    noun="key",
    find=_find_key,
    name=lambda key: key.name,
    url=lambda key: reverse("key", args=(key.prefix,)),
    action_url=lambda key, name: reverse("key-action", args=(key.prefix, name)),
)


def _revoke_effect(key: ApplicationKey, now: datetime) -> str:
    detail = found_or_404(key_find(key.prefix, now), f"key {key.prefix!r}")
    return f"{detail.effect} This cannot be undone."


def _revoked(key: ApplicationKey) -> str:
    return "This key is revoked." if key.state_at(clock.now()) is KeyState.REVOKED else ""


def _inactive(key: ApplicationKey) -> str:
    state = key.state_at(clock.now())
    return "" if state is KeyState.ACTIVE else f"This key is {state}."


KEY_ACTIONS = (
    Action(
        target=TARGET,
        name="limit",
        label="Change limits",
        run=_change_limits,
        fields=_limit_fields,
        effect=lambda key, now: LIMIT_EFFECT,
        why_not=_revoked,
    ),
    Action(
        target=TARGET,
        name="origins",
        label="Change browser origins",
        run=_set_origins,
        fields=_origin_fields,
        effect=lambda key, now: ORIGINS_EFFECT,
        why_not=_revoked,
    ),
    Action(
        target=TARGET,
        name="spend",
        label="Limit spend",
        role=Role.ADMIN,
        run=_set_spend_limit,
        fields=_spend_fields,
        effect=lambda key, now: SPEND_EFFECT,
        why_not=_revoked,
    ),
    Action(
        target=TARGET,
        name="rotate",
        label="Rotate",
        run=_rotate_key,
        effect=lambda key, now: ROTATE_EFFECT,
        why_not=_inactive,
    ),
    Action(
        target=TARGET,
        name="revoke",
        label="Revoke",
        run=_revoke_key,
        typed=TARGET.name,
        fields=(REQUIRED_WHY,),
        effect=_revoke_effect,
        why_not=_revoked,
    ),
)
key_action = action_view(*KEY_ACTIONS)


def _create_key(form: Submission, thing: None) -> HttpResponse:
    lists = {"deployments": form.texts("deployments"), "allowed_origins": form.text("allowed_origins").split()}
    fields = form.valid(CreateKeySerializer, *FORM_FIELDS, **lists)
    new = key_create(actor=form.actor, now=form.now, **fields)
    return _new_key_page(form.request, new.key, new.text)


def _new_form(form: Submission, thing: None) -> Context:
    values: dict[str, Any] = {name: form.text(name) for name in FORM_FIELDS}
    return {
        "form": {
            **values,
            "deployments": form.texts("deployments"),
            "allowed_origins": form.text("allowed_origins"),
        },
        "deployments": Deployment.objects.order_by("name").values_list("name", flat=True),
        "classes": choices(ServingClass),
    }


KEYS_PAGE: Target[None] = page_target("keys", "keys")
key_new = action_page_view(
    ActionPage(
        action=Action(target=KEYS_PAGE, name="create", run=_create_key),
        template="traffic/keys/new.html",
        context=_new_form,
    )
)


TENANT_GRANTS = page_target("keys", "grants of tenants")
TENANT_WEBHOOKS = page_target("keys", "webhooks of tenants")


@action(TENANT_GRANTS, Role.ADMIN)
def tenant_grant_new(form: Submission, _: None) -> None:
    fields = form.valid(CreateTenantGrantSerializer, "tenant", "use", "target", "region")
    tenant_grant_create(actor=form.actor, now=form.now, **fields)


@action(TENANT_GRANTS, Role.ADMIN)
def tenant_grant_withdraw_action(form: Submission, id: int) -> None:
    tenant_grant_withdraw(grant_id=get_object_or_404(TenantGrant, pk=id).pk, actor=form.actor, now=form.now)


@action(TENANT_WEBHOOKS)
def tenant_webhook_new(form: Submission, _: None) -> HttpResponse:
    fields = form.valid(CreateTenantWebhookSerializer, "tenant", "url")
    return _webhook_shown(form.request, tenant_webhook_create(actor=form.actor, now=form.now, **fields))


@action(TENANT_WEBHOOKS)
def tenant_webhook_rotate_action(form: Submission, id: int) -> HttpResponse:
    row = get_object_or_404(TenantWebhook, pk=id)
    new = tenant_webhook_rotate(webhook_id=row.pk, actor=form.actor, now=form.now)
    return _webhook_shown(form.request, new)


@action(TENANT_WEBHOOKS)
def tenant_webhook_remove_action(form: Submission, id: int) -> None:
    tenant_webhook_remove(webhook_id=get_object_or_404(TenantWebhook, pk=id).pk, actor=form.actor, now=form.now)


def _webhook_shown(request: HttpRequest, new: NewSecret) -> HttpResponse:
    url = reverse("keys")
    return secret_shown(
        request, what="Signing secret", name=str(new.webhook), text=new.text, use=HOW_TO_VERIFY, url=url
    )


def _set_required(form: Submission, thing: None) -> None:
    keys_require(required=form.text("required") == "yes", actor=form.actor, now=form.now, why=form.text("why"))


REQUIRE_KEYS = Action(
    target=KEYS_PAGE,
    name="require",
    label="Require keys",
    submit="Require keys",
    run=_set_required,
    role=Role.ADMIN,
    typed=lambda thing: "require keys",
    fields=(Field("required", kind="hidden", value="yes"), WHY),
)
SERVE_WITHOUT_KEYS = Action(
    target=KEYS_PAGE,
    name="require",
    label="Stop requiring keys",
    submit="Stop requiring keys",
    run=_set_required,
    role=Role.ADMIN,
    fields=(Field("required", kind="hidden", value="no"), WHY),
)
_require_view, _serve_view = action_view(REQUIRE_KEYS), action_view(SERVE_WITHOUT_KEYS)


def keys_require_action(request: HttpRequest) -> HttpResponseBase:
    """Requires keys after a typed confirmation, or stops requiring them."""
    return (_require_view if request.POST.get("required") == "yes" else _serve_view)(request)
