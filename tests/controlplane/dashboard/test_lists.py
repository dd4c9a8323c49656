"""Lists sort by their columns, narrow and are exported; all of it lives in the URL."""

import csv
import re
from typing import Any

import pytest
from django.contrib.auth.models import Group, User
from django.test import Client

from accounts.models import GroupRole
from controlplane.dashboard.lists import cell_text
from fleet.webhooks.models import Webhook, WebhookDelivery
from kernel import clock
from kernel.events import event_record
from models_registry.benchmarks.models import Benchmark
from models_registry.builds.models import EngineBuild
from tests.controlplane.access.callers import make_user
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
    monkeypatch.setattr("controlplane.dashboard.lists.ROWS_SHOWN", 2)
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


def order_of(url: str, name: str, *ids: str) -> list[str]:
    """These IDs in the order in which a list shows their rows."""
    text = shown(url, name)
    return sorted(ids, key=lambda one: text.index(f'id="row-{one}"'))


def busy(name: str, in_flight: int, **report: Any) -> None:
    seen = {"load": {"in_flight": in_flight}, "last_seen_at": clock.now(), **report}
    rows.cell(name, rows.node(f"n-of-{name}", report=seen), created_at=clock.now())


def test_cells_are_sorted_by_the_load_that_they_show_and_those_without_are_last() -> None:
    for name, in_flight in (("c-2", 2), ("c-10", 10), ("c-1", 1)):
        busy(name, in_flight)
    busy("c-old", 99, last_seen_at=NOW)
    cells = ("c-2", "c-10", "c-1", "c-old")
    assert order_of("/cells/?sort=in-flight", "cells-table", *cells) == ["c-1", "c-2", "c-10", "c-old"]
    assert order_of("/cells/?sort=-in-flight", "cells-table", *cells) == ["c-10", "c-2", "c-1", "c-old"]


def test_headings_say_how_a_list_is_sorted_and_a_click_turns_it() -> None:
    rows.node("n-1")
    rows.node("n-2")
    text = shown("/nodes/?state=ready&sort=node", "nodes-table")
    assert '<th scope="col" aria-sort="ascending"><a href="?state=ready&amp;sort=-node">Node</a>' in text
    assert order_of("/nodes/?sort=-node", "nodes-table", "n-1", "n-2") == ["n-2", "n-1"]
    assert "sort=-report" in text, "the newest first"
    assert 'name="sort" value="-node"' in signed_in().get("/nodes/?sort=-node").text


@pytest.mark.parametrize("sort", ["password", "-", "--node", "member__cell", "node,id", "<script>", "9" * 500])
def test_a_column_that_there_is_not_sorts_nothing(sort: str) -> None:
    rows.node("n-1")
    response = signed_in().get("/nodes/", {"sort": sort})
    assert response.status_code == 200
    assert "aria-sort" not in response.text


def csv_of(url: str) -> list[list[str]]:
    response: Any = signed_in().get(url)
    assert response.headers["Content-Type"] == "text/csv; charset=utf-8"
    assert "attachment; filename=" in response.headers["Content-Disposition"]
    return list(csv.reader(b"".join(response.streaming_content).decode().splitlines()))


def test_a_list_is_exported_as_it_is_filtered_and_sorted() -> None:
    for number in range(3):
        rows.node(f"n-{number}", cordoned=number == 0)
    rows.node("n-9", state="lost")
    heading, *lines = csv_of("/nodes/?state=ready&sort=-node&format=csv")
    assert heading[:3] == ["Node", "State", "Role"]
    assert [line[0] for line in lines] == ["n-2", "n-1", "n-0"]
    assert lines[0][8] == "2026-11-21T12:00:00+00:00"


def test_an_export_is_complete_beyond_a_page_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ROWS_SHOWN", 1), ("CHUNK", 2), ("MAX_EXPORTED", 5)):
        monkeypatch.setattr(f"controlplane.dashboard.lists.{name}", value)
    for number in range(7):
        rows.node(f"n-{number}")
    assert len(csv_of("/nodes/?format=csv")) == 1 + 5


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("=1+1", "'=1+1"),
        ("+A1", "'+A1"),
        ("-A1", "'-A1"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("\t=1", "'\t=1"),
        (-3, "-3"),
        (None, ""),
        ("a\0b", "ab"),
        (True, "True"),
        (NOW, "2026-11-21T12:00:00+00:00"),
    ],
)
def test_a_spreadsheet_calculates_no_value(value: object, text: str) -> None:
    assert cell_text(value) == text


def test_what_users_typed_is_exported_as_text() -> None:
    event_record(kind="k", message='=HYPERLINK("https://evil.example")', now=NOW)
    assert csv_of("/events/?format=csv")[1][2].startswith("'=HYPERLINK")


def test_an_export_needs_the_role_of_its_page() -> None:
    client = Client()
    assert client.get("/nodes/?format=csv").headers["Location"].startswith("/login/")
    client.force_login(make_user("viewer"))
    assert client.get("/nodes/?format=csv").headers["Content-Type"].startswith("text/csv")
    assert client.get("/audit/?format=csv").status_code == 403
    assert csv_of("/audit/?format=csv")[0][:2] == ["Number", "Time"]


def test_events_are_found_by_a_part_of_their_message_a_part_of_the_history_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("controlplane.dashboard.events.SEARCHED", 3)
    for message in ("needle one", "b", "c", "needle two", "e"):
        event_record(kind="k", message=message, now=NOW, cell="c-1")
    first = shown("/events/?q=NEEDLE", "events-list")
    assert "needle two" in first
    assert "needle one" not in first
    older = first.split('rel="next" href="')[1].split('"')[0].replace("&amp;", "&")
    assert "needle one" in shown(f"/events/{older}", "events-list")
    assert 'name="subject" value="c-1"' in signed_in().get("/events/?subject=c-1").text


def test_deployments_are_sorted_and_exported_by_the_values_that_they_show() -> None:
    for number in range(3):
        one_more_of_everything(number)
    busy("c-1", 5)  # of sim-70b; the others have no fresh report
    names = [f"deployments-table-{name}" for name in ("deployment-0", "deployment-2", "sim-70b")]
    text = shown("/deployments/?sort=-deployment", "deployments-table")
    assert sorted(names, key=lambda one: text.index(f'id="{one}"')) == names[::-1]
    heading, *lines = csv_of("/deployments/?sort=-in-flight&format=csv")
    assert (heading[5], lines[0][0], lines[0][5]) == ("In flight", "sim-70b", "5")


def test_regions_are_found_sorted_and_exported() -> None:
    rows.node("n-1", where="eu-west-1")
    rows.node("n-2")
    rows.node("n-3")
    assert order_of("/regions/?sort=-nodes", "regions-table", "eu-west-1", "us-east-1") == ["us-east-1", "eu-west-1"]
    assert order_of("/regions/?q=WEST", "regions-table", "eu-west-1") == ["eu-west-1"]
    assert [line[0] for line in csv_of("/regions/?q=west&format=csv")] == ["Region", "eu-west-1"]


def test_the_second_list_of_a_page_has_its_own_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controlplane.dashboard.lists.ROWS_SHOWN", 2)
    for number in range(3):
        one_more_of_everything(number)
        EngineBuild.objects.filter(name=f"build-{number}").update(packed_bytes=100 - number)
    url = "/models/?sort=model&builds-sort=size"
    first = shown(url, "engine-builds")
    assert (">build-2<" in first, ">build-0<" in first) == (True, False)
    assert 'href="?sort=model&amp;builds-sort=size&amp;builds-page=2"' in first
    assert 'name="sort" value="model"' in first
    assert "There is no page" not in shown(f"{url}&builds-page=2", "versions-table")
    assert [line[0] for line in csv_of("/models/?builds-q=D-1&list=builds-&format=csv")] == ["Build", "build-1"]
    assert csv_of("/models/?builds-q=D-1&format=csv")[0][0] != "Build"


def test_a_csv_has_the_present_only_and_says_so() -> None:
    rows.node("n-1")
    response = signed_in().get("/nodes/?at=2026-11-21T12:00:00Z&format=csv")
    assert (response.status_code, "the present only" in response.text) == (400, True)
    assert (
        "at=" not in shown("/incidents/?state=all&at=2026-11-21T12:00:00Z", "incidents-list").split("Download")[0][-90:]
    )


def test_users_and_groups_are_found_sorted_and_exported_and_keep_their_groups() -> None:
    for name in ("ada", "bob"):
        GroupRole.objects.create(group=Group.objects.create(name=f"{name}s"), role="operator", claim="=1+1")
    make_user("ada").groups.add(Group.objects.get(name="adas"))
    make_user("bob")
    found = shown("/settings/users/?users-q=AD", "settings-users")
    assert ('id="user-' in found, ">ada<" in found, ">bob<" in found) == (True, True, False)
    assert '<option value="adas" selected>' in found
    text = shown("/settings/users/?users-sort=-name", "settings-users")
    assert text.index(">bob<") < text.index(">ada<")
    assert [line[0] for line in csv_of("/settings/users/?users-q=ad&list=users-&format=csv")] == ["Name", "ada"]
    assert csv_of("/settings/groups/?groups-q=bob&format=csv")[1] == ["bobs", "operator", "0", "'=1+1"]
    assert 'No user matches this filter. <a href="/settings/users/">' in shown(
        "/settings/users/?users-q=zoe", "settings-users"
    )
    client = Client()
    client.force_login(User.objects.get(username="bob"))
    assert client.get("/settings/users/?format=csv").status_code == 403


def test_deliveries_are_found_and_exported_without_those_of_tenants() -> None:
    hook = Webhook.objects.create(name="pager", url="https://pager.example/", secret="s", created_at=NOW)
    for event in ("incident.opened", "rollout.ended"):
        WebhookDelivery.objects.create(webhook=hook, event=event, body={}, created_at=NOW, due_at=NOW)
    own = {"own_url": "https://tenant.example/", "event": "incident.batch", "body": {}}
    WebhookDelivery.objects.create(**own, created_at=NOW, due_at=NOW)
    text = shown("/settings/webhooks/?deliveries-q=INCIDENT", "settings-deliveries")
    assert ("incident.opened" in text, "rollout.ended" in text, "incident.batch" in text) == (True, False, False)
    assert [line[2] for line in csv_of("/settings/webhooks/?deliveries-sort=event&list=deliveries-&format=csv")] == [
        "Event", "incident.opened", "rollout.ended",
    ]  # fmt: skip


def test_benchmarks_are_found_sorted_and_exported() -> None:
    for number, goodput, deployment in ((1, 9.0, "=other"), (2, 5.0, "sim-70b"), (3, None, "sim-70b")):
        Benchmark.objects.create(
            id=number, version=rows.version(), deployment=deployment, region="r", state="done", goodput=goodput,
            workload="1000+150", slo="ttft=1000,itl=60", actor="ada", created_at=NOW, ended_at=NOW,
        )  # fmt: skip
    assert [line[2] for line in csv_of("/benchmarks/?sort=goodput&q=OTHER&format=csv")] == ["Deployment", "'=other"]
    text = shown("/benchmarks/?sort=goodput", "benchmarks-table")
    assert re.findall(r'id="benchmark-(\d)"', text) == ["2", "1", "3"]
