"""Every list of the console uses `controlplane.dashboard.lists`: it is searched, filtered, sorted, paged and exported
with parameters of the URL."""

import csv
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import Group, User
from django.http import QueryDict
from django.urls import resolve

from accounts.models import ApiToken, Approval, Grant, GroupRole, LoginSession, ServiceAccount
from controlplane.dashboard.fragments import Caller, Page, PageRequest
from controlplane.dashboard.lists import List, ListPage
from controlplane.dashboard.urls import urlpatterns
from fleet.webhooks.models import Webhook, WebhookDelivery
from kernel import clock
from kernel.access import Access, Role
from models_registry.versions.models import EngineAllowance
from tests.controlplane.dashboard.fleets import one_more_of_everything
from tests.controlplane.dashboard.page_urls import FLEET_PAGES, SETTINGS
from tests.fleet.rows import NOW

TEMPLATES = Path(__file__).parents[3] / "templates"
SEAM = "dashboard/parts/table.html"
ROWS = re.compile(r'<table\b|<ul class="rows[^>]*>(?:(?!</ul>).)*?{% for ', re.DOTALL)
USES = re.compile(r'{% (?:extends|include) "([^"]+)"')
PAGES: dict[str, Page] = {
    str(route.name): route.callback.page for route in urlpatterns if hasattr(route.callback, "page")
}
ALLOWED: dict[str, str] = {
    "inputs, charts and forecasts": """
        dashboard/charts/chart.html dashboard/wizards/input.html fleet/autoscaling/forecast.html
        fleet/capacity/plan.html fleet/drafts/draft.html fleet/rollouts/new.html models_registry/instance_types/new.html
        models_registry/versions/proposed.html traffic/region_shares/effect.html traffic/region_shares/what_if.html""",
    "summaries with a link to the whole list, of a bounded length": """
        dashboard/overview/map.html dashboard/overview/operations.html dashboard/overview/status.html
        dashboard/search/results.html fleet/faults/related.html models_registry/benchmarks/runs.html
        traffic/keys/failed.html""",
    "a few places, stages, types or second factors of one object": """
        dashboard/settings/factors.html fleet/autoscaling/autoscaling.html fleet/autoscaling/roles.html
        fleet/cells/probes.html fleet/cells/stack.html fleet/deployments/deployment.html fleet/deployments/fits.html
        fleet/chains/chain.html fleet/requests/trace.html
        fleet/deployments/types.html fleet/faults/actions.html fleet/faults/impact.html fleet/machines/cell.html
        fleet/machines/machine.html fleet/quotas/shares.html fleet/regions/images.html fleet/regions/region.html
        fleet/rollouts/rollout.html models_registry/speculation/accepted.html models_registry/versions/cells.html
        models_registry/versions/prompts.html traffic/routing/entry.html dashboard/settings/single-sign-on.html
        dashboard/wizards/tested.html""",
    "figures and reports, not objects": """
        fleet/cells/batch.html fleet/cells/cache.html fleet/cells/siblings.html fleet/faults/evidence.html
        fleet/load/slo.html fleet/nodes/checks.html fleet/nodes/report.html models_registry/benchmarks/benchmarks.html
        models_registry/benchmarks/compared.html models_registry/benchmarks/points.html
        models_registry/benchmarks/searches.html models_registry/speculation/speculation.html
        models_registry/versions/lines.html models_registry/versions/memory.html models_registry/versions/options.html
        traffic/keys/tenant.html traffic/keys/usage.html traffic/region_shares/shares.html
        traffic/streams/streams.html""",
    "recordings, which have only the columns of their time": """
        fleet/recorder/places.html fleet/recorder/time_line.html""",
    "the page of a tenant, which is outside the console": "traffic/keys/tenant_page.html",
}
"""Why -> templates with rows outside the lists."""
UNMEASURED = {"measured", "token-weights"}
"""Lists of measurements, which the fleet of this test lacks."""


@cache
def source(template: str) -> str:
    path = TEMPLATES / template  # Django's admin has its own
    return path.read_text() if path.exists() else ""


@cache
def used(template: str) -> frozenset[str]:
    """The template and those that it extends or includes."""
    found, waiting = {template}, [template]
    while waiting:
        more = set(USES.findall(source(waiting.pop()))) - found
        found |= more
        waiting += more
    return frozenset(found)


def is_outside(template: str) -> bool:
    return SEAM not in used(template) and ROWS.search(source(template)) is not None


def test_no_table_of_objects_is_outside_the_lists() -> None:
    """A new table uses the lists, or states here why it needs none."""
    shown = {template for page in PAGES.values() for each in page.fragments for template in used(each.template)}
    others = {str(path.relative_to(TEMPLATES)) for path in TEMPLATES.rglob("*.html")}
    outside = {template for template in shown | others if is_outside(template)}
    assert outside == {template for templates in ALLOWED.values() for template in templates.split()}


def asked(key: str, user: User, **parameters: str) -> PageRequest:
    query = QueryDict(mutable=True)
    query.update(parameters)
    return PageRequest(key, query, clock.now(), Caller(user, Access(Role.ADMIN)))


def exported(each: List[Any], request: PageRequest) -> list[list[str]]:
    lines: Any = each.export(request).streaming_content
    return list(csv.reader(b"".join(lines).decode().splitlines()))


def check_list(each: List[Any], key: str, user: User) -> int:
    """Asks a list for everything that its URL can; returns its rows."""
    name = each.name
    whole = each.page(asked(key, user))
    size = len(whole.rows)
    for column in each.columns:
        sortable = each.by_value or column.order
        sorted_by = each.page(asked(key, user, **{f"{each.prefix}sort": f"-{column.name}"}))
        assert (len(sorted_by.rows), any(head.direction for head in sorted_by.headings)) == (size, bool(sortable)), name
        for choice in (*column.choices, "mars"):
            found = each.page(asked(key, user, **{f"{each.prefix}{column.name}": choice})) if column.choices else whole
            assert not column.choices or {str(column.value(row)) for row in found.rows} <= {choice}, (name, column.name)
    for text in ("no such row", "\0", "%", "'"):
        found = each.page(asked(key, user, **{f"{each.prefix}q": text, f"{each.prefix}page": "-1"}))
        assert not (each.find and text == "no such row" and found.rows), name
    csv_rows = exported(each, asked(key, user))
    assert (csv_rows[0], len(csv_rows)) == ([column.label for column in each.columns], size + 1), name
    return size


def settings_rows(user: User) -> None:
    """A row in every list of the settings that `one_more_of_everything` leaves empty."""
    group = Group.objects.create(name="admins")
    GroupRole.objects.create(group=group, role="admin")
    Grant.objects.create(group=group, deployment="deployment-0", role="operator", created_by="ada", created_at=NOW)
    ApiToken.objects.create(prefix="0a", digest="0", name="ci", user=user, created_at=NOW)
    later = NOW.replace(year=NOW.year + 50)
    LoginSession.objects.create(session_key="s", user=user, method="m", created_at=NOW, seen_at=NOW, expires_at=later)
    program = User.objects.create_user("program")
    ServiceAccount.objects.create(user=program, created_by="ada", created_at=NOW)
    for state in ("pending", "done"):
        Approval.objects.create(
            action="a", summary="s", state=state, requested_by="ada", requested_at=NOW, expires_at=later
        )
    hook = Webhook.objects.create(name="pager", url="https://pager.example/", created_at=NOW)
    WebhookDelivery.objects.create(webhook=hook, event="incident.opened", body={}, created_at=NOW, due_at=NOW)
    EngineAllowance.objects.create(engine="vllm", name="--option", why="w", actor="ada", created_at=NOW)


@pytest.mark.slow
@pytest.mark.django_db
def test_every_list_is_searched_filtered_sorted_and_exported() -> None:
    for number in range(2):
        one_more_of_everything(number)
    user, unseen = User.objects.create_superuser("operator"), []
    settings_rows(user)
    for url in (*FLEET_PAGES, *SETTINGS.values()):
        route = resolve(url.partition("?")[0])
        page, key = PAGES[str(route.url_name)], str(route.kwargs.get("key", ""))
        prefixes = [each.prefix for each in page.lists]
        assert len(set(prefixes)) == len(prefixes), url
        for fragment in page.fragments if "?" not in url else ():
            body = fragment.load(asked(key, user))
            assert not (isinstance(body, ListPage) and body.exports) or body.prefix in prefixes, (url, fragment.name)
        lists = [each for each in page.lists if isinstance(each, List)] if "?" not in url else []
        unseen += [each.name for each in lists if not check_list(each, key, user)]
    assert set(unseen) <= UNMEASURED
