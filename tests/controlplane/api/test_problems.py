"""Every error is a problem document that says what was wrong."""

from typing import Any

import pytest
from django.http import HttpRequest
from rest_framework.views import APIView

from controlplane.api.parsers import MAX_BODY_BYTES
from controlplane.api.problems import answer_problem
from fleet.nodes.models import Node
from tests.controlplane.api.client import anonymous, bearer, document, resolved
from tests.controlplane.api.client import assert_valid as assert_valid_against
from tests.fleet import rows

pytestmark = pytest.mark.django_db


def assert_problem(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status
    assert response["Content-Type"] == "application/problem+json"
    body: dict[str, Any] = response.json()
    assert_valid_against(body, resolved({"$ref": "#/components/schemas/Problem"}))
    assert body["status"] == status
    return body


def test_a_missing_thing_is_named() -> None:
    body = assert_problem(bearer().get("/api/v1/cells/nowhere-1"), 404)
    assert body["title"] == "Not Found"
    assert body["detail"] == "there is no cell 'nowhere-1'"
    assert body["instance"] == "/api/v1/cells/nowhere-1"


@pytest.mark.parametrize(
    "path", ["/api/", "/api/v1/unicorns", "/api/v2/cells", "/api/v1/cells/a/b", "/api/v1/cells/%00"]
)
def test_a_path_that_does_not_exist_is_a_problem_too(path: str) -> None:
    client = anonymous()
    for request in (client.get, client.post, client.delete):
        assert_problem(request(path), 404)


@pytest.mark.parametrize("path", ["/api/v1/incidents/" + 30 * "9", "/api/v1/events/" + 5000 * "9"])
def test_a_number_beyond_all_rows_is_not_found(path: str) -> None:
    assert_problem(bearer().get(path), 404)


@pytest.mark.parametrize("path", ["/api/v1/model-versions/a@%20", "/api/v1/routing-tables/nowhere@1"])
def test_an_unknown_reference_is_not_found(path: str) -> None:
    assert_problem(bearer().get(path), 404)


def test_a_method_that_a_path_does_not_have_names_those_it_has() -> None:
    response = bearer().put("/api/v1/deployments/x", {}, format="json")
    assert_problem(response, 405)
    assert response["Allow"] == "GET, PATCH, DELETE, HEAD, OPTIONS"


def test_a_body_that_is_not_json_is_refused() -> None:
    rows.deployment()
    assert_problem(bearer().patch("/api/v1/deployments/sim-70b", "cells=3", content_type="text/plain"), 415)


def test_malformed_json_says_where() -> None:
    rows.deployment()
    response = bearer().patch("/api/v1/deployments/sim-70b", '{"regions": ', content_type="application/json")
    assert "JSON parse error" in assert_problem(response, 400)["detail"]


def test_json_nested_without_end_is_refused() -> None:
    rows.deployment()
    response = bearer().patch("/api/v1/deployments/sim-70b", 100_000 * "[", content_type="application/json")
    assert "nested deeper than 32 levels" in assert_problem(response, 400)["detail"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('{"regions":[],"regions":[]}', "the member 'regions' is there twice"),
        ('{"slo":{"ttft_ms":{"p":1,"p":2}}}', "the member 'p' is there twice"),
        ('{"drain_deadline_s":NaN}', "NaN is not a JSON number"),
        (40 * "[" + 40 * "]", "nested deeper than 32 levels"),
        ('{"why":"a"}'.encode("utf-16"), "codec"),
    ],
)
def test_a_body_that_two_readers_could_understand_in_two_ways_is_refused(body: str | bytes, said: str) -> None:
    rows.deployment()
    response = bearer().patch("/api/v1/deployments/sim-70b", body, content_type="application/json")
    assert said in assert_problem(response, 400)["detail"]


def test_a_text_that_no_column_takes_is_refused_by_its_place() -> None:
    rows.deployment()
    body = '{"slo":{"a":["\\u0000"]},"regions":[{"region":"\\ud800"}],"x\\u0000":1}'
    response = bearer().patch("/api/v1/deployments/sim-70b", body, content_type="application/json")
    errors = assert_problem(response, 400)["errors"]
    assert {(error["field"], error["rule"]) for error in errors} == {
        ("slo.a.0", "storable"),
        ("regions.0.region", "storable"),
        ("", "storable"),
    }


def test_a_body_without_end_is_refused() -> None:
    rows.deployment()
    long = '"' + MAX_BODY_BYTES * "x" + '"'
    assert_problem(bearer().patch("/api/v1/deployments/sim-70b", long, content_type="application/json"), 413)


def test_a_client_that_wants_no_json_gets_a_problem() -> None:
    assert_problem(bearer().get("/api/v1/cells", headers={"accept": "text/html"}), 406)


@pytest.mark.parametrize("path", ["/api/v1/cells", "/api/v1/cells/", "/api/v1/cells/x", "/api/v1/cells/x/"])
def test_a_final_slash_makes_no_difference(path: str) -> None:
    assert bearer().get(path).status_code == (404 if "x" in path else 200)


def test_a_fault_of_ours_is_a_problem_that_tells_nothing_of_our_insides(caplog: pytest.LogCaptureFixture) -> None:
    request = APIView().initialize_request(HttpRequest())
    request.path = "/api/v1/cells"
    response = answer_problem(RuntimeError("secret"), {"view": APIView(), "request": request, "kwargs": {}})
    assert response.status_code == 500
    assert response.content_type == "application/problem+json"
    assert_valid_against(response.data, document()["components"]["schemas"]["Problem"])
    assert "secret" not in str(response.data)
    assert "secret" in caplog.text


def test_a_state_that_does_not_fit_is_a_conflict() -> None:
    rows.cell(state="starting")
    body = assert_problem(bearer().post("/api/v1/cells/sim-70b-us-east-1-1/drain"), 409)
    assert body["detail"] == "cell sim-70b-us-east-1-1 is starting; drain needs a cell that is ready"


def test_errors_name_field_rule_and_message() -> None:
    node = rows.node("n-00000001")
    response = bearer().post(f"/api/v1/nodes/{node.id}/cordon", {"way": "typo"}, format="json")
    assert assert_problem(response, 400)["errors"] == [
        {"field": "way", "rule": "unknown", "message": "unknown field; allowed: why"}
    ]
    assert not Node.objects.get().cordoned


def test_the_path_of_a_problem_is_a_valid_reference() -> None:
    assert (
        assert_problem(anonymous().get("/api/v1/cells/%C2%84/drain"), 404)["instance"] == "/api/v1/cells/%C2%84/drain"
    )
