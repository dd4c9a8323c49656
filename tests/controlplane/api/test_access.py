"""Who may use the API: nobody without a token or a session; and no session changes anything without its CSRF token."""

import pytest
from django.conf import settings

from fleet.models import Node
from tests.controlplane.api.client import anonymous, bearer, browser, document, lists, noun
from tests.fleet import rows

pytestmark = pytest.mark.django_db

REFERENCED = {"model-versions", "routing-tables"}
"""Known by a reference of two parts, `model@version` or `region@revision`."""
OF_THE_CALLER = {"users", "tokens"}
"""Lists that have the caller's own, and nothing else as yet."""
OPERATIONS = [
    (method, path.replace("{id}", "x@1" if path.split("/")[3] in REFERENCED else "1").replace("{name}", "x"))
    for path, operations in document()["paths"].items()
    for method, operation in operations.items()
]


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_a_stranger_may_do_nothing(method: str, path: str) -> None:
    response = anonymous().generic(method.upper(), path, "{}", content_type="application/json")
    assert response.status_code == 401
    assert response["WWW-Authenticate"] == "Bearer"
    assert response["Content-Type"] == "application/problem+json"


@pytest.mark.parametrize("path", lists())
def test_a_token_opens_every_list(path: str) -> None:
    answer = bearer().get(path).json()
    own = path.rpartition("/")[2] in OF_THE_CALLER
    assert answer == {"next": None, "previous": None, "results": answer["results"] if own else []}
    assert len(answer["results"]) == own


@pytest.mark.parametrize("path", lists())
def test_a_session_opens_every_list(path: str) -> None:
    assert browser().get(path).status_code == 200


def test_a_wrong_token_opens_nothing() -> None:
    client = anonymous()
    client.credentials(HTTP_AUTHORIZATION="Bearer sw_00000000_" + 48 * "0")
    assert client.get("/api/v1/cells").status_code == 401


def test_a_session_without_its_csrf_token_changes_nothing() -> None:
    node = rows.node("n-00000001")
    response = browser().post(f"/api/v1/nodes/{node.id}/cordon")
    assert response.status_code == 403
    assert response["Content-Type"] == "application/problem+json"
    assert not Node.objects.get().cordoned


def test_a_session_with_its_csrf_token_may_change_things() -> None:
    node = rows.node("n-00000001")
    client = browser()
    client.cookies[settings.CSRF_COOKIE_NAME] = 32 * "a"
    response = client.post(f"/api/v1/nodes/{node.id}/cordon", headers={"x-csrftoken": 32 * "a"})
    assert response.status_code == 200
    assert Node.objects.get().cordoned


def test_a_token_needs_no_csrf_token() -> None:
    node = rows.node("n-00000001")
    assert bearer().post(f"/api/v1/nodes/{node.id}/cordon").status_code == 200


def test_the_root_lists_the_resources_to_those_who_may_see_them() -> None:
    assert anonymous().get("/api/v1/").status_code == 401
    assert set(bearer().get("/api/v1/").json()) == {noun(path) for _, path in OPERATIONS}
