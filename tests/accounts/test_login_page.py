"""The login page: in, out, and no more than a few guesses."""

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse

pytestmark = [pytest.mark.slow, pytest.mark.django_db]

PASSWORD = "correct horse"
FULL_WIDTH = "".join(chr(ord(letter) + 0xFEE0) for letter in "operator")


@pytest.fixture(autouse=True)
def _operator() -> None:
    User.objects.create_user("operator", password=PASSWORD)


def attempt(client: Client, password: str, **extra: str) -> int:
    form = {"username": "operator", "password": password, "next": extra.pop("next", "")}
    return client.post(reverse("login"), form, **extra).status_code  # type: ignore[arg-type]


def test_a_good_login_leads_to_the_overview(client: Client) -> None:
    response = client.post(reverse("login"), {"username": "operator", "password": PASSWORD})
    assert (response.status_code, response.headers["Location"]) == (302, reverse("overview"))


def test_a_good_login_leads_back_to_the_page_that_asked_for_it(client: Client) -> None:
    form = {"username": "operator", "password": PASSWORD, "next": "/nodes/?state=lost"}
    assert client.post(reverse("login"), form).headers["Location"] == "/nodes/?state=lost"


def test_a_login_never_leads_to_another_host(client: Client) -> None:
    form = {"username": "operator", "password": PASSWORD, "next": "https://elsewhere.example/"}
    assert client.post(reverse("login"), form).headers["Location"] == reverse("overview")


def test_a_wrong_password_says_so_and_keeps_the_name(client: Client) -> None:
    response = client.post(reverse("login"), {"username": "operator", "password": "wrong"})
    assert response.status_code == 200
    assert "do not match" in response.text
    assert 'value="operator"' in response.text


def test_logging_out_ends_the_session(client: Client) -> None:
    client.force_login(User.objects.get())
    assert client.post(reverse("logout")).headers["Location"] == reverse("login")
    assert client.get(reverse("overview")).status_code == 302


def test_the_eleventh_guess_in_five_minutes_is_not_heard(client: Client) -> None:
    assert [attempt(client, "wrong") for _ in range(10)] == [200] * 10
    response = client.post(reverse("login"), {"username": "operator", "password": PASSWORD})
    assert response.status_code == 429
    assert 0 < int(response.headers["Retry-After"]) <= 300
    assert "Try again in 5 minutes" in response.text


def test_somebody_elsewhere_still_gets_in(client: Client) -> None:
    for _ in range(10):
        attempt(client, "wrong")
    assert attempt(client, PASSWORD, REMOTE_ADDR="10.9.8.7") == 302


def test_a_good_login_starts_the_count_anew(client: Client) -> None:
    for _ in range(9):
        attempt(client, "wrong")
    assert attempt(client, PASSWORD) == 302
    client.post(reverse("logout"))
    assert attempt(client, "wrong") == 200


@pytest.mark.parametrize("spelling", [FULL_WIDTH, "operator\u00a0", "\u2003operator"])
def test_guesses_under_other_spellings_count_as_the_same(client: Client, spelling: str) -> None:
    for _ in range(10):
        assert attempt(client, "wrong") == 200
    form = {"username": spelling, "password": PASSWORD}
    assert client.post(reverse("login"), form).status_code == 429
