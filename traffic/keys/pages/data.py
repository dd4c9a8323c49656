"""Data of the key pages: states, limits, hourly usage as rows and charts, and the ingresses that enforce the keys."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from decimal import Decimal
from typing import Any

from django.db.models import Q, QuerySet, Sum
from django.db.models.functions import Coalesce

from controlplane.dashboard.charts import MOST_SERIES, Chart, Colour, Series
from controlplane.dashboard.fragments import PageRequest
from controlplane.dashboard.lists import Column, List, plain
from controlplane.dashboard.snippets import snippets
from fleet.deployments.models import Deployment
from fleet.regions.models import Region
from kernel.tones import Tone
from traffic.keys.models import ApplicationKey, KeyPolicy
from traffic.keys.planner import KEY_TONE, KeyState, effect_of_requiring, revoking_effect
from traffic.keys.selectors import ingresses_waited_for, ingresses_with_keys, keys_described, keys_in_state
from traffic.routing.models import Ingress
from traffic.tenants.models import GrantUse, TenantGrant, TenantWebhook
from traffic.usage.models import COUNTS, Budget, UsageHour
from traffic.usage.planning.counting import BudgetUnit, month_of
from traffic.usage.planning.figures import HOURS_KEPT
from traffic.usage.selectors.budgets import BudgetView, budget_views

KEYS_SHOWN = 100
HOURS_SHOWN = 48
HOUR_S = 3600


@dataclass(frozen=True, slots=True)
class KeyRow:
    key: ApplicationKey
    state: KeyState

    @property
    def tone(self) -> Tone:
        return KEY_TONE[self.state]

    @property
    def limits(self) -> str:
        """Returns a text such as "60 requests/min, 3 concurrent", or "none"."""
        return limits_text(self.key)


@dataclass(frozen=True, slots=True)
class KeyDetail:
    """`waits_for` lists ingresses that still accept a revoked key; `effect` is that of revoking it. `budgets`: its own
    and those of its tenant. `charged` and `machine_cost`: in US dollars, this month."""

    row: KeyRow
    waits_for: tuple[str, ...]
    effect: str
    budgets: tuple[BudgetView, ...]
    charged: Decimal
    machine_cost: Decimal

    @property
    def spend_limit(self) -> Budget | None:
        own = (view.budget for view in self.budgets if view.budget.key and view.budget.unit == BudgetUnit.USD)
        return next(own, None)


@dataclass(frozen=True, slots=True)
class IngressKeys:
    ingress: Ingress
    version: int
    wanted: int

    @property
    def state(self) -> str:
        if self.version >= self.wanted:
            return "current"
        return "behind" if getattr(self.ingress, "connected", False) else "not connected"

    @property
    def tone(self) -> Tone:
        return {"current": Tone.OK, "behind": Tone.MOVING}.get(self.state, Tone.WARN)


@dataclass(frozen=True, slots=True)
class PolicyView:
    """Whether keys are required, the effect of changing that, and past revocation times."""

    required: bool
    effect: str
    last_lag_s: float | None
    worst_lag_s: float | None
    revocations: int


def _listed(request: PageRequest) -> QuerySet[ApplicationKey]:
    keys, state, text = keys_described(request.now), request.text("state"), request.text("q")
    if state in set(KeyState):
        keys = keys_in_state(keys, KeyState(state), request.now)
    if tenant := request.text("tenant"):
        keys = keys.filter(tenant=tenant)
    if text:
        keys = keys.filter(Q(name__icontains=text) | Q(tenant__icontains=text) | Q(prefix=text.removeprefix("sw_")))
    return keys


def _key_rows(keys: Sequence[Any], now: datetime) -> list[KeyRow]:
    return [KeyRow(key, key.state_at(now)) for key in keys]


def _counted(name: str) -> Callable[[KeyRow], object]:
    return lambda row: getattr(row.key, name)


KEY_LIST: List[KeyRow] = List(
    name="keys",
    columns=(
        Column("key", "Key", lambda row: f"{row.key.name} sw_{row.key.prefix}", ("name",)),
        Column("state", "State", lambda row: row.state, ("revoked_at", "expires_at")),
        Column("tenant", "Tenant", lambda row: row.key.tenant, ("tenant",)),
        Column("limits", "Limits", lambda row: row.limits, css="wide"),
        Column(
            "requests", "Requests, 24 h", _counted("requests_24h"), ("requests_24h",), "number", is_newest_first=True
        ),
        Column("limited", "Rate-limited", _counted("limited_24h"), ("limited_24h",), "wide number"),
        Column("errors", "Errors", _counted("errors_24h"), ("errors_24h",), "wide number", is_newest_first=True),
        Column("used", "Last used", _counted("last_used_at"), ("last_used_at",), "number", is_newest_first=True),
    ),
    query=_listed,
    rows=_key_rows,
    order=("-id",),
    filters=("state", "tenant", "q"),
)


TENANT_GRANT_LIST: List[TenantGrant] = List(
    name="grants-of-tenants",
    prefix="grants-",
    columns=(
        plain("target", "Host or place"),
        plain("tenant", "Tenant"),
        plain("use", "Use", choices=GrantUse),
        plain("region", "Region", "wide"),
        plain("actor", "Granted by", "wide"),
        plain("created_at", "Since", "number wide"),
    ),
    query=lambda request: TenantGrant.objects.all(),
    order=("tenant", "use", "target", "id"),
    find=("tenant", "target", "actor"),
)
TENANT_WEBHOOK_LIST: List[TenantWebhook] = List(
    name="webhooks-of-tenants",
    prefix="webhooks-",
    columns=(
        Column("url", "Address", lambda row: row.shown_url),
        Column("tenant", "Tenant", lambda row: row.tenant),
        Column("events", "Events", lambda row: ", ".join(row.events), css="wide"),
        Column("actor", "Added by", lambda row: row.actor, css="wide"),
        Column("since", "Since", lambda row: row.created_at, css="number wide", is_newest_first=True),
    ),
    query=lambda request: TenantWebhook.objects.all(),
    order=("tenant", "id"),
    find=("url", "tenant", "events", "actor"),
    by_value=True,
)
"""By value, so that a search never compares the secret parts of a URL."""
INGRESS_KEYS_LIST: List[IngressKeys] = List(
    name="keys-on-ingresses",
    prefix="ingresses-",
    columns=(
        Column("ingress", "Ingress", lambda row: row.ingress.pk),
        Column("region", "Region", lambda row: row.ingress.region_id),
        Column("keys", "Keys", lambda row: row.state, choices=("current", "behind", "not connected")),
        Column("enforced", "Version enforced", lambda row: row.version, css="number"),
        Column("wanted", "Version wanted", lambda row: row.wanted, css="number"),
    ),
    query=lambda request: ingresses_with_keys(),
    rows=lambda rows, now: [IngressKeys(row, row.version, row.wanted_version) for row in rows],
    order=("region_id", "id"),
    find=("ingress", "region"),
    by_value=True,
)


def key_tenants() -> Iterable[str]:
    return ApplicationKey.objects.order_by("tenant").values_list("tenant", flat=True).distinct()


def key_find(prefix: str, now: datetime) -> KeyDetail | None:
    key: Any = keys_described(now).filter(prefix=prefix).first()
    if key is None:
        return None
    waits = key.revoked_version is not None and key.refused_everywhere_at is None
    month = UsageHour.objects.filter(key=prefix, hour__gte=datetime.combine(month_of(now), time.min, UTC))
    spent = month.aggregate(
        charged=Coalesce(Sum("charged"), Decimal(0)), machines=Coalesce(Sum("machine_cost"), Decimal(0))
    )
    return KeyDetail(
        row=KeyRow(key, key.state_at(now)),
        waits_for=ingresses_waited_for(key.revoked_version or 0) if waits else (),
        effect=revoking_effect(
            ingresses=ingresses_with_keys().count(), requests_24h=key.requests_24h, last_used_at=key.last_used_at
        ),
        budgets=tuple(budget_views(now, Q(key=key.budget_key) | Q(tenant=key.tenant))),
        charged=spent["charged"],
        machine_cost=spent["machines"],
    )


@dataclass(frozen=True, slots=True)
class KeyUse:
    """Code that uses a key: `url` of an ingress, `model` that it may request, language -> code."""

    url: str
    model: str
    code: dict[str, str]


def key_use(key: ApplicationKey) -> KeyUse | None:
    """None without an ingress or without a deployment that the key may use."""
    region = Region.objects.exclude(ingress_url="").order_by("position", "name").first()
    names = Deployment.objects.filter(name__in=key.deployments) if key.deployments else Deployment.objects.all()
    model = names.order_by("name").values_list("name", flat=True).first()
    if region is None or model is None:
        return None
    url = region.ingress_url.rstrip("/")
    request = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "stream": True}
    return KeyUse(url, model, snippets(url, request, has_key=True))


def usage_rows(now: datetime, *, key: str = "", tenant: str = "") -> tuple[dict[str, Any], ...]:
    """Returns the newest hours of a key, or of a tenant with all its keys: `hour` and the sums of all counters. Older
    hours are read only if the last days have too few, because a large tenant has thousands of rows a day."""
    hours = UsageHour.objects.filter(key=key) if key else UsageHour.objects.filter(tenant=tenant)
    sums = {name: Sum(name) for name in (*COUNTS, "charged")}
    rows: tuple[Any, ...] = ()
    for back in (timedelta(hours=HOURS_SHOWN), timedelta(days=7), HOURS_KEPT + timedelta(days=1)):
        recent = hours.filter(hour__gt=now - back).order_by().values("hour").annotate(**sums)
        rows = tuple(recent.order_by("-hour")[:HOURS_SHOWN])
        if len(rows) == HOURS_SHOWN:
            break
    return rows


def policy_view(now: datetime) -> PolicyView:
    policy = KeyPolicy.objects.first()
    required = policy.required if policy else False
    active = keys_in_state(ApplicationKey.objects.all(), KeyState.ACTIVE, now).count()
    confirmed = ApplicationKey.objects.filter(refused_everywhere_at__isnull=False).order_by("-refused_everywhere_at")
    lags = [key.revocation_lag_s or 0.0 for key in confirmed[:100]]
    return PolicyView(
        required=required,
        effect=effect_of_requiring(required=required, active_keys=active),
        last_lag_s=lags[0] if lags else None,
        worst_lag_s=max(lags) if lags else None,
        revocations=len(lags),
    )


def limits_text(key: ApplicationKey) -> str:
    limits = (
        (key.requests_per_min, "requests/min"),
        (key.tokens_per_min, "tokens/min"),
        (key.max_concurrent, "concurrent"),
    )
    return ", ".join(f"{limit:,} {unit}" for limit, unit in limits if limit) or "none"


def tenant_chart(now: datetime) -> Chart:
    """Completion tokens of the largest tenants, in two queries."""
    first = _first_hour(now)
    hours = UsageHour.objects.filter(hour__gte=datetime.fromtimestamp(first * HOUR_S, UTC)).order_by()
    largest = hours.values("tenant").annotate(total=Sum("completion_tokens")).order_by("-total", "tenant")
    tenants = [row["tenant"] for row in largest[:MOST_SERIES]]
    rows: dict[str, list[tuple[datetime, float]]] = defaultdict(list)
    by_hour = hours.filter(tenant__in=tenants).values("tenant", "hour").annotate(total=Sum("completion_tokens"))
    for tenant, hour, tokens in by_hour.values_list("tenant", "hour", "total"):
        rows[tenant].append((hour, tokens))
    series = tuple(Series(tenant or "no tenant", _hourly_values(rows[tenant], first)) for tenant in tenants)
    return _usage_chart("tenant-usage", "Completion tokens of the five largest tenants", "tokens/h", first, series)


def key_chart(key: str, now: datetime) -> Chart:
    """A key's requests, limited requests and errors, in one query."""
    first = _first_hour(now)
    since = datetime.fromtimestamp(first * HOUR_S, UTC)
    hours = UsageHour.objects.filter(key=key, hour__gte=since).order_by().values("hour")
    rows = list(hours.annotate(came=Sum("arrived"), over=Sum("limited"), bad=Sum("failed")))
    lines = (
        ("requests", Colour.FIRST, [(row["hour"], float(row["came"])) for row in rows]),
        ("rate-limited", Colour.WARN, [(row["hour"], float(row["over"])) for row in rows]),
        ("errors", Colour.BAD, [(row["hour"], float(row["bad"])) for row in rows]),
    )
    series = tuple(
        Series(name, _hourly_values(hours, first) if hours else [None] * HOURS_SHOWN, colour)
        for name, colour, hours in lines
    )
    return _usage_chart("key-requests", "Requests", "/h", first, series)


def _first_hour(now: datetime) -> int:
    return int(now.timestamp() // HOUR_S) - HOURS_SHOWN + 1


def _hourly_values(rows: Iterable[tuple[datetime, float]], first: int) -> list[float | None]:
    line: list[float | None] = [0.0] * HOURS_SHOWN
    for hour, value in rows:
        index = int(hour.timestamp() // HOUR_S) - first
        if 0 <= index < HOURS_SHOWN:
            line[index] = float(value)
    return line


def _usage_chart(name: str, title: str, unit: str, first: int, series: tuple[Series, ...]) -> Chart:
    start = datetime.fromtimestamp(first * HOUR_S, UTC)
    return Chart(name, title, unit, start, HOUR_S, series, decimals=0)
