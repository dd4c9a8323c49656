"""What is odd in a query string, an identifier or a body is refused or finds nothing; the API never fails for it.
With `SWITCHYARD_FUZZ` set, every odd text goes to every filter; else each filter gets one of them."""

import os
from itertools import count
from typing import Any

import pytest
from rest_framework.test import APIClient

from accounts.api.routes import ROUTES as ACCOUNTS
from controlplane.api.audit import AuditViewSet
from controlplane.api.events import EventViewSet
from fleet.api.routes import ROUTES as FLEET
from models_registry.api.routes import ROUTES as MODELS
from tests.controlplane.api.client import bearer
from traffic.api.routes import ROUTES as TRAFFIC

pytestmark = pytest.mark.django_db

ODD = ("%00", "a%00b", "%ff", "%ed%a0%80", "[]", "9" * 40, "-1", "1e999", "%F0%9F%92%A9", "x" * 3000)
OWN = (("events", EventViewSet, "event"), ("audit", AuditViewSet, "audit-record"))
LISTS: tuple[tuple[str, Any, str], ...] = (*ACCOUNTS, *FLEET, *MODELS, *TRAFFIC, *OWN)
EVERY_LISTS = ("ordering", "cursor", "page_size")
BODIES: tuple[Any, ...] = (
    [],
    ["a"],
    {"kind": ["Model"]},
    {"kind": {}},
    [{"kind": ["Model"], "metadata": {"name": "x"}}],
)


@pytest.fixture
def client() -> APIClient:
    caller = bearer()
    caller.raise_request_exception = False
    return caller


def test_no_query_string_is_a_fault_of_ours(client: APIClient) -> None:
    turn = count()
    for path, view, _ in LISTS:
        filters = getattr(getattr(view, "filterset_class", None), "base_filters", ())
        for name in (*filters, *(EVERY_LISTS if view is LISTS[0][1] else ())):
            for odd in ODD if "SWITCHYARD_FUZZ" in os.environ else (ODD[next(turn) % len(ODD)],):
                answer = client.get(f"/api/v1/{path}/?{name}={odd}&{name}={odd}")
                assert answer.status_code in {200, 400, 403, 404, 405}, (path, name, odd[:20])


def test_no_identifier_is_a_fault_of_ours(client: APIClient) -> None:
    for path, _, _ in LISTS:
        answer = client.get(f"/api/v1/{path}/a%00b/")
        assert answer.status_code in {400, 403, 404, 405}, path


@pytest.mark.parametrize(
    "path", ["plan", "apply", "apply/preview", "keys", "webhooks", "model-versions", "deployments"]
)
def test_a_list_where_a_name_belongs_is_refused(client: APIClient, path: str) -> None:
    for body in BODIES:
        answer = client.post(f"/api/v1/{path}/", body, format="json")
        assert answer.status_code in {400, 404, 405, 415, 422}, (path, body, answer.content)
