"""Secrets: found by their prefix, proven by their hash, never stored."""

from typing import Any

import pytest

from kernel.secrets import secret_digest, secret_issue, secret_issue_again, secret_matches, secret_prefix


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


@pytest.mark.parametrize("text", ["", "sw", "sw_", "sw_aa", "xx_aa_bb", "sw_aa_bb_cc"])
def test_what_is_no_secret_of_ours_has_no_prefix(text: str) -> None:
    assert secret_prefix(text) is None


def test_the_digest_is_plain_sha256() -> None:
    assert secret_digest("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
