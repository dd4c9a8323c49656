"""The address that a chat speaks to: who may, what is refused before anybody is asked, and with which key."""

import json
from typing import Any

import pytest
from django.conf import settings
from django.contrib.auth.models import User
from django.test import Client

from controlplane.dashboard.pages.playground import _target
from controlplane.dashboard.playground import relay
from controlplane.dashboard.playground.question import question_in
from tests.controlplane.dashboard.clients import signed_in
from tests.controlplane.dashboard.fleets import one_more_of_everything
from traffic.models import KeyPolicy
from traffic.planning.key import PLAYGROUND_TENANT, internal_key_text

pytestmark = pytest.mark.django_db

SAY = "/playground/say/"
ASKED = {"deployment": "deployment-0", "region": "region-0", "messages": [{"role": "user", "content": "hi"}]}


def say(client: Client, **other: Any) -> Any:
    return client.post(SAY, data=json.dumps({**ASKED, **other}), content_type="application/json")


def test_only_who_is_signed_in_may_ask() -> None:
    assert say(Client()).status_code == 401


def test_who_may_only_look_asks_nothing() -> None:
    one_more_of_everything(0)
    viewer = Client()
    viewer.force_login(User.objects.create(username="viewer"))
    assert say(viewer).status_code == 403


def test_a_form_of_another_site_cannot_ask() -> None:
    client = Client(enforce_csrf_checks=True)
    client.cookies = signed_in().cookies
    assert say(client).status_code == 403


@pytest.mark.parametrize(
    ("other", "word"),
    [({"deployment": "gone"}, "no deployment"), ({"region": "gone"}, "has no ingress"), ({"messages": 1}, "chat")],
)
def test_what_cannot_be_asked_is_refused_with_a_reason(other: dict[str, Any], word: str) -> None:
    one_more_of_everything(0)
    answer = say(signed_in(), **other)
    assert answer.status_code == 400
    assert word in answer.json()["message"]


def test_one_person_has_few_answers_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    one_more_of_everything(0)
    monkeypatch.setitem(relay._running, "operator", relay.MOST_PER_USER)
    assert say(signed_in()).status_code == 429


def test_a_key_is_shown_only_where_one_is_required_or_named() -> None:
    one_more_of_everything(0)
    plain, named = question_in(json.dumps(ASKED).encode()), question_in(json.dumps({**ASKED, "key": "sw_a_b"}).encode())
    assert _target(plain) == (("127.0.0.1", 8080), {})
    assert _target(named)[1] == {"Authorization": "Bearer sw_a_b"}
    KeyPolicy.objects.update_or_create(defaults={"required": True})
    ours = internal_key_text(PLAYGROUND_TENANT, settings.SECRET_KEY)
    assert _target(plain)[1] == {"Authorization": f"Bearer {ours}"}
    assert _target(named)[1] == {"Authorization": "Bearer sw_a_b"}
