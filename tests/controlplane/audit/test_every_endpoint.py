"""No unsafe endpoint escapes the audit, whichever it is and whenever it was added."""

from typing import Any

import pytest
from django.conf import settings
from django.contrib.auth.models import AnonymousUser
from django.http import HttpRequest, HttpResponse
from django.test import Client, RequestFactory
from django.urls import resolve

from controlplane.audit.border import AuditBorder, reason_not_audited
from controlplane.kernel.events import event_record
from controlplane.kernel.trail import keep_trail
from tests.controlplane.audit.endpoints import Endpoint, unsafe_endpoints
from tests.controlplane.audit.records import only_record, recorded
from tests.controlplane.dashboard.clients import signed_in
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db

ENDPOINTS = unsafe_endpoints()
AUDITED = [endpoint for endpoint in ENDPOINTS if not reason_not_audited(endpoint.view)]
WITHOUT_COOKIES = {"/agents/enrol"}
"""Agents show a join token; strangers leave no record."""


def test_there_are_many_and_few_are_excepted() -> None:
    assert len(AUDITED) > 60
    excepted = {endpoint.path for endpoint in ENDPOINTS} - {endpoint.path for endpoint in AUDITED}
    assert {path for path in excepted if not path.startswith("/v1/")} <= {"/playground/say/"}


def test_the_border_is_the_last_middleware() -> None:
    assert settings.MIDDLEWARE[-1] == "controlplane.audit.border.AuditBorder"


@pytest.mark.parametrize("endpoint", AUDITED, ids=str)
def test_a_change_is_recorded_once(endpoint: Endpoint) -> None:
    request = RequestFactory().generic(endpoint.method, endpoint.path, content_type="application/json")
    request.user = AnonymousUser()
    request.resolver_match = resolve(endpoint.path)

    def changes_something(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        event_record(kind="test.changed", message="changed", now=NOW)
        return HttpResponse()

    changes_something.__dict__.update(endpoint.view.__dict__)
    border = AuditBorder(lambda request: HttpResponse())
    with keep_trail():
        border.process_view(request, changes_something, (), dict(request.resolver_match.kwargs))
    assert only_record().action


@pytest.mark.parametrize("endpoint", [each for each in AUDITED if each.path not in WITHOUT_COOKIES], ids=str)
def test_a_refusal_is_recorded_once(endpoint: Endpoint) -> None:
    client = Client(enforce_csrf_checks=True)
    client.cookies = signed_in().cookies
    answer = client.generic(endpoint.method, endpoint.path, "{}", content_type="application/json")
    assert answer.status_code in {403, 405}
    assert [record.outcome for record in recorded()] == ["denied"] * (answer.status_code == 403)
