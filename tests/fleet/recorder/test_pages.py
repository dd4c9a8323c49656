"""Why, on the pages of a cell and a node, and on the page that explains one of them."""

from collections.abc import Iterator
from datetime import timedelta
from urllib.parse import quote

import pytest
from pytest_django import DjangoDbBlocker

from fleet.faults.models import Incident
from fleet.load.models import LoadSubject, LoadWindow
from fleet.recorder.models import RecordedRound, RoundSubject
from fleet.recorder.pages import why as pages
from tests.controlplane.dashboard.clients import fragment, signed_in
from tests.fleet.recorder.passes import recorded_fleet
from tests.fleet.rows import NOW
from tests.traffic.steered import EAST, WEST, Steered

WINDOW = {"step_s": 15, "covered_s": 15, "requests": 9, "errors": 0, "slow": 0, "tokens_per_s": 1}
WINDOW |= {"cells": 2, "in_flight": 7, "queued": 3}

pytestmark = [pytest.mark.django_db, pytest.mark.slow]


@pytest.fixture(scope="module")
def cell(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[str]:
    """A cell on `n-0` and `n-1`; the spare `n-2` is suspect."""
    with recorded_fleet(django_db_blocker) as made:
        yield made


def shown(url: str, name: str) -> str:
    return " ".join(fragment(signed_in(), url, name).split())


def test_an_object_shows_the_newest_decisions_about_it(cell: str) -> None:
    text = shown(f"/cells/{cell}/", "cell-why")
    assert "<strong>start cell</strong>: placed on n-0, n-1" in text
    assert f'href="/why/cell:{cell}/"' in text
    assert "limits: lost after 30 s, suspect after 10 s" in shown("/nodes/n-2/", "node-why")
    assert "create cell" in shown("/deployments/sim-70b/", "deployment-why")


def test_the_page_explains_the_present_and_the_other_choices_on_request(cell: str) -> None:
    assert "It has been starting for 12 s" in shown(f"/why/cell:{cell}/", "why-now")
    decisions = shown(f"/why/cell:{cell}/", "why-decisions")
    assert "other choices" in decisions
    number = RoundSubject.objects.filter(subject=f"cell:{cell}").latest("round").round_id
    assert "not n-2: it is as near" in shown(f"/why/cell:{cell}/?choices={number}", "why-decisions")
    RecordedRound.objects.update(inputs=None)
    assert "were deleted" in shown(f"/why/cell:{cell}/?choices={number}", "why-decisions")


def test_a_share_has_a_page_that_the_table_of_shares_links() -> None:
    fleet = Steered({EAST: 1, WEST: 1}, {EAST: 2.0, WEST: 2.0})
    fleet.record()
    fleet.run(2)
    url = "/why/share:sim-70b@us-east-1/"
    assert f'href="{url}"' in shown("/traffic/", "shares")
    assert "Requests from us-east-1 go to us-east-1 100%" in shown(url, "why-now")
    assert "<strong>shift traffic</strong>: first plan" in shown(url, "why-decisions")


def test_a_large_fleet_is_loaded_only_on_request(cell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "NODES_LOADED", 2)
    assert 'href="?now=1"' in shown(f"/why/cell:{cell}/", "why-now")
    assert "It has been starting" in shown(f"/why/cell:{cell}/?now=1", "why-now")


def test_what_cannot_be_explained_is_not_found(db: None) -> None:
    for key in ("cell", "teapot:x", "cell:", "<b>:x"):
        response = signed_in().get(f"/why/{key}/")
        assert response.status_code == 404
        assert b"<b>:x" not in response.content


def at_time(seconds: float) -> str:
    return (NOW + timedelta(seconds=seconds)).isoformat().replace("+", "%2B")


def test_pages_show_themselves_as_they_were(cell: str) -> None:
    before = f"?at={at_time(11)}"
    nodes = shown(f"/nodes/{before}&q=n-2", "nodes-then")
    assert "ready" in nodes
    assert "n-0" not in nodes
    assert "suspect" in shown(f"/nodes/?at={at_time(12)}&role=spare", "nodes-then")
    cells = shown(f"/cells/{before}", "cells-then")
    assert cell in cells
    assert "starting" in cells
    assert "No cell matches this filter" in shown(f"/cells/{before}&state=ready", "cells-then")
    assert "0/1" in shown(f"/deployments/{before}", "places-then")
    assert "1 starting" in shown(f"/{before}", "places-then")
    assert "No incident was open" in shown(f"/{before}", "incidents-then")


def test_the_banner_names_the_time_and_the_changes_around_it(cell: str) -> None:
    page = " ".join(signed_in().get(f"/cells/?at={at_time(11)}").text.split())
    assert "2026-11-21 12:00:11 UTC" in page
    assert "Not shown as it was: load" in page
    assert f'href="?at={quote((NOW + timedelta(seconds=12)).isoformat())}"' in page
    assert 'name="at" value="' in page, "the filter keeps the time"


def test_a_time_that_cannot_be_shown_is_explained(cell: str) -> None:
    wrong = {
        "soon": "is not a time",
        "<b>": "is not a time",
        "2099-01-01": "is in the future",
        "2020-01-01": "Nothing was recorded before this time",
    }
    for at, why in wrong.items():
        page = signed_in().get("/cells/", {"at": at}).text
        assert why in page
        assert "Nothing can be shown for this time" in page
        assert "<b>" not in page


def test_a_page_without_a_past_says_that_it_shows_the_present(cell: str) -> None:
    assert "It shows the present" in signed_in().get(f"/events/?at={at_time(11)}").text


def test_time_lines_show_states_and_link_to_the_past(cell: str) -> None:
    line = shown(f"/cells/{cell}/?from=2026-11-21T11:59Z&to=2026-11-21T12:05Z", "cell-time-line")
    assert "pending from 12:00:00" in line or "starting from 12:00:00" in line
    assert 'href="/cells/?at=2026-11-21T12' in line
    subject = LoadSubject.objects.create(name="deployment:sim-70b", seen_at=NOW)
    LoadWindow.objects.create(subject=subject, at=NOW - timedelta(seconds=30), **WINDOW)
    of_deployment = shown("/deployments/sim-70b/?from=2026-11-21T11:59Z&to=2026-11-21T12:05Z", "deployment-time-line")
    assert "2 serving from 11:59:30" in of_deployment
    assert "requests wait from 11:59:30" in of_deployment
    assert f"{cell} starting from 12:00:00" in of_deployment
    assert f'href="/cells/{cell}/"' in of_deployment
    assert "suspect" in shown("/nodes/n-2/?from=2026-11-21T11:59Z&to=2026-11-21T12:05Z", "node-time-line")
    opened = {"kind": "silent-node", "subject": "n-2", "node": "n-2", "summary": "silent", "opened_at": NOW}
    incident = Incident.objects.create(**opened)
    around = shown(f"/incidents/{incident.pk}/", "incident-time-line")
    assert "silent-node from 12:00:00" in around
    assert "suspect from 12:00:12" in around
    assert f"switchyard replay {incident.pk}" in around
    assert "Nothing changed" in shown("/?from=2026-11-21T11:00Z&to=2026-11-21T11:30Z", "time-line")
