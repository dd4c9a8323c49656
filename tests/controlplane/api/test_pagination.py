"""Pages: every row once, in order, for any page size; unsigned cursors are rejected."""

from base64 import b64encode

import pytest

from kernel.models import Event
from tests.controlplane.api.client import bearer, rules
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = [pytest.mark.django_db, pytest.mark.slow]


def _encoded(cursor: bytes) -> str:
    return b64encode(cursor).decode()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_following_next_shows_every_row_once(size: int) -> None:
    for number in range(7):
        rows.node(f"n-{number:08x}")
    client, url, seen = bearer(), f"/api/v1/nodes?page_size={size}", []
    while url:
        page = client.get(url).json()
        seen += [node["id"] for node in page["results"]]
        assert len(page["results"]) <= size
        url = page["next"]
    assert seen == [f"n-{number:08x}" for number in range(7)]


def test_previous_leads_back() -> None:
    for number in range(5):
        rows.node(f"n-{number:08x}")
    client = bearer()
    first = client.get("/api/v1/nodes?page_size=2").json()
    second = client.get(first["next"]).json()
    assert client.get(second["previous"]).json()["results"] == first["results"]


def test_rows_that_arrive_meanwhile_shift_nothing() -> None:
    events = [Event.objects.create(at=NOW, kind="k", message=str(number)) for number in range(4)]
    client = bearer()
    first = client.get("/api/v1/events?page_size=2").json()
    Event.objects.create(at=NOW, kind="k", message="new")
    second = client.get(first["next"]).json()
    assert [row["id"] for row in first["results"] + second["results"]] == [event.id for event in reversed(events)]


def test_filters_stay_on_the_next_page() -> None:
    for number in range(4):
        rows.node(f"n-{number:08x}", where="us-east-1" if number % 2 else "us-west-2")
    client = bearer()
    first = client.get("/api/v1/nodes?region=us-east-1&page_size=1").json()
    assert [node["id"] for node in client.get(first["next"]).json()["results"]] == ["n-00000003"]


def test_a_size_out_of_range_is_refused() -> None:
    client = bearer()
    for size in ("0", "-1", "1001", "99999999", "ten", "1.5", "²"):
        assert rules(client.get("/api/v1/nodes", {"page_size": size})) == {"page_size": "range"}, size


@pytest.mark.parametrize("path", ["nodes", "events"])
def test_a_cursor_that_is_none_of_ours_is_refused(path: str) -> None:
    client = bearer()
    for cursor in ("nonsense", "é", *map(_encoded, (b"p=%00", b"r=x", b"o=x"))):
        assert rules(client.get(f"/api/v1/{path}", {"cursor": cursor})) == {"cursor": "cursor"}, cursor


def test_a_cursor_of_another_list_is_refused() -> None:
    assert rules(bearer().get("/api/v1/events", {"cursor": _encoded(b"p=n-00000001")})) == {"cursor": "cursor"}
