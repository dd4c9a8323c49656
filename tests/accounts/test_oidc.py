"""Login by an identity provider that really answers: who gets in, with which role, and which tokens are refused."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from django.contrib.auth.models import Group, User
from django.test import Client, override_settings
from joserfc.jwk import RSAKey

from accounts.models import GroupRole, Identity, LoginSession
from accounts.selectors import access_of_user
from kernel.access import Role, Scope
from tests.accounts.identity_provider import CLIENT, SECRET, IdentityProvider, identity_provider

pytestmark = [pytest.mark.django_db, pytest.mark.slow]

ADA = {"sub": "u-1", "preferred_username": "ada", "email": "ada@example.com", "groups": ["sre", "chess"]}


@pytest.fixture
def sso() -> Iterator[IdentityProvider]:
    """The configured provider, where ada is in `sre`, which operates here."""
    group = Group.objects.create(name="operators")
    GroupRole.objects.create(group=group, role=Role.OPERATOR.value, claim="sre")
    with identity_provider() as known:
        known.claims = dict(ADA)
        with override_settings(OIDC_ISSUER=known.url, OIDC_CLIENT_ID=CLIENT, OIDC_CLIENT_SECRET=SECRET):
            yield known


def come_back(client: Client, wanted: str = "") -> Any:
    """Through the provider and back, as a browser goes."""
    away = client.get("/login/oidc/", {"next": wanted})
    assert away.status_code == 302, away.content
    back = httpx.get(away.headers["Location"], trust_env=False).headers["Location"]
    return client.get(back.removeprefix("http://testserver"))


def role_of(username: str) -> Role | None:
    return access_of_user(User.objects.get(username=username), Scope.ADMIN).role


def test_without_a_provider_there_is_no_such_login(client: Client) -> None:
    assert "oidc" not in client.get("/login/").text
    assert client.get("/login/oidc/").status_code == 404
    assert client.get("/login/oidc/back/").status_code == 404


def test_the_login_page_offers_the_provider_and_goes_back_to_the_page(sso: IdentityProvider, client: Client) -> None:
    with override_settings(OIDC_TITLE="Example SSO"):
        page = client.get("/login/?next=/nodes/").text
    assert "Log in with Example SSO" in page
    assert "/login/oidc/?next=/nodes/" in page


def test_somebody_in_a_mapped_group_gets_in_with_its_role(sso: IdentityProvider, client: Client) -> None:
    response = come_back(client, "/nodes/?state=lost")
    assert (response.status_code, response.headers["Location"]) == (302, "/nodes/?state=lost")
    user = User.objects.get(username="ada")
    assert (user.email, user.has_usable_password(), role_of("ada")) == ("ada@example.com", False, Role.OPERATOR)
    assert LoginSession.objects.get().method == "oidc"
    assert client.get("/nodes/").status_code == 200


def test_nobody_is_led_to_another_host(sso: IdentityProvider, client: Client) -> None:
    assert come_back(client, "https://elsewhere.example/").headers["Location"] == "/"


def test_groups_follow_the_provider_at_each_login_and_those_given_by_hand_stay(sso: IdentityProvider) -> None:
    come_back(Client())
    by_hand = Group.objects.create(name="by-hand")
    GroupRole.objects.create(group=by_hand, role=Role.VIEWER.value)
    User.objects.get(username="ada").groups.add(by_hand)
    sso.claims["groups"] = "chess"
    assert come_back(Client()).status_code == 302
    assert [group.name for group in User.objects.get(username="ada").groups.all()] == ["by-hand"]
    assert role_of("ada") is Role.VIEWER


def test_groups_may_stand_in_the_user_info_only(sso: IdentityProvider) -> None:
    sso.in_id_token = False
    come_back(Client())
    assert role_of("ada") is Role.OPERATOR


def test_somebody_in_no_mapped_group_is_told_so(sso: IdentityProvider, client: Client) -> None:
    sso.claims["groups"] = ["chess"]
    response = come_back(client)
    assert response.status_code == 403
    assert "No group of ada is mapped in Switchyard" in response.text
    assert not User.objects.filter(username="ada").exists()


@override_settings(OIDC_ADMIT_ALL=True)
def test_who_admits_all_lets_them_look(sso: IdentityProvider) -> None:
    sso.claims["groups"] = []
    assert come_back(Client()).status_code == 302
    assert role_of("ada") is Role.VIEWER


def test_a_local_user_of_that_name_is_not_taken_over(sso: IdentityProvider, client: Client) -> None:
    User.objects.create_superuser("Ada", password="correct horse battery")
    assert "there is another user ada here already" in come_back(client).text.replace("There", "there")
    assert not Identity.objects.exists()


def test_a_user_is_known_by_the_subject_not_by_the_name(sso: IdentityProvider) -> None:
    come_back(Client())
    sso.claims["preferred_username"] = "lovelace"
    assert come_back(Client()).status_code == 302
    assert [user.username for user in User.objects.all()] == ["ada"]


def test_somebody_deactivated_stays_out(sso: IdentityProvider, client: Client) -> None:
    come_back(Client())
    User.objects.update(is_active=False)
    response = come_back(client)
    assert response.status_code == 403
    assert "deactivated" in response.text


@pytest.mark.parametrize(
    "wrong",
    [
        {"nonce": "of another login"},
        {"aud": "another client"},
        {"aud": ["another client", "switchyard"], "azp": "another client"},
        {"iss": "https://elsewhere.example"},
        {"exp": 1_700_000_000, "iat": 1_699_999_000},
        {"sub": None},
    ],
)
def test_a_token_that_is_not_for_this_login_opens_nothing(
    sso: IdentityProvider, client: Client, wrong: dict[str, Any]
) -> None:
    sso.spoil = lambda claims: {name: value for name, value in {**claims, **wrong}.items() if value is not None}
    assert come_back(client).status_code == 502
    assert not User.objects.exists()


def test_a_token_signed_by_somebody_else_opens_nothing(sso: IdentityProvider, client: Client) -> None:
    sso.signs_with = RSAKey.generate_key(2048, {"kid": "first"})
    assert come_back(client).status_code == 502


def test_keys_may_rotate(sso: IdentityProvider) -> None:
    come_back(Client())
    sso.rotate()
    assert come_back(Client()).status_code == 302


def test_a_provider_that_calls_itself_otherwise_is_refused(sso: IdentityProvider, client: Client) -> None:
    sso.issuer = "https://elsewhere.example"
    assert client.get("/login/oidc/").status_code == 502


def test_a_login_that_another_browser_began_is_refused(sso: IdentityProvider, client: Client) -> None:
    away = Client().get("/login/oidc/")
    back = httpx.get(away.headers["Location"], trust_env=False).headers["Location"]
    assert client.get(back.removeprefix("http://testserver")).status_code == 502


@pytest.mark.parametrize("query", ["", "?code=x", "?state=x", "?error=access_denied", "?code=x&state=y"])
def test_coming_back_without_having_left_is_refused(sso: IdentityProvider, client: Client, query: str) -> None:
    assert client.get(f"/login/oidc/back/{query}").status_code == 502


@override_settings(OIDC_ISSUER="http://127.0.0.1:9")
def test_a_provider_that_is_away_leaves_the_password(client: Client) -> None:
    assert client.get("/login/oidc/").status_code == 502
    assert "Log in with single sign-on" in client.get("/login/").text
