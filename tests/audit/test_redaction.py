"""Secrets stay out of records by the name of their field and by their look; records stay small."""

import json
from typing import Any

import pytest

from audit.record_format import HIDDEN, LONGEST_CHANGES, LONGEST_TEXT, as_json, clean, is_secret_name


@pytest.mark.parametrize(
    "name",
    [
        "secret",
        "own_secret",
        "new_password1",
        "HF_TOKEN",
        "api_key",
        "Authorization",
        "client-secret",
        "AWS_ACCESS_KEY_ID",
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ["max_tokens", "tokens_per_min", "token_prefix", "artifact_digest", "key", "name"])
def test_names_of_other_things(name: str) -> None:
    assert not is_secret_name(name)


def test_values_are_hidden_at_any_depth_and_empty_ones_are_not() -> None:
    recorded = json.loads(as_json({"asked": {"env": {"HF_TOKEN": "hf_x"}, "list": [{"password": "p"}], "secret": ""}}))
    assert recorded == {"asked": {"env": {"HF_TOKEN": HIDDEN}, "list": [{"password": HIDDEN}], "secret": ""}}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("key sw_0a1b2c3d4e5f60_" + 48 * "f", "key sw_0a1b2c3d4e5f60_…"),
        ("postgres://me:pw@host/db", "postgres://…@host/db"),
        ("to https://hooks.slack.com/services/T/B/x now", "to https://hooks.slack.com/… now"),
        ("cut\x00short \ud800", "cut\ufffdshort ?"),
    ],
)
def test_texts_lose_what_looks_like_a_secret_or_cannot_be_stored(text: str, shown: str) -> None:
    assert clean(text) == shown


@pytest.mark.parametrize("text", [2_000_000 * "a", 400_000 * "a://", 500_000 * "_", 100_000 * "sw_0a1b2c3d4e5f60_"])
def test_a_text_is_cut_before_anything_looks_at_it(text: str) -> None:
    assert len(clean(text)) <= LONGEST_TEXT
    assert not is_secret_name(text)


def test_half_of_a_secret_where_a_text_is_cut_is_not_shown() -> None:
    for length in range(LONGEST_TEXT - 90, LONGEST_TEXT + 10):
        shown = clean("x" * (length - 1) + f" sw_0a1b2c3d4e5f60_{48 * 'f'} " + 100 * "y")
        assert "ffff" not in shown
        assert "pass" not in clean("x" * (length - 1) + " postgres://me:password@host/db " + 100 * "y")


def test_what_is_too_long_gives_way_and_the_rest_stays() -> None:
    recorded = json.loads(as_json({"asked": {"rows": [1500 * "x"] * 50}, "events": [{"kind": "k"}]}))
    assert recorded["events"] == [{"kind": "k"}]
    assert recorded["asked"].startswith("(left out: ")
    assert len(json.dumps(recorded)) < LONGEST_CHANGES


def test_of_addresses_that_are_called_only_the_host_is_recorded() -> None:
    changes: dict[str, Any] = {
        "asked": {"url": "https://pager.example:8443/hush?hush", "callback_url": ["https://a.example/b", None]}
    }
    changes |= {
        "changes": {"ingress_url": {"to": "http://10.0.0.1:8080"}, "own_url": "https://x.example?hush", "URL": "no"}
    }
    assert json.loads(as_json(changes)) == {
        "asked": {"url": "https://pager.example:8443/…", "callback_url": ["https://a.example/…", None]},
        "changes": {"ingress_url": {"to": "http://10.0.0.1:8080"}, "own_url": "https://x.example/…", "URL": "no"},
    }


@pytest.mark.parametrize(
    "text",
    [
        "-----BEGIN PRIVATE KEY-----\nMIGH\n-----END PRIVATE KEY-----",
        "MIGH\n-----END EC PRIVATE KEY-----",
        "---- BEGIN RSA PRIVATE KEY ----\nMIGH",
        "x" * 3000 + "MIGH\n-----END PRIVATE KEY-----",
    ],
)
def test_a_private_key_is_hidden_whole_or_not(text: str) -> None:
    assert clean(text) == HIDDEN
