"""What opens the API: a token or a session (what is refused without either: tests/controlplane/access). A session
changes nothing without its CSRF token."""

import pytest
from django.conf import settings

from fleet.nodes.models import Node
from tests.controlplane.api.client import anonymous, bearer, browser, document, lists, noun
from tests.fleet import rows

pytestmark = pytest.mark.django_db

OF_THE_CALLER = {"users", "tokens"}
"""Lists that have the caller's own, and nothing else as yet."""


@pytest.mark.slow
def test_a_token_opens_every_list() -> None:
    client = bearer()
    for path in lists():
        page = client.get(path).json()
        own = path.rpartition("/")[2] in OF_THE_CALLER
        assert page == {"next": None, "previous": None, "results": page["results"] if own else []}, path
        assert len(page["results"]) == own, path


@pytest.mark.slow
def test_a_session_opens_every_list() -> None:
    client = browser()
    assert {path: client.get(path).status_code for path in lists()} == dict.fromkeys(lists(), 200)


def test_a_wrong_token_opens_nothing() -> None:
    client = anonymous()
    client.credentials(HTTP_AUTHORIZATION="Bearer sw_00000000000000_" + 48 * "0")
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
    with_a_list = {noun(path) for path in document()["paths"] if "{" not in path}
    assert set(bearer().get("/api/v1/").json()) == with_a_list
