"""Every page when there is everything: well formed, with as many queries in a large fleet as in a small one, and with
markers on each of its charts."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from django.conf import settings
from django.urls import resolve
from pytest_django import DjangoDbBlocker

from controlplane.dashboard.charts import Chart
from tests.controlplane.dashboard.clients import signed_in
from tests.controlplane.dashboard.fleets import one_more_of_everything
from tests.controlplane.dashboard.page_urls import FLEET_PAGES
from tests.controlplane.dashboard.reading import Reader, queries, whole
from tests.rows_of_a_file import rows_of_a_file

pytestmark = pytest.mark.django_db

ROOT = Path(__file__).parents[3]
PACKAGES = ("controlplane/dashboard", "fleet", "models_registry", "traffic")
WITH_CHARTS = {"batch-page", "cell", "costs", "deployment", "key", "keys", "node", "region", "traffic", "usage"}
"""Pages whose charts the rows fill. Benchmarks and speculation have no axis of time, so no markers."""
MAY_BE_EMPTY = (
    "/plan/",
    "/what-if/?factor=1.5",
    "/plan/drafts/draft-0/",
    "/nodes/n-000000aa/",
    "/models/model-0@1/",
    "/models/model-0@1/diff/?against=model-0@1",
)


def forget_what_ifs() -> None:
    """So that the next visit computes its answer."""
    server = redis.Redis.from_url(settings.REDIS_URL)
    for key in server.scan_iter("switchyard:what-if:*"):
        server.delete(key)


@pytest.fixture(scope="module")
def few(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[dict[str, int]]:
    """Queries of each page while there were two of everything, one of them on its way; from then on there are seven."""
    with rows_of_a_file(django_db_blocker):
        for number in range(2):
            one_more_of_everything(number)
        client = signed_in()
        forget_what_ifs()
        counts = {url: queries(client, url) for url in FLEET_PAGES}
        for number in range(2, 7):
            one_more_of_everything(number)
        yield counts


@pytest.mark.slow
def test_a_full_page_is_well_formed_and_has_nothing_inline(few: dict[str, int]) -> None:
    client = signed_in()
    marked: set[str] = set()
    for url in FLEET_PAGES:
        response = client.get(whole(url))
        contexts: Any = response.context or ()
        for chart in (context.get("chart") for context in contexts):
            if isinstance(chart, Chart):
                assert chart.markers is not None, f"{chart.name} of {url} has no markers"
                marked.add(str(resolve(url.partition("?")[0]).url_name))
        assert response.status_code == 200, url
        assert 'class="empty"' not in response.text or url in MAY_BE_EMPTY, url
        page = Reader(response.text)
        assert page.inline == [], url
        assert sorted(set(page.ids)) == sorted(page.ids), url
        assert "default-src 'self'" in response.headers["Content-Security-Policy"], url
        assert "unsafe" not in response.headers["Content-Security-Policy"], url
    assert marked >= WITH_CHARTS


NAMES_CHARTS = re.compile(r"\b(Chart|marked|with_markers)\(")
"""The files that are worth parsing."""


def test_each_package_that_makes_charts_marks_them() -> None:
    """Pages without rows draw no chart, so the code is read as well."""
    makers: dict[Path, set[str]] = {}
    for path in (file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
        text = path.read_text()
        calls = {
            node.func.id
            for node in (ast.walk(ast.parse(text)) if NAMES_CHARTS.search(text) else ())
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        folder = path.parent.parent if path.parent.name == "pages" else path.parent
        makers.setdefault(folder, set()).update(calls)
    charted = {folder for folder, calls in makers.items() if "Chart" in calls}
    assert len(charted) > 5
    assert [folder for folder in charted if not makers[folder] & {"marked", "with_markers"}] == []


@pytest.mark.slow
def test_a_larger_fleet_takes_no_more_queries(few: dict[str, int]) -> None:
    client = signed_in()
    forget_what_ifs()
    assert {url: queries(client, url) for url in FLEET_PAGES} == few
