from datetime import timedelta
from typing import Any

import pytest

from engine_agent.protocol.states import AgentKind
from fleet.agents.services.enrolment import (
    JOIN_TOKENS_KEPT,
    EnrolmentRefused,
    agent_enrol,
    agents_identify,
    credentials_revoked,
    join_token_issue,
    join_tokens_trim,
)
from fleet.nodes.models import AgentCredential, JoinToken
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db

NONCE = "5e" * 32
LATER = NOW + timedelta(minutes=15)


def token(subject: str = "n-a") -> str:
    return join_token_issue(kind=AgentKind.NODE, subject=subject, region="us-east-1", expires_at=LATER)


def enrol(text: str, *, kind: str = "node", subject: str = "n-a", nonce: str = NONCE) -> str:
    return agent_enrol(token=text, kind=kind, subject=subject, nonce=nonce, now=NOW)


def test_a_join_token_is_exchanged_for_a_credential_that_says_who_it_is() -> None:
    identity = agents_identify([enrol(token())])[0]
    assert identity is not None
    assert (identity.kind, identity.id, identity.region) == (AgentKind.NODE, "n-a", "us-east-1")


def test_neither_token_nor_credential_is_stored_as_text() -> None:
    text = token()
    credential = enrol(text)
    assert text not in str(JoinToken.objects.values())
    assert credential not in str(AgentCredential.objects.values())


def test_a_launch_that_is_repeated_gives_out_the_same_token_until_somebody_uses_it() -> None:
    first = token()
    assert token() == first
    assert JoinToken.objects.count() == 1
    assert token("n-b") != first
    enrol(first)
    assert token() != first


def test_a_token_that_is_given_out_again_counts_for_longer_and_never_for_less() -> None:
    token()
    for expires_at in (LATER + timedelta(minutes=1), LATER):
        join_token_issue(kind=AgentKind.NODE, subject="n-a", region="us-east-1", expires_at=expires_at)
    assert JoinToken.objects.get().expires_at == LATER + timedelta(minutes=1)


def test_after_another_secret_key_a_launch_gets_a_new_token_and_the_old_one_counts_on(
    settings: Any,
) -> None:
    first = token()
    settings.SECRET_KEY = "another-key-of-this-test-0123456789-abcdefghijklmnop"
    assert token() != first
    assert enrol(first)


@pytest.mark.parametrize(
    ("kind", "subject", "reason"),
    [("ingress", "n-a", "not for ingress n-a"), ("node", "n-b", "not for node n-b")],
)
def test_a_token_is_good_for_the_agent_it_was_issued_for_only(kind: str, subject: str, reason: str) -> None:
    text = token()
    with pytest.raises(EnrolmentRefused, match=reason):
        enrol(text, kind=kind, subject=subject)


@pytest.mark.parametrize("text", ["", "nonsense", "sw_00000000000000_ff", "sw_a_b_c"])
def test_unknown_tokens_are_refused(text: str) -> None:
    with pytest.raises(EnrolmentRefused, match="unknown join token"):
        enrol(text)


def test_a_guessed_secret_behind_a_known_prefix_is_refused() -> None:
    prefix = token().split("_")[1]
    with pytest.raises(EnrolmentRefused, match="unknown join token"):
        enrol(f"sw_{prefix}_{'0' * 48}")


def test_an_expired_token_is_refused_with_its_time() -> None:
    text = join_token_issue(kind=AgentKind.NODE, subject="n-a", region="r", expires_at=NOW)
    with pytest.raises(EnrolmentRefused, match="expired at 2026-11-21 12:00:00"):
        enrol(text)


def test_enrolling_again_revokes_the_older_credential() -> None:
    text = token()
    first, second = enrol(text), enrol(text)
    assert agents_identify([first])[0] is None
    assert agents_identify([second])[0] is not None
    prefixes = [credential.split("_")[1] for credential in (first, second)]
    assert credentials_revoked(prefixes) == {prefixes[0]}


def test_a_stolen_token_is_worth_nothing_once_its_agent_has_used_it() -> None:
    text = token()
    credential = enrol(text)
    with pytest.raises(EnrolmentRefused, match="used by another process already; n-a needs a new one"):
        enrol(text, nonce="00" * 32)
    assert agents_identify([credential])[0] is not None, "the agent's own goes on"


@pytest.mark.parametrize("nonce", ["", "ab", "z" * 64, "5e" * 65])
def test_a_nonce_that_anybody_could_guess_is_refused(nonce: str) -> None:
    with pytest.raises(EnrolmentRefused, match="32 to 128 hexadecimal digits"):
        enrol(token(), nonce=nonce)


@pytest.mark.parametrize("credential", ["", "x", "sw_11111111111111_22", "Bearer"])
def test_nobody_is_identified_by_nonsense(credential: str) -> None:
    assert agents_identify([credential])[0] is None


def test_tokens_are_forgotten_a_week_after_they_expired() -> None:
    text = token()
    agent = enrol(text)
    assert join_tokens_trim(now=LATER + JOIN_TOKENS_KEPT) == 0
    with pytest.raises(EnrolmentRefused, match="expired at"):
        agent_enrol(token=text, kind="node", subject="n-a", nonce=NONCE, now=LATER + JOIN_TOKENS_KEPT)
    assert join_tokens_trim(now=LATER + JOIN_TOKENS_KEPT + timedelta(seconds=1)) == 1
    assert agents_identify([agent])[0] is not None
