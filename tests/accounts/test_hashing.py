"""Passwords are hashed a few at a time, and no connection waits for one."""

import json
from collections.abc import Iterator
from contextvars import Context
from typing import Any

import pytest
from django.contrib.auth.hashers import PBKDF2PasswordHasher, check_password, get_hashers, make_password
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client

from accounts.hashing import KNOWN_SLOTS, STRANGERS_SLOTS, SlottedPasswordHasher, hash_slot
from audit.models import AuditRecord
from kernel.refusals import Busy

PASSWORD = "correct horse"


@pytest.fixture
def crowd() -> Iterator[None]:
    """Unknown browsers use every slot that is open to them."""
    contexts = [(Context(), hash_slot()) for _ in range(STRANGERS_SLOTS)]
    for context, slot in contexts:
        context.run(slot.__enter__)
    yield
    for context, slot in contexts:
        context.run(slot.__exit__, None, None, None)


@pytest.mark.usefixtures("crowd")
def test_who_finds_no_slot_is_refused_at_once() -> None:
    with pytest.raises(Busy) as busy:
        make_password(PASSWORD)
    assert busy.value.retry_after_s > 0


@pytest.mark.usefixtures("crowd")
def test_strangers_leave_slots_to_those_who_are_known() -> None:
    with hash_slot(known=True):
        assert check_password(PASSWORD, make_password(PASSWORD))
    assert KNOWN_SLOTS >= 1


def test_a_slot_is_free_again_after_its_hash() -> None:
    for _ in range(2 * STRANGERS_SLOTS):
        make_password(PASSWORD)


def test_no_password_is_hashed_by_another_hasher() -> None:
    assert [type(hasher) for hasher in get_hashers()] == [SlottedPasswordHasher]


@pytest.mark.django_db(transaction=True)
def test_a_login_holds_neither_a_transaction_nor_a_connection_while_its_password_is_hashed(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    User.objects.create_user("operator", password=PASSWORD)
    held = []
    hashes = PBKDF2PasswordHasher.encode

    def observed(*arguments: Any) -> str:
        held.append((connection.in_atomic_block, connection.connection is not None))
        return hashes(*arguments)

    monkeypatch.setattr(PBKDF2PasswordHasher, "encode", observed)
    for name, password, status in (("operator", PASSWORD, 302), ("operator", "wrong", 200), ("nobody", "x", 200)):
        assert client.post("/login/", {"username": name, "password": password}).status_code == status
        client.logout()
    assert set(held) == {(False, False)}


NEW = "another long password"
SETS = {
    "one's own": ("/settings/password/", {"old_password": PASSWORD, "new_password": NEW}),
    "another's": ("/settings/users/eve/change/", {"what": "password", "password": NEW}),
    "of a new user": ("/settings/users/new/", {"go": "apply", "name": "zoe", "password": NEW}),
    "another's, by the API": ("PATCH /api/v1/users/eve", {"password": NEW}),
    "of a new user, by the API": ("POST /api/v1/users", {"username": "zoe", "password": NEW}),
}


def sets(client: Client, way: str) -> Any:
    target, fields = SETS[way]
    method, _, path = target.rpartition(" ")
    if not method:
        return client.post(path, fields)
    return client.generic(method, path, json.dumps(fields), content_type="application/json")


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("way", SETS)
def test_no_transaction_waits_while_a_password_that_is_set_is_hashed(
    way: str, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.force_login(User.objects.create_user("ada", password=PASSWORD, is_superuser=True))
    eve = User.objects.create_user("eve", password=PASSWORD)
    held = []
    hashes = PBKDF2PasswordHasher.encode

    def observed(*arguments: Any) -> str:
        held.append((connection.in_atomic_block, connection.connection is not None))
        return hashes(*arguments)

    monkeypatch.setattr(PBKDF2PasswordHasher, "encode", observed)
    response = sets(client, way)
    assert response.status_code in {200, 302}, response.text
    assert (set(held), len(held)) == ({(False, False)}, 2 if way == "one's own" else 1)
    changed = {"one's own": "ada", "another's": "eve", "another's, by the API": "eve"}.get(way, "zoe")
    assert User.objects.get(username=changed).check_password(NEW)
    assert AuditRecord.objects.count() == 1
    assert eve.pk


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("way", SETS)
def test_who_sets_a_password_in_a_crowd_is_told_to_try_again(way: str, client: Client) -> None:
    client.force_login(User.objects.create_user("ada", password=PASSWORD, is_superuser=True))
    User.objects.create_user("eve", password=PASSWORD)
    before = sorted(User.objects.values_list("username", "password"))
    contexts = [(Context(), hash_slot(known=True)) for _ in range(STRANGERS_SLOTS + KNOWN_SLOTS)]
    for context, slot in contexts:
        context.run(slot.__enter__)
    try:
        response = sets(client, way)
    finally:
        for context, slot in contexts:
            context.run(slot.__exit__, None, None, None)
    assert (response.status_code, "Retry-After" in response.headers) == (503, True)
    assert sorted(User.objects.values_list("username", "password")) == before


@pytest.mark.django_db
@pytest.mark.usefixtures("crowd")
def test_a_login_in_a_crowd_is_told_when_to_try_again_and_asks_no_database(
    client: Client, django_assert_num_queries: Any
) -> None:
    with django_assert_num_queries(0):
        response = client.post("/login/", {"username": "operator", "password": PASSWORD})
    assert (response.status_code, response.headers["Retry-After"]) == (503, "2")
    assert "Try again in 2 seconds" in response.text


@pytest.mark.django_db
def test_a_browser_that_was_here_before_gets_in_through_a_crowd(client: Client, request: pytest.FixtureRequest) -> None:
    User.objects.create_user("operator", password=PASSWORD)
    form = {"username": "operator", "password": PASSWORD}
    assert client.post("/login/", form).status_code == 302
    client.post("/logout/")
    request.getfixturevalue("crowd")
    assert client.post("/login/", form).status_code == 302
    assert Client().post("/login/", form).status_code == 503
    assert client.post("/login/", {**form, "username": "admin"}).status_code == 503
