"""Policy, cookies, CSRF tokens and HTTPS of every page and response."""

import re
import runpy
from collections.abc import Iterator
from typing import Any

import pytest
from django.conf import settings
from django.contrib.auth.models import User
from django.test import Client, override_settings
from pytest_django import DjangoDbBlocker

from controlplane.dashboard.middleware import POLICY
from kernel.access import Role
from tests.controlplane.access.callers import calls, make_user
from tests.controlplane.access.endpoints import Operation, operations, pages
from tests.rows_of_a_file import rows_of_a_file

pytestmark = [pytest.mark.django_db, pytest.mark.slow]


@pytest.fixture(scope="module")
def responses(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[list[tuple[Operation, Any]]]:
    """Responses to an admin's browser that opens every page and posts to it without a CSRF token."""
    with rows_of_a_file(django_db_blocker):
        client = Client(enforce_csrf_checks=True, raise_request_exception=False)
        client.force_login(make_user("ada", Role.ADMIN))
        yield [(page, client.generic(page.method, page.path)) for page in pages()]


def test_every_page_carries_the_policy_and_may_not_be_framed(responses: list[tuple[Operation, Any]]) -> None:
    for page, response in responses:
        assert response.headers["Content-Security-Policy"] == POLICY, page.name
        assert response.headers["X-Frame-Options"] == "DENY", page.name
        assert response.headers["X-Content-Type-Options"] == "nosniff", page.name
    assert "unsafe" not in POLICY


def test_no_form_is_taken_without_its_csrf_token(responses: list[tuple[Operation, Any]]) -> None:
    statuses = {page.name: response.status_code for page, response in responses if page.method == "POST"}
    assert {name: status for name, status in statuses.items() if status not in {403, 405}} == {}
    assert 403 in statuses.values()


def test_every_form_that_posts_has_its_csrf_token(responses: list[tuple[Operation, Any]]) -> None:
    texts = {page.name: response.text for page, response in responses if page.method == "GET"}
    forms = [
        (name, form)
        for name, text in texts.items()
        for form in re.findall(r'<form[^>]*method="post".*?</form>', text, flags=re.S)
    ]
    assert forms
    assert [(name, form) for name, form in forms if "csrfmiddlewaretoken" not in form] == []


def test_every_answer_of_the_api_carries_the_policy() -> None:
    api = calls(None)
    for operation in operations():
        response = api.generic(operation.method, operation.path)
        assert response.headers["Content-Security-Policy"] == POLICY, operation.name


def test_cookies_are_out_of_reach_of_scripts_and_of_other_sites() -> None:
    User.objects.create_user("eve", password="correct horse battery")
    browser = Client()
    csrf = browser.get("/login/").cookies[settings.CSRF_COOKIE_NAME]
    logged_in = browser.post("/login/", {"username": "eve", "password": "correct horse battery"})
    session = logged_in.cookies[settings.SESSION_COOKIE_NAME]
    assert (bool(session["httponly"]), session["samesite"], csrf["samesite"]) == (True, "Lax", "Lax")


def test_https_makes_cookies_secure_and_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWITCHYARD_HTTPS", "1")
    loaded = runpy.run_path(str(settings.BASE_DIR / "controlplane" / "settings.py"))
    assert loaded["SESSION_COOKIE_SECURE"]
    assert loaded["CSRF_COOKIE_SECURE"]
    assert loaded["SECURE_HSTS_SECONDS"] >= 180 * 86_400


@override_settings(SESSION_COOKIE_SECURE=True, CSRF_COOKIE_SECURE=True, SECURE_HSTS_SECONDS=3600)
def test_answers_over_https_say_so() -> None:
    client = Client()
    client.force_login(make_user("ada"))
    response = client.get("/settings/", secure=True)
    assert response.headers["Strict-Transport-Security"] == "max-age=3600"
    assert client.cookies[settings.CSRF_COOKIE_NAME]["secure"]
    assert "Strict-Transport-Security" not in client.get("/settings/").headers
