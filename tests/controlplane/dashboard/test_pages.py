"""Every page: only for people who are signed in, whole when there is nothing or everything, and cheap at any size."""

from html.parser import HTMLParser

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from controlplane.dashboard.urls import urlpatterns
from tests.controlplane.dashboard.clients import fragment, signed_in
from tests.controlplane.dashboard.fleets import one_more_of_everything

pytestmark = pytest.mark.django_db

LISTS = [
    "/",
    "/audit/?action=node.cordon&outcome=done",
    "/cells/",
    "/cells/?q=deployment&region=region-0&deployment=deployment-0&state=ready",
    "/deployments/",
    "/events/",
    "/events/?kind=cell.ready&subject=region-0",
    "/incidents/",
    "/incidents/?state=all",
    "/keys/",
    "/keys/?q=search&state=active&tenant=tenant-0",
    "/models/",
    "/nodes/",
    "/nodes/?role=leader",
    "/playground/",
    "/rollouts/",
    "/rollouts/?state=active",
    "/search/?q=0",
    "/traffic/",
]
DETAILS = [
    "/cells/deployment-0-region-0-1/",
    "/nodes/n-00000000/",
    "/nodes/n-000000aa/",
    "/deployments/deployment-0/",
    "/keys/0a000000/",
    "/models/model-0/",
    "/models/model-0@1/",
    "/models/model-0@1/diff/?against=model-0@1",
]
MAY_BE_EMPTY = ("/nodes/n-000000aa/", "/models/model-0@1/diff/?against=model-0@1")


class Reader(HTMLParser):
    """Remembers ids, links and anything inline that the content security policy would refuse."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.fragments: list[str] = []
        self.inline: list[str] = []
        self._in_script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids += [values["id"] or ""] if "id" in values else []
        self.fragments += [values["id"] or ""] if "data-topics" in values else []
        self.inline += [name for name in values if name == "style" or name.startswith(("on", "hx-on"))]
        self.inline += [tag] if tag == "style" or (tag == "script" and not values.get("src")) else []


def test_every_page_is_tried_here() -> None:
    tried = {url.strip("/").partition("/")[0].partition("?")[0] for url in LISTS}
    pages = {str(route.pattern).partition("/")[0] for route in urlpatterns}
    assert pages - tried == {"login", "logout", "settings"}  # the last have tests of their own


@pytest.mark.parametrize("url", LISTS + DETAILS)
def test_a_page_sends_strangers_to_the_login_and_back(client: Client, url: str) -> None:
    one_more_of_everything(0)
    response = client.get(url)
    assert response.status_code == 302
    assert response.headers["Location"].startswith("/login/?next=/")


@pytest.mark.parametrize("url", LISTS)
def test_an_empty_page_says_how_to_fill_it(url: str) -> None:
    text = signed_in().get(url).text
    assert 'class="empty"' in text or 'class="verdict' in text
    assert "make up" in text or "matches this filter" in text or "Show closed ones" in text


@pytest.mark.parametrize("url", LISTS + DETAILS)
def test_a_full_page_is_well_formed_and_has_nothing_inline(url: str) -> None:
    for number in range(6):
        one_more_of_everything(number)
    response = signed_in().get(url)
    assert response.status_code == 200
    assert 'class="empty"' not in response.text or url in MAY_BE_EMPTY
    page = Reader(response.text)
    assert page.inline == []
    assert sorted(set(page.ids)) == sorted(page.ids)
    assert "default-src 'self'" in response.headers["Content-Security-Policy"]
    assert "unsafe" not in response.headers["Content-Security-Policy"]


@pytest.mark.parametrize("url", LISTS + DETAILS)
def test_every_fragment_of_a_page_can_be_asked_for_alone(url: str) -> None:
    one_more_of_everything(0)
    client = signed_in()
    whole = client.get(url).text
    names = Reader(whole).fragments
    assert "standing" in names
    assert len(names) > 1
    for name in names:
        part = fragment(client, url, name)
        assert part.startswith(f'<section id="{name}"')
        assert Reader(part).fragments == [name]


@pytest.mark.parametrize("url", LISTS + DETAILS)
def test_a_larger_fleet_takes_no_more_queries(url: str) -> None:
    client = signed_in()
    one_more_of_everything(0)
    few = _queries(client, url)
    for number in range(1, 7):
        one_more_of_everything(number)
    assert _queries(client, url) == few


def _queries(client: Client, url: str) -> int:
    with CaptureQueriesContext(connection) as captured:
        assert client.get(url).status_code == 200
    return len(captured)


def test_the_overview_takes_few_queries() -> None:
    one_more_of_everything(0)
    assert _queries(signed_in(), "/") <= 30


@pytest.mark.parametrize(
    "url",
    [
        "/cells/nope/",
        "/nodes/nope/",
        "/incidents/nope/",
        "/incidents/99/",
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
    "query", ["?before=x", "?before=99999999999999999999", "?kind=%00", "?before=-1", "?subject='"]
)
def test_nonsense_in_the_url_is_no_error(query: str) -> None:
    one_more_of_everything(0)
    assert signed_in().get(f"/events/{query}").status_code == 200


def test_pages_only_read() -> None:
    assert signed_in().post("/cells/").status_code == 405
