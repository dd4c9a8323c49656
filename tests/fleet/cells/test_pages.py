"""The page of a cell: its load over time, its logs and its actions."""

from datetime import timedelta

import pytest
from django.test import Client

from engine_agent.protocol.messages import LogTail
from fleet.cells.models import Cell
from fleet.cells.services import cell_drain
from fleet.faults.models import Incident
from fleet.load.services import load_sample
from fleet.nodes.models import NodeLog, NodeReport
from fleet.nodes.services.reports import node_logs_store
from kernel import clock
from tests.controlplane.access.callers import make_user
from tests.controlplane.dashboard.clients import fragment, signed_in
from tests.controlplane.dashboard.fleets import LOAD
from tests.fleet import rows

pytestmark = [pytest.mark.django_db, pytest.mark.slow]

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
    assert text.count("data-figure=") == 6, "no engine reports a KV cache"
    assert "&quot;name&quot;:&quot;requests&quot;" in text
    assert "Show as table" in text


def test_the_range_of_the_charts_is_in_the_url_and_a_wrong_one_is_explained() -> None:
    page = signed_in().get(f"{URL}?range=6h").content.decode()
    assert '<a href="?range=6h" aria-current="true">6h</a>' in " ".join(page.split())
    assert '<a href="?range=14d" >14d</a>' in " ".join(page.split())
    wrong = signed_in().get(URL, {"from": "<b>noon", "to": ""}).content.decode()
    assert "noon&#x27; is not a time; `from` must be like 2026-11-30T14:00Z. Shown: the last 1h." in wrong
    assert 'name="from" value="&lt;b&gt;noon"' in wrong, "what was typed stays"


def test_charts_mark_rollouts_incidents_and_shifts_and_list_them() -> None:
    now = clock.now()
    load_sample(now=now - timedelta(seconds=30))
    load_sample(now=now - timedelta(seconds=10))
    for cell, summary, minutes in ((CELL, "<i>lost</i>", 1), ("other", "elsewhere", 1), (CELL, "before", 90)):
        opened_at = now - timedelta(minutes=minutes)
        Incident.objects.create(kind=summary, subject=cell, cell=cell, summary=summary, opened_at=opened_at)
    text = part("cell-load")
    assert "1 marker " in text
    assert "incident" in text
    assert "&lt;i&gt;lost&lt;/i&gt;</a>" in text
    assert "<i>" not in text


def test_a_cell_without_a_past_says_so_in_each_chart() -> None:
    assert part("cell-load", "?range=14d").count("No data in this period.") == 7


def test_probes_say_why_an_engine_is_unwell() -> None:
    text = part("cell-probes")
    assert "unhealthy" in text
    assert "503: follower 1 is gone" in text
    assert "no probe yet" in text


LOG = (
    "INFO 03:00 loading weights",
    "WARNING 03:01 slow disk",
    "ERROR 03:02 <b>lost</b>",
    "  File engine.py, line 7",
    '{"level": "info", "event": "done"}',
)


def log_page(query: str = "") -> str:
    return " ".join(fragment(signed_in(), f"{URL}logs/{query}", "cell-log").split())


def test_opening_the_logs_asks_their_agent_for_them_and_shows_the_newest_line_last() -> None:
    assert "Waiting for the agent to send its logs" in log_page()
    node_logs_store(tails={"n-00000001": LogTail(CELL, 1, {"engine": LOG})}, now=clock.now())
    text = log_page()
    assert text.index("loading weights") < text.index("&lt;b&gt;lost&lt;/b&gt;") < text.index("&quot;done&quot;")
    assert "5 of 5 lines" in text
    assert NodeLog.objects.filter(node="n-00000002").count() == 0, "only the member that is read sends its log"
    assert "Waiting for the agent" in log_page("?node=n-00000002")


def test_lines_are_searched_and_filtered_by_level_and_downloaded_alike() -> None:
    log_page()
    node_logs_store(tails={"n-00000001": LogTail(CELL, 1, {"engine": LOG})}, now=clock.now())
    assert "2 of 5 lines" in log_page("?level=error"), "a line without a level belongs to the one before"
    assert "3 of 5 lines" in log_page("?level=warning")
    assert "1 of 5 lines" in log_page("?q=SLOW+disk&level=odd")
    assert "No line matches. <a href=" in log_page("?q=nothing")
    assert "The log is empty." in log_page("?source=proxy")
    download = signed_in().get(f"{URL}logs/download/?level=error")
    assert download.text == "ERROR 03:02 <b>lost</b>\n  File engine.py, line 7\n"
    assert download.headers["Content-Disposition"] == f'attachment; filename="{CELL}-n-00000001-engine.log"'
    assert download.headers["Content-Type"] == "text/plain; charset=utf-8"
    assert signed_in().get("/cells/none/logs/download/").status_code == 404
    assert Client().get(f"{URL}logs/download/").headers["Location"].startswith("/login/?next=")


def test_the_effect_of_draining_is_shown_first() -> None:
    assert f'href="{URL}ask/drain/"' in part("cell")
    text = " ".join(signed_in().get(f"{URL}ask/drain/").text.split())
    assert "It gets no new requests. 7 requests in flight have 60 s to finish." in text
    assert "1 other ready cell of sim-70b remains in us-east-1" in text


def test_a_cell_is_drained_when_its_name_is_typed() -> None:
    response = signed_in().post(f"{URL}ask/drain/", {"confirm": CELL, "why": "it is slow"})
    assert response.headers["Location"] == URL
    assert Cell.objects.get(pk=CELL).state == "draining"
    assert "A cell that is draining cannot be drained." in part("cell")


def test_a_drained_cell_names_its_successor() -> None:
    assert "Its place is taken by" not in part("cell")
    cell_drain(cell_id=CELL, actor="ann", now=clock.now())
    rows.cell("sim-70b-us-east-1-7", created_at=clock.now())
    assert 'Its place is taken by <a href="/cells/sim-70b-us-east-1-7/">' in part("cell")


def test_a_link_fills_the_reason_but_never_the_confirmation() -> None:
    text = signed_in().get(f"{URL}ask/drain/?why=slow&confirm={CELL}").text
    assert 'value="slow"' in text
    assert f'value="{CELL}"' not in text


def test_a_viewer_sees_why_not() -> None:
    client = Client()
    client.force_login(make_user("viewer"))
    text = fragment(client, URL, "cell")
    assert "Read-only. It needs the operator role on sim-70b." in text
    assert "ask/drain" not in text
    assert client.get(f"{URL}ask/drain/").status_code == 403


def test_without_its_name_a_cell_stays_as_it_is() -> None:
    response = signed_in().post(f"{URL}ask/drain/", {"confirm": "sim-70b", "why": "<it> is slow"})
    assert response.status_code == 409
    assert f"Type {CELL} to confirm" in response.text
    assert 'value="sim-70b"' in response.text
    assert 'value="&lt;it&gt; is slow"' in response.text
    assert Cell.objects.get(pk=CELL).state == "ready"


@pytest.mark.parametrize("url", [f"{URL}ask/dance/", "/cells/none/ask/drain/"])
def test_an_unknown_action_or_cell_is_not_found(url: str) -> None:
    assert signed_in().post(url, {"confirm": CELL}).status_code == 404
