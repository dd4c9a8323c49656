"""A second factor is asked for after the password, counts once, and guards what outlives a session."""

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from accounts.models import ApiToken, LoginSession, RecoveryCode, SecondFactor
from accounts.services.second_factor import MOST_WRONG_IN_A_ROW
from accounts.services.session import BEGAN
from audit.models import AuditRecord
from kernel import clock
from kernel.access import Role
from tests.accounts.factors import (
    APP,
    CONFIRM,
    KEY,
    PASSWORD,
    SECOND,
    app_added,
    code_of,
    field,
    is_in,
    password_shown,
    wrong_code,
)
from tests.controlplane.access.callers import calls, make_user

pytestmark = [pytest.mark.django_db, pytest.mark.slow]


def shows(client: Client, code: str, **headers: Any) -> bool:
    """Whether a second factor after the password lets a browser in."""
    response = client.post(SECOND, {"one_time_code": code}, **headers)
    assert response.status_code in {200, 302, 429}
    return response.status_code == 302 and response.headers["Location"] == "/"


def ages(client: Client, minutes: float) -> None:
    """As if everything in this browser's session had been that much earlier."""
    session = client.session
    session[BEGAN] -= minutes * 60
    session.save()
    rows = LoginSession.objects.filter(session_key=session.session_key, factor_at__isnull=False)
    rows.update(factor_at=clock.now() - timedelta(minutes=minutes))


def test_after_the_password_comes_the_code_and_only_then_the_session(ada: Client, browser: Client) -> None:
    secret, codes = app_added(ada)
    assert len(codes) == 10
    assert password_shown(browser, wanted="/nodes/").headers["Location"] == SECOND
    assert not is_in(browser)
    assert "_auth_user_id" not in browser.session
    assert browser.post(SECOND, {"one_time_code": wrong_code(secret)}).status_code == 200
    assert not is_in(browser)
    assert browser.post(SECOND, {"one_time_code": code_of(secret)}).headers["Location"] == "/nodes/"
    assert is_in(browser)


def test_the_second_page_is_for_who_has_shown_the_password(ada: Client, browser: Client) -> None:
    secret, _ = app_added(ada)
    assert browser.get(SECOND).headers["Location"] == "/login/"
    assert browser.post(SECOND, {"one_time_code": code_of(secret)}).headers["Location"] == "/login/"
    browser.cookies["switchyard_pending_8000"] = "made:up:cookie"
    assert browser.get(SECOND).headers["Location"] == "/login/"


def test_a_new_password_or_removed_factors_end_a_login_that_is_half_done(ada: Client, browser: Client) -> None:
    secret, _ = app_added(ada)
    password_shown(browser)
    user = User.objects.get(username="ada")
    user.set_password("another long password")
    user.save()
    assert not shows(browser, code_of(secret))
    user.set_password(PASSWORD)
    user.save()
    password_shown(browser)
    SecondFactor.objects.all().delete()
    assert browser.get(SECOND).headers["Location"] == "/login/"
    assert not is_in(browser)


def test_a_code_counts_once(ada: Client, browser: Client) -> None:
    secret, _ = app_added(ada)
    code = code_of(secret)
    password_shown(browser)
    assert shows(browser, code)
    other = Client()
    password_shown(other)
    assert not shows(other, code)
    assert not is_in(other)


def test_a_recovery_code_counts_once_however_it_is_typed(ada: Client, browser: Client) -> None:
    _, codes = app_added(ada)
    password_shown(browser)
    assert shows(browser, codes[0].upper().replace("-", " "))
    other = Client()
    password_shown(other)
    assert not shows(other, codes[0])
    assert shows(other, codes[1])
    assert RecoveryCode.objects.count() == 8
    assert "8 recovery codes left" in other.get("/settings/").text


def test_new_recovery_codes_end_the_old_ones(ada: Client, browser: Client) -> None:
    _, codes = app_added(ada)
    page = ada.post("/settings/second-factor/recovery/")
    assert "recovery-codes" in page.text
    password_shown(browser)
    assert not shows(browser, codes[0])


def test_guesses_are_counted_before_they_are_checked_and_a_right_password_takes_none_back(
    ada: Client, browser: Client
) -> None:
    secret, _ = app_added(ada)
    for _ in range(10):
        password_shown(browser)
        assert not shows(browser, wrong_code(secret))
    password_shown(browser)
    response = browser.post(SECOND, {"one_time_code": code_of(secret)})
    assert (response.status_code, 0 < int(response.headers["Retry-After"]) <= 300) == (429, True)
    known = Client()
    known.cookies["switchyard_device_8000"] = ada.cookies["switchyard_device_8000"].value
    password_shown(known)
    assert shows(known, code_of(secret))


def test_an_app_is_closed_after_a_hundred_wrong_codes_in_a_row(ada: Client, browser: Client) -> None:
    secret, codes = app_added(ada)
    SecondFactor.objects.update(wrong_in_a_row=MOST_WRONG_IN_A_ROW)
    password_shown(browser)
    assert not shows(browser, code_of(secret))
    assert shows(browser, codes[0])


def test_factors_end_the_sessions_that_existed(ada: Client, browser: Client) -> None:
    password_shown(browser)
    before = ada.session.session_key
    secret, _ = app_added(ada)
    assert is_in(ada)
    assert ada.session.session_key != before
    assert not is_in(browser)
    password_shown(browser)
    assert shows(browser, code_of(secret))
    ada.post(f"/settings/second-factor/{SecondFactor.objects.get().pk}/remove/")
    assert is_in(ada)
    assert not is_in(browser)
    assert RecoveryCode.objects.count() == 0
    assert password_shown(browser).headers["Location"] == "/"


def test_a_wrong_code_adds_no_app(ada: Client) -> None:
    page = ada.get(APP).text
    response = ada.post(APP, {"secret": field(page, "secret"), "one_time_code": "12345"})
    assert (response.status_code, "The code is wrong" in response.text) == (409, True)
    assert field(response.text, "secret") == field(page, "secret")
    assert not SecondFactor.objects.exists()


def test_a_secret_of_another_user_adds_no_app(ada: Client, browser: Client) -> None:
    make_user("eve")
    browser.force_login(User.objects.get(username="eve"))
    page = browser.get(APP).text
    secret = "".join(page.split("<code>")[1:]).replace("</code>", "")
    assert secret
    response = ada.post(APP, {"secret": field(page, "secret"), "one_time_code": "000000"})
    assert "QR code has expired" in response.text


GUARDED: tuple[tuple[str, dict[str, str]], ...] = (
    ("/settings/tokens/new/", {"name": "t", "scope": "read", "expires_in_days": "30"}),
    ("/settings/password/", {"old_password": PASSWORD, "new_password": "another long password"}),
    ("/settings/second-factor/recovery/", {}),
    ("/settings/second-factor/1/remove/", {}),
    ("/settings/users/eve/change/", {"what": "password", "password": "another long password"}),
    ("/settings/users/eve/change/", {"what": "factors"}),
    ("/settings/approvals/1/approve/", {}),
    (APP, {}),
    (KEY, {}),
)


@pytest.mark.parametrize(("path", "form"), GUARDED)
def test_what_outlives_a_session_takes_a_second_factor_shown_just_now(
    path: str, form: dict[str, str], ada: Client
) -> None:
    make_user("eve")
    app_added(ada)
    before = (User.objects.get(username="ada").password, SecondFactor.objects.count(), RecoveryCode.objects.count())
    ages(ada, minutes=11)
    response = ada.post(path, form)
    assert response.headers["Location"].startswith(CONFIRM)
    assert not ApiToken.objects.exists()
    user = User.objects.get(username="ada")
    assert (user.password, SecondFactor.objects.count(), RecoveryCode.objects.count()) == before


def test_it_is_asked_for_and_leads_back(ada: Client) -> None:
    secret, _ = app_added(ada)
    ages(ada, minutes=11)
    form = {"name": "t", "scope": "read", "expires_in_days": "30"}
    asked = ada.post("/settings/tokens/new/", form).headers["Location"]
    page = ada.get(asked)
    assert field(page.text, "next") == "/settings/"
    wrong = {"one_time_code": wrong_code(secret), "next": "/settings/"}
    assert ada.post(CONFIRM, wrong).status_code == 403
    right = {"one_time_code": code_of(secret), "next": "https://elsewhere.example.com/"}
    assert ada.post(CONFIRM, right).headers["Location"] == "/settings/"
    assert ada.post("/settings/tokens/new/", form).status_code == 200


def test_tokens_work_without_one_and_make_neither_tokens_nor_approvals(ada: Client) -> None:
    app_added(ada)
    api = calls(User.objects.get(username="ada"))
    assert api.get("/api/v1/me").status_code == 200
    for path, body in (("tokens", {"name": "t"}), ("approvals/1/approve", {})):
        response = api.post(f"/api/v1/{path}", body, format="json")
        assert (response.status_code, "second factor" in response.json()["detail"]) == (403, True)
    response = api.patch("/api/v1/users/ada", {"password": "another long password"}, format="json")
    assert response.status_code == 403


def test_the_first_one_takes_a_login_of_a_moment_ago(ada: Client) -> None:
    ages(ada, minutes=11)
    response = ada.get(APP)
    assert response.headers["Location"].startswith(CONFIRM)
    assert "Log in again" in ada.get(CONFIRM).text


def test_nothing_secret_is_recorded(ada: Client, browser: Client) -> None:
    secret, codes = app_added(ada)
    sealed = SecondFactor.objects.get().secret
    password_shown(browser)
    browser.post(SECOND, {"one_time_code": wrong_code(secret)})
    assert shows(browser, codes[0])
    records = list(AuditRecord.objects.order_by("number"))
    assert [(record.action, record.outcome, record.reason) for record in records] == [
        ("login", "done", ""),
        ("factor.app", "done", ""),
        ("login", "denied", "wrong second factor"),
        ("login", "done", ""),
    ]
    text = "".join(record.changes for record in records)
    typed = (secret, sealed, *codes, *(code.replace("-", "") for code in codes))
    assert not [each for each in typed if each in text]


def test_an_admin_removes_what_another_lost(ada: Client, browser: Client) -> None:
    make_user("eve")
    SecondFactor.objects.create(user=User.objects.get(username="eve"), kind="app", name="x", created_at=clock.now())
    browser.force_login(User.objects.get(username="eve"))
    assert "Remove second factors" in ada.get("/settings/users/").text
    assert ada.get("/api/v1/users/eve").json()["second_factor"] is True
    assert ada.post("/settings/users/eve/change/", {"what": "factors"}).status_code == 302
    assert not SecondFactor.objects.exists()
    assert "Remove second factors" not in ada.get("/settings/users/").text
    assert not is_in(browser)
    assert "no second factor" in ada.post("/settings/users/eve/change/", {"what": "factors"}).text


def test_two_remove_it_where_anything_takes_two(ada: Client) -> None:
    eve = make_user("eve")
    SecondFactor.objects.create(user=eve, kind="app", name="x", created_at=clock.now())
    ada.post("/settings/approval-rules/evacuate-region/", {"required": "yes"})
    grace = calls(make_user("grace", Role.ADMIN))
    response = ada.post("/settings/users/eve/change/", {"what": "factors"})
    assert response.headers["Location"] == "/settings/approvals/"
    assert SecondFactor.objects.exists()
    waits = grace.get("/api/v1/approvals").json()["results"][0]
    assert waits["summary"] == "remove second factors eve: eve logs in without a second factor"
    assert grace.post(f"/api/v1/approvals/{waits['id']}/approve", {}, format="json").json()["state"] == "done"
    assert not SecondFactor.objects.exists()


@pytest.mark.parametrize(
    ("rule", "who", "led"),
    [("off", "ada", False), ("admins", "ada", True), ("admins", "eve", False), ("all", "eve", True)],
)
def test_who_must_have_one_adds_it_before_anything_else(
    rule: str, who: str, led: bool, ada: Client, browser: Client, settings: Any
) -> None:
    settings.REQUIRE_SECOND_FACTOR = rule
    eve = make_user("eve")
    eve.set_password(PASSWORD)
    eve.save()
    password_shown(browser, who)
    response = browser.get("/nodes/")
    assert (response.headers.get("Location") == "/settings/second-factor/") is led
    changed = browser.post("/settings/tokens/new/", {"name": "t", "scope": "read", "expires_in_days": "9"})
    assert (changed.headers.get("Location") == "/settings/second-factor/") is led
    assert (browser.get("/api/v1/me").status_code == 403) is led
    assert calls(eve).get("/api/v1/me").status_code == 200
    assert browser.get("/settings/second-factor/").status_code == 200
    app_added(browser)
    assert is_in(browser)


def test_who_comes_by_a_provider_only_is_its_affair(browser: Client, settings: Any) -> None:
    settings.REQUIRE_SECOND_FACTOR = "all"
    eve = make_user("eve")
    eve.set_unusable_password()
    eve.save()
    browser.force_login(eve)
    assert is_in(browser)
