"""A form that is sent twice changes things once, and one with changed fields is another submission."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.db import connection

from fleet.faults.models import Incident, IncidentNote
from kernel.models import IdempotentAnswer
from tests.controlplane.dashboard.clients import signed_in
from tests.fleet.rows import NOW
from traffic.keys.models import ApplicationKey

TOKEN = "tab-1-form-1"

pytestmark = pytest.mark.django_db


def incident() -> Incident:
    return Incident.objects.create(kind="silent-node", subject="n-2", node="n-2", summary="silent", opened_at=NOW)


def add_note(client: Any, row: Incident, text: str, token: str = TOKEN) -> Any:
    return client.post(f"/incidents/{row.pk}/ask/note/", {"text": text, "submission": token})


def test_a_form_that_is_sent_twice_is_carried_out_once() -> None:
    client, row = signed_in(), incident()
    first, again = add_note(client, row, "seen"), add_note(client, row, "seen")
    assert (first.status_code, again.status_code) == (302, 302)
    assert first["Location"] == again["Location"]
    assert IncidentNote.objects.count() == 1


def test_changed_fields_or_another_form_are_another_submission() -> None:
    client, row = signed_in(), incident()
    for text, token in [("seen", TOKEN), ("seen again", TOKEN), ("seen", "tab-2-form-1"), ("seen", ""), ("seen", "?")]:
        add_note(client, row, text, token)
    assert IncidentNote.objects.count() == 5


def test_a_refused_form_may_be_sent_again() -> None:
    client, row = signed_in(), incident()
    assert add_note(client, row, "").status_code == 409
    assert not IdempotentAnswer.objects.exists()


def test_a_secret_is_made_once_and_not_stored() -> None:
    client = signed_in()
    fields = {"name": "chat", "tenant": "acme", "serving_class": "batch", "submission": TOKEN}
    first, again = client.post("/keys/new/", fields), client.post("/keys/new/", fields)
    assert first.status_code == 200
    assert again.status_code == 409
    assert "Done already" in again.text
    assert ApplicationKey.objects.count() == 1
    assert IdempotentAnswer.objects.get().body is None


@pytest.mark.django_db(transaction=True)
def test_a_double_click_waits_for_its_first_press() -> None:
    client, row = signed_in(), incident()

    def press(_: int) -> str:
        try:
            return str(add_note(client, row, "seen")["Location"])
        finally:
            connection.close()

    with ThreadPoolExecutor(2) as pool:
        assert len(set(pool.map(press, range(2)))) == 1
    assert IncidentNote.objects.count() == 1
