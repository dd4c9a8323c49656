"""No unsafe endpoint escapes the audit, whichever it is and whenever it was added."""

from http import HTTPStatus
from typing import Any

import pytest
from django.conf import settings
from django.contrib.auth.models import AnonymousUser
from django.http import HttpRequest, HttpResponse
from django.test import Client, RequestFactory
from django.urls import resolve

from audit.middleware import AuditMiddleware, exemption
from audit.models import AuditRecord
from audit.signals import login_recording
from kernel.events import event_record
from tests.audit.endpoints import Endpoint, unsafe_endpoints
from tests.controlplane.dashboard.clients import signed_in
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db

ENDPOINTS = unsafe_endpoints()
AUDITED = [endpoint for endpoint in ENDPOINTS if not exemption(endpoint.view)]
MIDDLEWARE = AuditMiddleware(lambda request: HttpResponse())
WITHOUT_COOKIES = {"/agents/enrol", "/agents/join/refused", "/agents/join/attest", "/agents/caches/1"}
"""Agents show a join token or a credential; anonymous requests leave no record."""


def test_there_are_many_and_few_are_excepted() -> None:
    assert len(AUDITED) > 60
    excepted = {endpoint.path for endpoint in ENDPOINTS} - {endpoint.path for endpoint in AUDITED}
    part = "/api/v1/engine-build-uploads/1/part"  # start and end of an upload are recorded
    assert {path for path in excepted if not path.startswith("/v1/")} <= {
        "/playground/code/",
        "/playground/say/",
        "/tenant/",
        "/agents/join/check",
        part,
    }


def test_it_is_the_last_middleware() -> None:
    assert settings.MIDDLEWARE[-1] == "audit.middleware.AuditMiddleware"


def change(endpoint: Endpoint) -> None:
    """Answer a request to this endpoint by a view that is declared as its own, and changes something."""
    request = RequestFactory().generic(endpoint.method, endpoint.path, content_type="application/json")
    request.user = AnonymousUser()
    request.resolver_match = resolve(endpoint.path)

    def changes_something(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        event_record(kind="test.changed", message="changed", now=NOW)
        return HttpResponse()

    changes_something.__dict__.update(endpoint.view.__dict__)
    with login_recording():
        MIDDLEWARE.process_view(request, changes_something, (), dict(request.resolver_match.kwargs))


@pytest.mark.slow
def test_every_change_is_recorded_once() -> None:
    wrong = []
    for count, endpoint in enumerate(AUDITED, 1):
        change(endpoint)
        if AuditRecord.objects.count() != count or not AuditRecord.objects.latest("number").action:
            wrong.append(str(endpoint))
    assert wrong == []


@pytest.mark.slow
def test_every_refusal_is_recorded_once(thorough: bool) -> None:
    """By default of one endpoint in four: the middleware that records is the same for all."""
    client, wrong, denied = Client(enforce_csrf_checks=True), [], 0
    client.cookies = signed_in().cookies
    refusing = [endpoint for endpoint in AUDITED if endpoint.path not in WITHOUT_COOKIES]
    for endpoint in refusing if thorough else refusing[::4]:
        status = client.generic(endpoint.method, endpoint.path, "{}", content_type="application/json").status_code
        denied += status == HTTPStatus.FORBIDDEN
        if status not in {403, 405} or AuditRecord.objects.filter(outcome="denied").count() != denied:
            wrong.append(f"{endpoint}: {status}")
    assert wrong == []
    assert denied == AuditRecord.objects.count() > (60 if thorough else 15)
