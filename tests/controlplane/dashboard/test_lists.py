"""Filters narrow, live in the URL, and never hide that they do."""

import pytest

from kernel.events import event_record
from tests.controlplane.dashboard.clients import fragment, signed_in
from tests.controlplane.dashboard.fleets import one_more_of_everything
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = [pytest.mark.django_db, pytest.mark.slow]


def shown(url: str, name: str) -> str:
    return " ".join(fragment(signed_in(), url, name).split())


@pytest.mark.parametrize(
    "query",
    ["q=DEPLOYMENT-0", "region=region-0", "deployment=deployment-0", "state=ready", "q=deployment-0&state=ready"],
)
def test_cells_can_be_narrowed(query: str) -> None:
    one_more_of_everything(0)
    one_more_of_everything(1)
    text = shown(f"/cells/?{query}", "cells-table")
    assert "deployment-0-region-0-1" in text
    assert "deployment-1-region-1-1" not in text


@pytest.mark.parametrize(
    ("query", "node"),
    [
        ("role=leader", "n-00000000"),
        ("role=follower", "n-00000001"),
        ("role=spare", "n-000000aa"),
        ("q=00bb", "n-000000bb"),
    ],
)
def test_nodes_can_be_narrowed(query: str, node: str) -> None:
    one_more_of_everything(0)
    text = shown(f"/nodes/?{query}", "nodes-table")
    assert f'id="row-{node}"' in text
    assert 'id="row-n-00000000"' not in text or node == "n-00000000"


@pytest.mark.parametrize(
    ("page", "name", "one", "other"),
    [
        ("/models/?q=MODEL-0", "versions-table", "model-0@1", "model-1@1"),
        ("/deployments/?q=t-0", "deployments-table", "deployment-0", "deployment-1"),
        ("/incidents/?q=deployment-0", "incidents-list", "deployment-0-region-0-1", "deployment-1-region-1-1"),
        ("/events/?subject=region-0", "events-list", "deployment-0-region-0-1", "deployment-1-region-1-1"),
    ],
)
def test_other_lists_can_be_narrowed_by_words(page: str, name: str, one: str, other: str) -> None:
    one_more_of_everything(0)
    one_more_of_everything(1)
    text = shown(page, name)
    assert one in text
    assert other not in text


def test_a_filter_without_a_match_offers_a_way_out() -> None:
    one_more_of_everything(0)
    assert '<a href="/cells/">Show all</a>' in shown("/cells/?q=nonsense", "cells-table")


def test_the_form_shows_the_filter_of_the_url_even_for_unknown_values() -> None:
    text = " ".join(signed_in().get("/cells/?state=exploded&q=abc").text.split())
    assert '<option value="exploded" selected>exploded</option>' in text
    assert 'value="abc"' in text


def test_what_people_type_is_never_markup() -> None:
    text = signed_in().get("/cells/?q=<script>alert(1)</script>").text
    assert "<script>alert" not in text


@pytest.mark.parametrize(
    ("query", "expected"), [("", "is lost"), ("?state=closed", "Healed"), ("?state=all&q=Heal", "Healed")]
)
def test_incidents_are_the_open_ones_unless_asked_otherwise(query: str, expected: str) -> None:
    one_more_of_everything(0)
    text = shown(f"/incidents/{query}", "incidents-list")
    assert expected in text
    assert ("Healed" in text) == ("state" in query)


def test_events_page_by_id_so_that_new_ones_shift_nothing() -> None:
    for number in range(60):
        event_record(kind="k", message=f"event number {number};", now=NOW)
    first = shown("/events/", "events-list")
    assert "number 59;" in first
    assert "number 9;" not in first
    older = first.split('rel="next" href="')[1].split('"')[0]
    event_record(kind="k", message="a new one", now=NOW)
    second = shown(f"/events/{older}", "events-list")
    assert "number 9;" in second
    assert "number 10;" not in second
    assert "Older" not in second


def test_paging_keeps_the_filter() -> None:
    for _ in range(51):
        event_record(kind="cell.ready", message="m", now=NOW, cell="c-1")
    text = shown("/events/?kind=cell.ready&subject=c-1", "events-list")
    assert "?kind=cell.ready&amp;subject=c-1&amp;before=" in text


def test_traffic_shows_who_is_behind_and_what_an_ingress_cannot_reach() -> None:
    one_more_of_everything(0)
    text = shown("/traffic/", "ingresses")
    assert "gone</a> as down" in text
    assert "1/2" in text
    assert shown("/traffic/", "tables").count('class="past"') == 1


def test_cells_come_in_pages_that_keep_the_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet.cells.pages.data.CELLS_SHOWN", 2)
    for number in range(3):
        rows.cell(f"c-{number}")
    first = shown("/cells/?region=us-east-1", "cells-table")
    assert 'rel="next" href="?region=us-east-1&amp;page=2"' in first
    second = shown("/cells/?region=us-east-1&page=2", "cells-table")
    assert ("c-2" in second, "c-1" in second, "Next" in second) == (True, False, False)
    assert 'href="?region=us-east-1&amp;page=1">Previous' in second


@pytest.mark.parametrize("page", ["7", "0", "-1", "x", "9" * 30])
def test_a_page_that_there_is_not_leads_back(page: str) -> None:
    rows.node("n-00000001")
    text = shown(f"/nodes/?page={page}", "nodes-table")
    assert "There is no page 7." in text if page == "7" else "n-00000001" in text
