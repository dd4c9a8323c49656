"""Sessions: listed with address and browser, ended immediately, and updated at most once a minute."""

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.contrib.sessions.models import Session
from django.test import Client

from accounts.models import LoginSession
from accounts.services.session import BEGAN, SEEN
from accounts.services.user import user_change
from kernel import clock

pytestmark = [pytest.mark.django_db, pytest.mark.slow]

PASSWORD = "correct horse battery"


def logged_in(username: str = "ada", **headers: str) -> Client:
    if not User.objects.filter(username=username).exists():
        User.objects.create_superuser(username, password=PASSWORD)
    client = Client(headers=headers)
    form = {"username": username, "password": PASSWORD}
    assert client.post("/login/", form, REMOTE_ADDR="10.0.0.7").status_code == 302
    return client


def test_a_login_is_listed_with_where_it_is_from() -> None:
    logged_in(**{"user-agent": "Mozilla/5.0 (X11)"})
    session = LoginSession.objects.get()
    assert (session.user.username, session.method) == ("ada", "password")
    assert (session.address, session.browser) == ("10.0.0.7", "Mozilla/5.0 (X11)")
    assert session.expires_at > clock.now() + timedelta(days=1)


def test_a_logout_takes_it_off_the_list() -> None:
    logged_in().post("/logout/")
    assert not LoginSession.objects.exists()


def test_use_is_noted_once_a_minute() -> None:
    client = logged_in()
    LoginSession.objects.update(seen_at=clock.now() - timedelta(days=1))
    client.get("/settings/")
    assert LoginSession.objects.get().seen_at < clock.now() - timedelta(hours=1)
    session = client.session
    session[SEEN] -= 61
    session.save()
    client.get("/settings/")
    assert LoginSession.objects.get().seen_at > clock.now() - timedelta(hours=1)


@pytest.mark.parametrize("change", [{"active": False}, {"password": "another horse battery"}])
def test_a_deactivation_and_a_new_password_end_all_sessions(change: dict[str, object]) -> None:
    first, second, other = logged_in(), logged_in(), logged_in("root")
    user_change(username="ada", actor="root", now=clock.now(), **change)  # type: ignore[arg-type]
    assert [each.get("/").status_code for each in (first, second, other)] == [302, 302, 200]
    assert [session.user.username for session in LoginSession.objects.all()] == ["root"]
    assert Session.objects.count() == 1


def test_one_ended_by_the_api_opens_nothing() -> None:
    client, other = logged_in(), logged_in("root")
    session = LoginSession.objects.get(user__username="ada")
    listed = other.get("/api/v1/sessions").json()["results"]
    assert [(each["user"], each["current"]) for each in listed] == [("root", True), ("ada", False)]
    assert "session_key" not in listed[0]
    assert other.post(f"/api/v1/sessions/{session.pk}/revoke").status_code == 200
    assert client.get("/api/v1/me").status_code in {401, 403}


def test_what_is_over_is_not_listed_and_goes_with_the_next_login() -> None:
    client = logged_in()
    LoginSession.objects.update(expires_at=clock.now() - timedelta(seconds=1))
    assert client.get("/api/v1/sessions").json()["results"] == []
    logged_in("root")
    assert LoginSession.objects.count() == 1


def test_a_session_is_over_after_its_longest_life_however_much_it_is_used(settings: Any) -> None:
    client = logged_in()
    assert client.get("/settings/").status_code == 200
    session = client.session
    session[BEGAN] -= settings.SESSION_LONGEST_S
    session.save()
    assert client.get("/settings/").status_code == 302
    assert not LoginSession.objects.exists()
    assert not Session.objects.exists()


def test_a_session_that_says_nothing_of_its_beginning_is_over() -> None:
    client = logged_in()
    session = client.session
    del session[BEGAN]
    session.save()
    assert client.get("/api/v1/me").status_code in {401, 403}


def test_use_makes_a_session_last_no_longer_than_it_may(settings: Any) -> None:
    client = logged_in()
    session = client.session
    session[SEEN] -= 61
    session[BEGAN] -= settings.SESSION_LONGEST_S - 600
    session.save()
    client.get("/settings/")
    assert LoginSession.objects.get().expires_at <= clock.now() + timedelta(seconds=600)
