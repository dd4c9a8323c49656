"""Bearer tokens: which ones are accepted, and the errors of the others."""

from datetime import timedelta

import pytest
from django.contrib.auth.models import User
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.request import Request
from rest_framework.test import APIRequestFactory

from accounts.models import ApiToken
from accounts.permissions import BearerTokenAuthentication
from accounts.services.token import token_create, token_revoke
from kernel import clock

pytestmark = pytest.mark.django_db


def token(username: str = "ada", **columns: object) -> tuple[ApiToken, str]:
    user, _ = User.objects.get_or_create(username=username)
    row, text = token_create(user=user, name="laptop", now=clock.now())
    ApiToken.objects.filter(pk=row.pk).update(**columns)
    return row, text


def authenticate(header: str | None) -> tuple[object, object] | None:
    request = APIRequestFactory().get("/", headers={} if header is None else {"Authorization": header})
    return BearerTokenAuthentication().authenticate(Request(request))


def refusal(header: str) -> str:
    with pytest.raises(AuthenticationFailed) as refused:
        authenticate(header)
    return str(refused.value.detail)


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_a_good_token_acts_as_its_user(scheme: str) -> None:
    row, text = token()
    assert authenticate(f"{scheme} {text}") == (row.user, row)


@pytest.mark.parametrize("header", [None, "", "Basic YTpi", "Token abc"])
def test_other_requests_are_left_to_the_next_method(header: str | None) -> None:
    assert authenticate(header) is None


@pytest.mark.parametrize("header", ["Bearer", "Bearer ", "Bearer two words", "Bearer sw_a_b extra"])
def test_a_malformed_header_is_told_the_form(header: str) -> None:
    assert "Bearer sw_<prefix>_<secret>" in refusal(header)


@pytest.mark.parametrize("text", ["nonsense", "sw_00000000000000_0000", "sw__", "sw_a", "\xff\x00"])
def test_an_unknown_token_is_refused(text: str) -> None:
    token()
    assert "unknown API token" in refusal(f"Bearer {text}")


def test_a_known_prefix_with_another_secret_is_refused() -> None:
    row, text = token()
    assert "unknown API token" in refusal(f"Bearer {text[:-1]}{'0' if text[-1] != '0' else '1'}")
    assert row.prefix in text


def test_a_revoked_token_is_told_so() -> None:
    row, text = token()
    token_revoke(token=row, actor="ada", now=clock.now())
    assert "'laptop' was revoked" in refusal(f"Bearer {text}")


def test_an_expired_token_is_told_so() -> None:
    _, text = token(expires_at=clock.now() - timedelta(seconds=1))
    assert "'laptop' expired" in refusal(f"Bearer {text}")


def test_a_token_lives_until_it_expires() -> None:
    _, text = token(expires_at=clock.now() + timedelta(hours=1))
    assert authenticate(f"Bearer {text}") is not None


def test_a_token_of_a_deactivated_user_is_refused() -> None:
    row, text = token()
    User.objects.filter(pk=row.user_id).update(is_active=False)
    assert "deactivated" in refusal(f"Bearer {text}")


def test_a_refusal_names_the_scheme_so_that_it_becomes_a_401() -> None:
    assert BearerTokenAuthentication().authenticate_header(Request(APIRequestFactory().get("/"))) == "Bearer"
