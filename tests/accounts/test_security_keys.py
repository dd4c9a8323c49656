"""Security keys and passkeys as second factors, by a key in software that signs as real ones do."""

import ast
import inspect
import json
from typing import Any

import pytest
from django.test import Client

from accounts import security_keys
from accounts.models import SecondFactor
from accounts.security_keys import Site, site_of
from tests.accounts.factors import KEY, SECOND, is_in, key_added, options, password_shown
from tests.accounts.software_key import SoftwareKey

pytestmark = [pytest.mark.django_db, pytest.mark.slow]


@pytest.mark.parametrize("step", [1, 0], ids=["a key that counts", "a passkey"])
def test_a_security_key_is_added_and_its_answer_counts_once(step: int, ada: Client, browser: Client) -> None:
    key = SoftwareKey(step=step)
    assert "recovery-codes" in key_added(ada, key).text
    password_shown(browser)
    page = browser.get(SECOND, headers={"host": "localhost"}).text
    signed = key.get(options(page))
    assert browser.post(SECOND, {"credential": signed}, headers={"host": "localhost"}).headers["Location"] == "/"
    other = Client()
    password_shown(other)
    assert other.post(SECOND, {"credential": signed}, headers={"host": "localhost"}).status_code == 200
    assert not is_in(other)


@pytest.mark.parametrize(
    "attack",
    [
        {"origin": "http://localhost.example.com"},
        {"origin": "http://localhost:9999"},
        {"credential_id": b"x" * 32},
        {"private": SoftwareKey().private},
        {"flags": 0},
        {"counter": -1, "step": 1},
    ],
    ids=["another site", "another port", "another key's name", "a copy without the key", "untouched", "a copy"],
)
def test_what_no_key_of_the_user_signed_for_this_page_does_not_count(
    attack: dict[str, Any], ada: Client, browser: Client
) -> None:
    key = SoftwareKey(counter=5)
    key_added(ada, key)
    password_shown(browser)
    page = browser.get(SECOND, headers={"host": "localhost"}).text
    vars(key).update(attack)
    response = browser.post(SECOND, {"credential": key.get(options(page))}, headers={"host": "localhost"})
    assert response.status_code == 200
    assert not is_in(browser)


@pytest.mark.parametrize(
    "text", ["[]", "{}", "x" * 20_000, '{"response": {"clientDataJSON": "AAAA"}}', "[" * 5000, '{"response": 3}']
)
def test_bytes_that_are_no_response_are_refused(text: str, ada: Client, browser: Client) -> None:
    key_added(ada, SoftwareKey())
    password_shown(browser)
    response = browser.post(SECOND, {"credential": text}, headers={"host": "localhost"})
    assert (response.status_code, is_in(browser)) == (200, False)
    assert ada.post(KEY, {"credential": text}, headers={"host": "localhost"}).status_code == 409


def test_a_response_with_junk_inside_is_refused(ada: Client) -> None:
    for part in ("attestationObject", "clientDataJSON"):
        key = SoftwareKey()
        page = ada.get(KEY, headers={"host": "localhost"}).text
        response = json.loads(key.create(options(page)))
        response["response"][part] = response["response"][part][:-9]
        answer = ada.post(KEY, {"credential": json.dumps(response)}, headers={"host": "localhost"})
        assert answer.status_code == 409
    assert not SecondFactor.objects.exists()


@pytest.mark.parametrize(
    ("origin", "host", "has_keys"),
    [
        ("http://localhost:8000", "localhost", True),
        ("http://127.0.0.1:8000", "127.0.0.1", False),
        ("https://10.0.0.3", "10.0.0.3", False),
        ("https://[::1]", "[::1]", False),
        ("http://fleet.example.com", "fleet.example.com", False),
        ("https://fleet.example.com", "fleet.example.com", True),
    ],
)
def test_keys_are_offered_where_browsers_have_them(origin: str, host: str, has_keys: bool) -> None:
    assert Site(origin, host).has_keys is has_keys


@pytest.mark.parametrize(
    ("header", "origin", "host"),
    [
        ("localhost:8000", "http://localhost:8000", "localhost"),
        ("[::1]:80", "http://[::1]:80", "[::1]"),
        ("[::1]", "http://[::1]", "[::1]"),
    ],
)
def test_the_site_is_the_requests_host(header: str, origin: str, host: str, rf: Any) -> None:
    assert site_of(rf.get("/", headers={"host": header})) == Site(origin, host)


def test_the_library_is_not_loaded_with_the_module_which_every_process_imports() -> None:
    imports = [node for node in ast.parse(inspect.getsource(security_keys)).body if isinstance(node, ast.ImportFrom)]
    assert [node.module for node in imports if node.module and node.module.startswith("fido2")] == []
