"""Lists refuse what they do not understand, and say what they would."""

import pytest

from tests.controlplane.api.client import bearer, document, lists, rules

pytestmark = pytest.mark.django_db


@pytest.mark.slow
def test_every_list_refuses_an_unknown_parameter_and_names_those_it_knows() -> None:
    client = bearer()
    for path in lists():
        response = client.get(path, {"colour": "red"})
        assert rules(response) == {"colour": "unknown_parameter"}, path
        for parameter in document()["paths"][path]["get"]["parameters"]:
            assert parameter["name"] in response.json()["errors"][0]["message"], path


def test_details_take_no_parameter() -> None:
    response = bearer().get("/api/v1/cells/x", {"state": "ready"})
    assert rules(response) == {"state": "unknown_parameter"}


def test_a_state_that_does_not_exist_is_refused_with_those_that_do() -> None:
    response = bearer().get("/api/v1/cells", {"state": "fine"})
    assert rules(response) == {"state": "invalid_choice"}
    message = response.json()["errors"][0]["message"]
    assert message == "'fine' is not one of: pending, starting, ready, draining, stopped, failed, lost"


@pytest.mark.parametrize(
    ("path", "query", "broken"),
    [
        ("cells", "serving_class=fast", {"serving_class": "invalid_choice"}),
        ("cells", "model_version=sim-70b", {"model_version": "invalid"}),
        ("cells", "include=some", {"include": "invalid_choice"}),
        ("cells", "region=", {"region": "blank"}),
        ("cells", "region=a&region=b", {"region": "once"}),
        ("cells", "state=ready&state=", {"state": "blank"}),
        ("cells", "region=%00", {"region": "storable"}),
        ("cells", "colour=red&state=fine", {"colour": "unknown_parameter", "state": "invalid_choice"}),
        ("cells", "page_size=1&page_size=2", {"page_size": "once"}),
        ("nodes", "cordoned=maybe", {"cordoned": "invalid_choice"}),
        ("nodes", "role=boss", {"role": "invalid_choice"}),
        ("events", "since=yesterday", {"since": "invalid"}),
        ("events", "since=0001-01-01T00:00:00%2B20:00", {"since": "range"}),
        ("events", "since_id=1.5", {"since_id": "invalid"}),
        ("routing-tables", "current=1", {"current": "invalid_choice"}),
    ],
)
def test_a_bad_value_is_refused_by_name(path: str, query: str, broken: dict[str, str]) -> None:
    assert rules(bearer().get(f"/api/v1/{path}?{query}")) == broken


def test_a_time_may_be_as_far_from_utc_as_python_goes() -> None:
    assert bearer().get("/api/v1/events?since=2026-11-21T12:00:00-23:59").status_code == 200
