"""Secrets: found by their prefix, proven by their hash, never stored."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import IntegrityError, models

from accounts.models import ApiToken
from accounts.services.token import token_create
from engine_agent.protocol.states import AgentKind
from fleet.agents.services.enrolment import credential_issue, join_token_issue
from fleet.machines.models import Invitation
from fleet.nodes.models import AgentCredential, JoinToken
from kernel.secrets import (
    ISSUE_TRIES,
    SECRET_PATTERN,
    Issued,
    secret_digest,
    secret_issue,
    secret_issue_again,
    secret_matches,
    secret_prefix,
    secret_row_create,
)
from tests.fleet.rows import NOW
from traffic.keys.models import ApplicationKey


def test_an_issued_secret_is_found_by_its_prefix_and_proven_by_its_digest() -> None:
    issued = secret_issue()
    assert secret_prefix(issued.text) == issued.prefix
    assert secret_matches(issued.text, issued.digest)
    assert issued.text.removeprefix(f"sw_{issued.prefix}_") not in issued.digest


def test_no_two_secrets_are_alike() -> None:
    assert len({secret_issue().text for _ in range(100)}) == 100


def test_another_secret_behind_the_same_prefix_does_not_match() -> None:
    issued = secret_issue()
    assert not secret_matches(f"sw_{issued.prefix}_{'0' * 48}", issued.digest)


def test_a_secret_is_made_again_from_its_prefix_by_the_same_salt_and_key_alone(settings: Any) -> None:
    first = secret_issue_again("tokens")
    assert secret_prefix(first.text) == first.prefix
    assert secret_issue_again("tokens", first.prefix) == first
    assert secret_issue_again("others", first.prefix).text != first.text
    assert secret_issue_again("tokens").text != first.text
    settings.SECRET_KEY = "another-key-of-this-test-0123456789-abcdefghijklmnop"
    assert secret_issue_again("tokens", first.prefix).text != first.text


def test_every_secret_has_the_pattern_that_finds_and_redacts_it() -> None:
    for issued in (secret_issue(), secret_issue_again("tokens")):
        found = re.fullmatch(SECRET_PATTERN, issued.text)
        assert found is not None
        assert found["prefix"] == issued.prefix


def test_the_columns_hold_a_prefix() -> None:
    for model in (ApiToken, AgentCredential, ApplicationKey, Invitation, JoinToken):
        assert len(secret_issue().prefix) < (model._meta.get_field("prefix").max_length or 0)


def _credential() -> None:
    credential_issue(kind="node", subject="n-00000001", region="us-east-1", now=NOW)


def _join_token() -> None:
    join_token_issue(kind=AgentKind.NODE, subject=f"n-{JoinToken.objects.count():08x}", region="r", expires_at=NOW)


def _api_token() -> None:
    user = User.objects.get_or_create(username="ada")[0]
    token_create(user=user, name="laptop", now=NOW)


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("create", "model"), [(_credential, AgentCredential), (_join_token, JoinToken), (_api_token, ApiToken)]
)
def test_a_prefix_that_exists_is_drawn_again(
    create: Callable[[], None], model: type[models.Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefixes = iter(("aa", "aa", "aa", "bb"))
    monkeypatch.setattr("kernel.secrets._new_prefix", lambda: next(prefixes))
    create()
    create()
    assert set(model._default_manager.values_list("prefix", flat=True)) == {"aa", "bb"}


@pytest.mark.django_db
def test_random_numbers_that_repeat_end_in_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernel.secrets._new_prefix", lambda: "aa")
    _api_token()
    with pytest.raises(RuntimeError, match=f"{ISSUE_TRIES} new secrets had prefixes that exist"):
        _api_token()
    assert ApiToken.objects.count() == 1


@pytest.mark.django_db
def test_other_constraints_are_not_tried_again() -> None:
    calls = []

    def issue() -> Issued:
        calls.append(1)
        return secret_issue()

    with pytest.raises(IntegrityError):
        secret_row_create(AgentCredential, issue, kind="node", subject="n-00000001", region="r", created_at=None)
    assert len(calls) == 1


@pytest.mark.parametrize("text", ["", "sw", "sw_", "sw_aa", "xx_aa_bb", "sw_aa_bb_cc"])
def test_what_is_no_secret_of_ours_has_no_prefix(text: str) -> None:
    assert secret_prefix(text) is None


def test_the_digest_is_plain_sha256() -> None:
    assert secret_digest("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
