"""Lists with a revision in `since`: changed rows, removed rows, and the next revision."""

from typing import Any

import pytest

from fleet.cells.models import Cell
from tests.controlplane.api.client import bearer, document, lists, rules
from tests.fleet import rows
from tests.fleet.rows import NOW


def watch(path: str, since: str = "r0", **parameters: Any) -> Any:
    return bearer().get(f"/api/v1/{path}", {"since": since, "timeout": 0, **parameters}).json()


@pytest.mark.django_db(transaction=True)
def test_a_watch_tells_of_everything_once_and_then_of_changes() -> None:
    rows.cell("c-1")
    begin = watch("cells")
    assert [cell["id"] for cell in begin["results"]] == ["c-1"]
    rows.cell("c-2")
    then = watch("cells", begin["revision"])
    assert [cell["id"] for cell in then["results"]] == ["c-2"]
    assert watch("cells", then["revision"])["results"] == []


@pytest.mark.django_db(transaction=True)
def test_what_a_filter_no_longer_matches_is_gone() -> None:
    cell = rows.cell("c-1")
    revision = watch("cells", state="ready")["revision"]
    Cell.objects.update(state="draining")
    found = watch("cells", revision, state="ready")
    assert (found["results"], found["gone"]) == ([], ["c-1"])
    cell.delete()
    assert watch("cells", revision)["gone"] == ["c-1"]


@pytest.mark.django_db(transaction=True)
def test_events_can_be_followed_and_still_be_asked_for_by_time() -> None:
    revision = watch("events")["revision"]
    rows.cell("c-1")
    bearer().post("/api/v1/cells/c-1/drain")
    kinds = [event["kind"] for event in watch("events", revision)["results"]]
    assert "cell.draining" in kinds
    assert bearer().get("/api/v1/events", {"since": NOW.isoformat()}).status_code == 200


@pytest.mark.slow
@pytest.mark.django_db
def test_every_list_that_says_so_can_be_watched() -> None:
    client = bearer()
    operations = {path: document()["paths"][path]["get"] for path in lists()}
    watched = [path for path, get in operations.items() if "timeout" in {each["name"] for each in get["parameters"]}]
    assert watched
    for path in watched:
        begin = client.get(path, {"since": "r0"}).json()
        assert begin["results"] == begin["gone"] == [], path
        response = client.get(path, {"since": begin["revision"], "timeout": 0})
        assert response.json()["results"] == [], path
        assert response["Switchyard-Unchanged"].endswith(" 0"), path


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("query", "broken"),
    [
        ({"since": "7"}, {"since": "revision"}),
        ({"since": "r9-8-"}, {"since": "revision"}),
        ({"since": "r0", "timeout": "61"}, {"timeout": "range"}),
        ({"since": "r0", "timeout": "soon"}, {"timeout": "range"}),
        ({"timeout": "5"}, {"timeout": "needs_since"}),
        ({"since": "r0", "state": "fine"}, {"state": "invalid_choice"}),
    ],
)
def test_a_watch_that_makes_no_sense_is_refused(query: dict[str, str], broken: dict[str, str]) -> None:
    assert rules(bearer().get("/api/v1/cells", query)) == broken


@pytest.mark.django_db
def test_a_revision_that_is_too_old_is_gone() -> None:
    response = bearer().get("/api/v1/cells", {"since": "r900000000000-900000000000-"})
    assert response.status_code == 410
    assert "begin again with r0" in response.json()["detail"]
