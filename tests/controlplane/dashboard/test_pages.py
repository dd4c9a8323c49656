"""Every page: only for signed-in users, with a useful empty state, and refreshed in fragments."""

import pytest
from django.test import Client

from controlplane.dashboard.urls import urlpatterns
from tests.controlplane.dashboard.clients import fragment, signed_in
from tests.controlplane.dashboard.fleets import one_more_of_everything
from tests.controlplane.dashboard.page_urls import DETAILS, FILTERED, FLEET_PAGES, LISTS
from tests.controlplane.dashboard.reading import Reader, queries

pytestmark = [pytest.mark.django_db, pytest.mark.slow]


def test_every_page_is_tried_here() -> None:
    tried = {url.strip("/").partition("/")[0].partition("?")[0] for url in (*LISTS.values(), *DETAILS)}
    pages = {str(route.pattern).partition("/")[0] for route in urlpatterns}
    # Compile caches are on the page of their version; the others have separate tests.
    assert pages - tried == {"compile-caches", "login", "logout", "new", "settings", "tenant"}


WAYS = (
    "make up",
    "matches this filter",
    "Show closed ones",
    "Samples arrive every half minute",
    "switchyard batch submit",
    "<code>/v1/async/chat/completions</code>",
    "<code>switchyard apply</code>",
    "switchyard model import",
    "switchyard engine add",
    "switchyard create instance-type",
    "switchyard bench run",
    'href="/new/',
    'href="/rollouts/new/',
    "switchyard engine add",
)
"""To an object in its content."""


def test_every_page_sends_anonymous_users_to_the_login_and_back(client: Client) -> None:
    one_more_of_everything(0)
    for url in FLEET_PAGES:
        response = client.get(url)
        assert response.status_code == 302, url
        assert response.headers["Location"].startswith("/login/?next=/"), url


def test_every_empty_page_says_how_to_fill_it() -> None:
    client = signed_in()
    for url in (*LISTS.values(), *FILTERED):
        text = client.get(url).text
        assert 'class="empty"' in text or 'class="verdict' in text, url
        assert any(way in text for way in WAYS), url


def test_every_fragment_of_every_page_can_be_fetched_alone(thorough: bool) -> None:
    """By default of one page in three."""
    one_more_of_everything(0)
    client = signed_in()
    for url in FLEET_PAGES if thorough else FLEET_PAGES[::3]:
        names = Reader(client.get(url).text).fragments
        assert "navigation" in names, url
        assert len(names) > 1, url
        for name in names:
            part = fragment(client, url, name)
            assert part.startswith(f'<section id="{name}"'), (url, name)
            assert Reader(part).fragments == [name], (url, name)


def test_the_overview_takes_few_queries() -> None:
    one_more_of_everything(0)
    assert queries(signed_in(), "/") <= 53


@pytest.mark.parametrize(
    "url",
    [
        "/cells/nope/",
        "/nodes/nope/",
        "/incidents/nope/",
        "/incidents/0/",
        "/deployments/nope/",
        "/models/nope/",
        "/models/nope@1/",
        "/models/nope@1/diff/",
        "/models/a%00b@1/",
        "/nowhere/",
        "/cells/a%00b/",
    ],
)
def test_what_does_not_exist_is_not_found(url: str) -> None:
    response = signed_in().get(url)
    assert response.status_code == 404
    assert "There is nothing at this address" in response.text


@pytest.mark.parametrize(
    "query", ["?before=x", "?before=99999999999999999999", "?kind=%F0%9F%92%A9", "?before=-1", "?subject='"]
)
def test_nonsense_in_the_url_is_no_error(query: str) -> None:
    one_more_of_everything(0)
    assert signed_in().get(f"/events/{query}").status_code == 200


def test_pages_only_read() -> None:
    assert signed_in().post("/cells/").status_code == 405
