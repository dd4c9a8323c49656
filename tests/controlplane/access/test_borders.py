"""What holds for every page and answer: the policy, cookies, CSRF tokens, HTTPS."""

import re
import runpy

import pytest
from django.conf import settings
from django.contrib.auth.models import User
from django.test import Client, override_settings

from controlplane.dashboard.middleware import POLICY
from kernel.access import Role
from tests.controlplane.access.callers import calls, make_user
from tests.controlplane.access.endpoints import operations, pages

pytestmark = pytest.mark.django_db


@pytest.fixture
def client() -> Client:
    client = Client(enforce_csrf_checks=True, raise_request_exception=False)
    client.force_login(make_user("ada", Role.ADMIN))
    return client


def test_every_page_carries_the_policy_and_may_not_be_framed(client: Client) -> None:
    for page in pages():
        response = client.generic(page.method, page.path)
        assert response.headers["Content-Security-Policy"] == POLICY, page.name
        assert response.headers["X-Frame-Options"] == "DENY", page.name
        assert response.headers["X-Content-Type-Options"] == "nosniff", page.name
    assert "unsafe" not in POLICY


def test_every_answer_of_the_api_carries_the_policy() -> None:
    api = calls(None)
    for operation in operations():
        response = api.generic(operation.method, operation.path)
        assert response.headers["Content-Security-Policy"] == POLICY, operation.name


def test_no_form_is_taken_without_its_csrf_token(client: Client) -> None:
    for page in pages():
        if page.method == "POST":
            assert client.post(page.path).status_code in {403, 405}, page.name


def test_every_form_that_posts_has_its_csrf_token(client: Client) -> None:
    for page in pages():
        text = client.get(page.path).text if page.method == "GET" else ""
        for form in re.findall(r'<form[^>]*method="post".*?</form>', text, flags=re.S):
            assert "csrfmiddlewaretoken" in form, (page.name, form)


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
