"""Every resource keeps the same promises, and every path under /api/ refuses in the same form."""

import pytest

from controlplane.api.urls import router
from kernel.rest.view_sets import Conventions
from tests.controlplane.api.client import anonymous, bearer

pytestmark = pytest.mark.django_db


def test_every_view_set_inherits_the_conventions() -> None:
    others = [prefix for prefix, view_set, _ in router.registry if not issubclass(view_set, Conventions)]
    assert others == [], "take the view sets of kernel.rest.view_sets"


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("post", "/api/schema/", {}, 405),
        ("get", "/api/schema/", {"accept": "image/png"}, 406),
        ("delete", "/api/docs/", {}, 405),
        ("post", "/api/v1/", {}, 405),
        ("delete", "/api/v1/cells", {}, 405),
        ("patch", "/api/v1/events/1", {}, 405),
        ("put", "/api/v1/deployments/x", {}, 405),
        ("get", "/api/v1/cells", {"accept": "application/xml"}, 406),
        ("get", "/api/v9/cells", {}, 404),
        ("get", "/api", {}, 404),
        ("get", "/api/v1/deployments/x/cells", {}, 404),
    ],
)
def test_a_refusal_is_a_problem_document_wherever_it_comes_from(
    method: str, path: str, headers: dict[str, str], status: int
) -> None:
    client = bearer() if path.startswith("/api/v1") else anonymous()
    response = getattr(client, method)(path, headers=headers, follow=path == "/api")
    assert response.status_code == status
    assert response["Content-Type"] == "application/problem+json"
    assert response.json()["status"] == status
