"""The page of a cell: what it carries over time, what it wrote last, and what may be asked of it."""

from datetime import timedelta

import pytest

from engine_agent.protocol.messages import LogTail
from fleet.models import Cell, NodeReport
from fleet.services.history import load_sample
from fleet.services.node_log import node_logs_store
from kernel import clock
from tests.controlplane.dashboard.clients import fragment, signed_in
from tests.controlplane.dashboard.fleets import LOAD
from tests.fleet import rows

pytestmark = pytest.mark.django_db

CELL = "sim-70b-us-east-1-1"
URL = f"/cells/{CELL}/"


@pytest.fixture(autouse=True)
def cell() -> None:
    report = {"load": LOAD, "last_seen_at": clock.now(), "health": {"ok": False, "reason": "503: follower 1 is gone"}}
    rows.cell(CELL, rows.node("n-00000001", report=report), rows.node("n-00000002"))
    rows.cell("sim-70b-us-east-1-2", rows.node("n-00000003"))


def part(name: str, query: str = "") -> str:
    return " ".join(fragment(signed_in(), URL + query, name).split())


def test_load_over_time_stands_in_charts_and_tables() -> None:
    now = clock.now()
    load_sample(now=now - timedelta(seconds=30))
    load = {**LOAD, "requests_total": 30, "ttft_counts": {"80": 30}, "itl_counts": {"60": 9}}
    NodeReport.objects.update(load=load)
    load_sample(now=now - timedelta(seconds=10))
    text = part("cell-load")
    assert text.count("data-figure=") == 4
    assert "&quot;name&quot;:&quot;requests&quot;" in text
    assert "The same as a table" in text
    assert 'href="?span=24h"' in text


def test_a_cell_without_a_past_says_so_in_each_chart() -> None:
    assert part("cell-load", "?span=14d").count("Nothing was measured in this time.") == 4


def test_probes_say_why_an_engine_is_unwell() -> None:
    text = part("cell-probes")
    assert "unwell" in text
    assert "503: follower 1 is gone" in text
    assert "none yet" in text


def test_looking_at_logs_asks_for_them_and_shows_what_came() -> None:
    assert "Its agent was asked for the last lines" in part("cell-logs")
    lines = ("loading weights", "<b>ready</b>")
    node_logs_store(tails={"n-00000001": LogTail(CELL, 1, {"engine": lines})}, now=clock.now())
    text = part("cell-logs")
    assert "loading weights &lt;b&gt;ready&lt;/b&gt;" in text


def test_what_draining_would_do_is_said_before_it_is_asked() -> None:
    text = part("cell-asks")
    assert "It gets no new requests; 7 requests in flight have 60 s to finish." in text
    assert "1 other ready cell of sim-70b stay in us-east-1" in text


def test_a_cell_is_drained_when_it_is_named() -> None:
    response = signed_in().post(f"{URL}ask/drain/", {"confirm": CELL, "why": "it is slow"})
    assert response.headers["Location"] == URL
    assert Cell.objects.get(pk=CELL).state == "draining"
    assert "neither be drained nor restarted" in part("cell-asks")


def test_a_cell_that_is_not_named_stays_as_it_is() -> None:
    response = signed_in().post(f"{URL}ask/drain/", {"confirm": "sim-70b"})
    assert response.status_code == 409
    assert f"Type {CELL} to confirm" in response.text
    assert Cell.objects.get(pk=CELL).state == "ready"


@pytest.mark.parametrize("url", [f"{URL}ask/dance/", "/cells/none/ask/drain/"])
def test_what_there_is_not_cannot_be_asked(url: str) -> None:
    assert signed_in().post(url, {"confirm": CELL}).status_code == 404
