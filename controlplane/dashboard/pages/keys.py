"""The list of application keys, and the page of one."""

from django.http import Http404

from controlplane.dashboard.charts import Chart
from controlplane.dashboard.fragments import Asked, Choice, Filter, Fragment, Page
from controlplane.dashboard.pages.choices import choose
from controlplane.dashboard.selectors.keys import (
    KeyDetail,
    KeyList,
    PolicyView,
    key_find,
    key_list,
    key_tenants,
    policy_view,
    usage_rows,
)
from controlplane.dashboard.selectors.usage_charts import key_chart, tenant_chart
from fleet.planning.states import choices
from traffic.models import UsageHour
from traffic.planning.key import KeyState


def _list(asked: Asked) -> KeyList:
    return key_list(state=asked.word("state"), tenant=asked.word("tenant"), text=asked.word("q"), now=asked.now)


def _filter(asked: Asked) -> Filter:
    options = (("", "all"), *choices(KeyState))
    state = Choice(name="state", label="state", options=options, chosen=asked.word("state"))
    tenant = choose(asked, "tenant", "every tenant", key_tenants())
    return Filter(
        text_label="Find by name, tenant or sw_…", text_name="q", text=asked.word("q"), choices=(state, tenant)
    )


def _policy(asked: Asked) -> PolicyView:
    return policy_view(asked.now)


def _key(asked: Asked) -> KeyDetail:
    detail = key_find(asked.key, asked.now)
    if detail is None:
        raise Http404(f"There is no key {asked.key!r}.")
    return detail


def _key_usage(asked: Asked) -> tuple[UsageHour, ...]:
    return usage_rows(key=asked.once(_key).row.key.prefix)


def _key_chart(asked: Asked) -> tuple[Chart, ...]:
    return (key_chart(asked.once(_key).row.key.prefix, asked.now),)


def _tenant_chart(asked: Asked) -> tuple[Chart, ...]:
    chart = tenant_chart(asked.now)
    return (chart,) if chart.series else ()


def _tenant_usage(asked: Asked) -> tuple[UsageHour, ...]:
    return usage_rows(tenant=asked.once(_key).row.key.tenant)


KEYS = Page(
    section="keys",
    title="Keys",
    charts=True,
    fragments=(
        Fragment("keys-table", "", ("keys", "usage"), "dashboard/keys/table.html", _list),
        Fragment("keys-usage", "Usage, last 48 hours", ("usage",), "dashboard/charts/several.html", _tenant_chart),
        Fragment("keys-policy", "Who is served", ("keys", "traffic"), "dashboard/keys/policy.html", _policy),
    ),
    narrow=_filter,
)

KEY = Page(
    section="keys",
    title="",
    charts=True,
    fragments=(
        Fragment("key", "", ("keys:{key}", "usage"), "dashboard/keys/key.html", _key),
        Fragment("key-asks", "Ask", ("keys:{key}",), "dashboard/keys/asks.html", _key),
        Fragment("key-chart", "Usage, last 48 hours", ("usage",), "dashboard/charts/several.html", _key_chart),
        Fragment("key-usage", "Asked by the hour", ("usage",), "dashboard/keys/usage.html", _key_usage),
        Fragment("key-tenant", "Served to its tenant", ("usage",), "dashboard/keys/tenant.html", _tenant_usage),
    ),
)
