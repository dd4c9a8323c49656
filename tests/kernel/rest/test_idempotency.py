"""A POST that is sent again does its work once; the key belongs to its caller and to one request."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction

from kernel import clock
from kernel.models import Event, IdempotentAnswer
from kernel.rest.changes import InProgress
from kernel.rest.idempotency import IdempotentRequest, StoredResponse, fingerprint_of, respond_once
from kernel.tasks import trim_idempotent_answers
from models_registry.versions.models import Model
from tests.controlplane.api.client import DescribedClient, bearer, rules
from tests.fleet import rows
from traffic.keys.models import ApplicationKey

NEW_MODEL = {"name": "tiny", "description": "very small"}
NEW_KEY = {"name": "chat", "tenant": "acme"}


def post(client: DescribedClient, path: str, body: dict[str, Any], key: str = "k-1") -> Any:
    return client.post(f"/api/v1/{path}", body, format="json", headers={"idempotency-key": key})


@pytest.mark.django_db
def test_a_repetition_gets_the_first_answer_and_does_nothing() -> None:
    client = bearer()
    first, again = post(client, "models", NEW_MODEL), post(client, "models", NEW_MODEL)
    assert first.json() == again.json()
    assert "Idempotency-Replayed" not in first
    assert again["Idempotency-Replayed"] == "true"
    assert Model.objects.count() == 1


@pytest.mark.django_db
def test_without_a_key_a_repetition_is_another_request() -> None:
    client = bearer()
    assert client.post("/api/v1/models", NEW_MODEL, format="json").status_code == 200
    assert client.post("/api/v1/models", NEW_MODEL, format="json").status_code == 409


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("path", "body"), [("models", {"name": "other"}), ("rollouts/preview", NEW_MODEL)], ids=["body", "path"]
)
def test_the_same_key_with_another_request_is_refused(path: str, body: dict[str, Any]) -> None:
    client = bearer()
    post(client, "models", NEW_MODEL)
    response = post(client, path, body)
    assert response.status_code == 422
    assert "every request needs its own" in response.json()["detail"]
    assert Model.objects.count() == 1


@pytest.mark.django_db
def test_the_order_of_fields_makes_no_other_request() -> None:
    client = bearer()
    post(client, "models", NEW_MODEL)
    assert post(client, "models", dict(reversed(NEW_MODEL.items())))["Idempotency-Replayed"] == "true"


@pytest.mark.django_db
def test_the_same_key_of_somebody_else_is_another_key() -> None:
    post(bearer("ann"), "models", NEW_MODEL)
    assert post(bearer("ben"), "models", NEW_MODEL).status_code == 409


@pytest.mark.django_db
def test_what_was_refused_may_be_tried_again_with_its_key() -> None:
    client = bearer()
    cell = rows.cell(state="starting")
    assert post(client, f"cells/{cell.id}/drain", {}).status_code == 409
    type(cell).objects.update(state="ready")
    response = post(client, f"cells/{cell.id}/drain", {})
    assert response.status_code == 200
    assert "Idempotency-Replayed" not in response


@pytest.mark.django_db
@pytest.mark.parametrize("key", ["", " ", "a b", "ü", 256 * "k"])
def test_a_key_that_is_none_is_refused(key: str) -> None:
    response = post(bearer(), "models", NEW_MODEL, key)
    assert rules(response) == {"Idempotency-Key": "form"}
    assert not Model.objects.exists()


@pytest.mark.django_db
def test_a_secret_is_not_stored_and_not_shown_again() -> None:
    client = bearer()
    made = post(client, "keys", NEW_KEY).json()
    again = post(client, "keys", NEW_KEY)
    assert again.status_code == 409
    assert "showed a secret" in again.json()["detail"]
    assert ApplicationKey.objects.count() == 1
    stored = IdempotentAnswer.objects.get()
    assert stored.body is None
    assert made["key"].encode() not in repr(stored.__dict__).encode()


@pytest.mark.django_db
def test_a_secret_that_nobody_declared_is_recognised() -> None:
    request = IdempotentRequest("user:1", "k", "f")
    body = b'{"token": "sw_0123abcd4e5f60_' + 48 * b"0" + b'"}'
    respond_once(request, lambda: StoredResponse(200, body), secret=False, now=clock.now())
    assert IdempotentAnswer.objects.get().body is None


@pytest.mark.django_db
def test_a_key_is_forgotten_after_a_day() -> None:
    client = bearer()
    post(client, "models", NEW_MODEL)
    IdempotentAnswer.objects.update(expires_at=clock.now() - timedelta(seconds=1))
    assert post(client, "models", NEW_MODEL).status_code == 409  # the name is taken: it was done anew
    trim_idempotent_answers()
    assert not IdempotentAnswer.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_a_crash_in_the_middle_leaves_nothing_behind() -> None:
    request = IdempotentRequest("user:1", "k", "f")

    def crash() -> StoredResponse:
        Event.objects.create(at=clock.now(), kind="half.done", message="m")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        respond_once(request, crash, secret=False, now=clock.now())
    assert not Event.objects.exists()
    answer, done_at = respond_once(request, lambda: StoredResponse(200, b"{}"), secret=False, now=clock.now())
    assert (answer.status, done_at) == (200, None)


@pytest.mark.django_db(transaction=True)
def test_one_of_two_at_the_same_time_is_told_to_wait() -> None:
    request = IdempotentRequest("user:1", "k", "f")

    def second() -> str:
        try:
            respond_once(request, lambda: StoredResponse(200, b"{}"), secret=False, now=clock.now())
        except InProgress as refusal:
            return str(refusal.headers["Retry-After"])
        finally:
            connection.close()
        return "both did it"

    def first() -> StoredResponse:
        with ThreadPoolExecutor(1) as other:
            assert other.submit(second).result(timeout=60) == "1"
        return StoredResponse(200, b"{}")

    with transaction.atomic():
        respond_once(request, first, secret=False, now=clock.now())
    assert IdempotentAnswer.objects.count() == 1


def test_a_fingerprint_covers_all_that_is_asked() -> None:
    request: dict[str, Any] = {"method": "POST", "path": "/a", "query": "", "body": {"x": 1}}
    others: list[dict[str, Any]] = [{"method": "PUT"}, {"path": "/b"}, {"query": "q=1"}, {"body": {"x": "1"}}]
    fingerprints = {fingerprint_of(**{**request, **other}) for other in [{}, *others]}
    assert len(fingerprints) == 5
