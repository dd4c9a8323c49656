"""Every page when there is everything: well formed, and with as many queries in a large fleet as in a small one."""

from collections.abc import Iterator

import pytest
from pytest_django import DjangoDbBlocker

from tests.controlplane.dashboard.clients import signed_in
from tests.controlplane.dashboard.fleets import one_more_of_everything
from tests.controlplane.dashboard.page_urls import FLEET_PAGES
from tests.controlplane.dashboard.reading import Reader, queries
from tests.rows_of_a_file import rows_of_a_file

pytestmark = pytest.mark.django_db

MAY_BE_EMPTY = ("/plan/", "/what-if/?factor=1.5", "/nodes/n-000000aa/", "/models/model-0@1/diff/?against=model-0@1")


@pytest.fixture(scope="module")
def few(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[dict[str, int]]:
    """Queries of each page while there was one of everything; from then on there are seven."""
    with rows_of_a_file(django_db_blocker):
        one_more_of_everything(0)
        client = signed_in()
        counts = {url: queries(client, url) for url in FLEET_PAGES}
        for number in range(1, 7):
            one_more_of_everything(number)
        yield counts


@pytest.mark.slow
def test_a_full_page_is_well_formed_and_has_nothing_inline(few: dict[str, int]) -> None:
    client = signed_in()
    for url in FLEET_PAGES:
        response = client.get(url)
        assert response.status_code == 200, url
        assert 'class="empty"' not in response.text or url in MAY_BE_EMPTY, url
        page = Reader(response.text)
        assert page.inline == [], url
        assert sorted(set(page.ids)) == sorted(page.ids), url
        assert "default-src 'self'" in response.headers["Content-Security-Policy"], url
        assert "unsafe" not in response.headers["Content-Security-Policy"], url


@pytest.mark.slow
def test_a_larger_fleet_takes_no_more_queries(few: dict[str, int]) -> None:
    client = signed_in()
    assert {url: queries(client, url) for url in FLEET_PAGES} == few
