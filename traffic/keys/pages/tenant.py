"""The page of a tenant, read-only: its usage, charges, limits, keys and failed requests. It opens with any valid key of
the tenant, or with a login by the identity provider whose groups an admin has mapped to tenants. The session keeps only
the key's prefix, or the groups, and each request checks the key or the mapping again. It never shows another tenant's
rows (I15)."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from django.db.models import Q, Sum
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_http_methods

from accounts.oidc import provider
from accounts.services.identity_provider import tenants_of_groups
from accounts.services.session import TenantLogin, tenant_login_of, tenant_session_end
from audit.middleware import audit_exempt
from engine_agent.protocol.request_messages import REQUEST_ID_CHARS_MAX
from fleet.requests.models import RequestSample
from fleet.requests.pages import FAILED_SHOWN
from kernel import clock
from traffic.keys.models import ApplicationKey
from traffic.keys.pages.data import KEYS_SHOWN, KeyRow, KeyUse, key_use, usage_rows
from traffic.keys.selectors import failed_requests_of, keys_described
from traffic.tenants.selectors import UnknownApplication, application_of, application_with
from traffic.usage.models import UsageHour, UsageMonth
from traffic.usage.planning.counting import month_of
from traffic.usage.selectors.budgets import BudgetView, budget_views

SESSION_KEY = "tenant_key"
MAX_KEY = 200


@dataclass(frozen=True, slots=True)
class TenantView:
    """`tokens` and `charged` of this month (UTC); `day`: sums of the last 24 hours; `key`: the one that opened the
    page, or `login` and `others`, the other tenants of this login; `request`: the id that `failed` is limited to."""

    tenant: str
    key: ApplicationKey | None
    login: TenantLogin | None
    others: tuple[str, ...]
    tokens: int
    charged: Decimal
    day: dict[str, int]
    budgets: tuple[BudgetView, ...]
    keys: tuple[KeyRow, ...]
    hours: tuple[dict[str, Any], ...]
    request: str
    failed: tuple[RequestSample, ...]
    use: KeyUse | None


@dataclass(frozen=True, slots=True)
class Opened:
    """The visible tenant of a session: that of its key, or one of those of its login."""

    tenant: str
    key: ApplicationKey | None = None
    login: TenantLogin | None = None
    others: tuple[str, ...] = ()


def tenant_view(opened: Opened, now: datetime, request: str = "") -> TenantView:
    tenant, key = opened.tenant, opened.key
    month = UsageMonth.objects.filter(tenant=tenant, month=month_of(now)).first()
    keys = list(keys_described(now).filter(tenant=tenant).order_by("-id")[:KEYS_SHOWN])
    day = UsageHour.objects.filter(tenant=tenant, hour__gt=now - timedelta(days=1)).aggregate(
        requests=Sum("arrived", default=0), limited=Sum("limited", default=0), errors=Sum("failed", default=0)
    )
    own = Q(tenant=tenant) | Q(key__in=ApplicationKey.objects.filter(tenant=tenant).values("prefix"))
    return TenantView(
        tenant=tenant,
        key=key,
        login=opened.login,
        others=opened.others,
        tokens=month.tokens if month else 0,
        charged=month.charged if month else Decimal(0),
        day=day,
        budgets=tuple(budget_views(now, own)),
        keys=tuple(KeyRow(row, row.state_at(now)) for row in keys),
        hours=usage_rows(now, tenant=tenant),
        request=request,
        failed=tuple(failed_requests_of(now, tenant=tenant, request=request)[:FAILED_SHOWN]),
        use=key_use(key) if key else None,
    )


@never_cache
@sensitive_post_parameters("key")
@require_http_methods(["GET", "HEAD", "POST"])
@audit_exempt("a tenant opens or leaves its own page, which changes nothing")
def tenant_page(request: HttpRequest) -> HttpResponse:
    """Shows the page, or the form that asks for a key. POST opens the page with a key, or leaves it."""
    now, refused = clock.now(), ""
    if request.method == "POST":
        request.session.pop(SESSION_KEY, None)
        tenant_session_end(request=request)
        if "leave" in request.POST:
            return redirect("tenant")
        prefix, refused = _opened(str(request.POST.get("key", ""))[:MAX_KEY], now)
        if prefix:
            request.session.cycle_key()
            request.session[SESSION_KEY] = prefix
            return redirect("tenant")
    opened = None
    known = provider()
    if prefix := request.session.get(SESSION_KEY, ""):
        opened, refused = _still_valid(prefix, now)
    elif login := tenant_login_of(request, known.issuer if known else "", now):
        opened, refused = _of_login(login, str(request.GET.get("tenant", "")))
    if opened is None:
        context = {"refused": refused, "provider": known}
        return render(request, "traffic/keys/tenant_login.html", context, status=403 if refused else 200)
    view = tenant_view(opened, now, str(request.GET.get("request", "")).strip()[:REQUEST_ID_CHARS_MAX])
    return render(request, "traffic/keys/tenant_page.html", {"body": view, "now": now})


def _opened(text: str, now: datetime) -> tuple[str, str]:
    """The prefix of a valid key, or "" and why it is refused."""
    try:
        application = application_of(f"Bearer {text.strip()}", now)
    except UnknownApplication as unknown:
        return "", str(unknown)
    return application.key, "" if application.key else "this is not an application key: it starts with sw_"


def _still_valid(prefix: str, now: datetime) -> tuple[Opened | None, str]:
    key = ApplicationKey.objects.filter(prefix=prefix).first()
    if key is None:
        return None, ""
    try:
        application_with(key, now)
    except UnknownApplication as unknown:
        return None, str(unknown)
    return Opened(key.tenant, key=key), ""


def _of_login(login: TenantLogin, wanted: str) -> tuple[Opened | None, str]:
    """The wanted tenant of the login, or its first one. The mapping is read again, so that its end closes the page."""
    mapped = sorted(set(tenants_of_groups(frozenset(login.groups)).values()))
    if not mapped:
        return None, "your groups at the identity provider are no longer mapped to a tenant; ask an admin"
    tenant = wanted if wanted in mapped else mapped[0]
    return Opened(tenant, login=login, others=tuple(one for one in mapped if one != tenant)), ""
