"""The endpoint of the chat: who may use it, what is refused before the ingress is called, and with which key it is."""

import json
from typing import Any

import pytest
from django.conf import settings
from django.contrib.auth.models import User
from django.test import Client

from controlplane.dashboard import playground as stream
from controlplane.dashboard.playground import _ingress, parse_chat_request
from controlplane.dashboard.snippets import LANGUAGES
from fleet.regions.models import Region
from tests.controlplane.dashboard.clients import signed_in
from tests.controlplane.dashboard.fleets import one_more_of_everything
from traffic.keys.models import KeyPolicy
from traffic.keys.planner import playground_key_text

pytestmark = pytest.mark.django_db

URL = "/playground/say/"
BODY = {"deployment": "deployment-0", "region": "region-0", "messages": [{"role": "user", "content": "hi"}]}


def post(client: Client, **other: Any) -> Any:
    return client.post(URL, data=json.dumps({**BODY, **other}), content_type="application/json")


def test_only_signed_in_users_may_chat() -> None:
    assert post(Client()).status_code == 401


def test_a_viewer_may_not_chat() -> None:
    one_more_of_everything(0)
    viewer = Client()
    viewer.force_login(User.objects.create(username="viewer"))
    assert post(viewer).status_code == 403


def test_a_form_of_another_site_is_refused() -> None:
    client = Client(enforce_csrf_checks=True)
    client.cookies = signed_in().cookies
    assert post(client).status_code == 403


@pytest.mark.parametrize(
    ("other", "word"),
    [({"deployment": "gone"}, "does not exist"), ({"region": "gone"}, "has no ingress"), ({"messages": 1}, "chat")],
)
def test_an_impossible_request_is_refused_with_a_reason(other: dict[str, Any], word: str) -> None:
    one_more_of_everything(0)
    response = post(signed_in(), **other)
    assert response.status_code == 400
    assert word in response.json()["message"]


def test_the_chat_is_offered_as_code_without_its_key() -> None:
    one_more_of_everything(0)
    Region.objects.update(ingress_url="http://10.0.0.1:8080/")
    sent = json.dumps({**BODY, "key": "sw_a_secret", "parameters": '{"top_k": 3}'})
    response = signed_in().post("/playground/code/", data=sent, content_type="application/json")
    assert response.status_code == 200
    code = response.json()
    assert list(code) == list(LANGUAGES)
    assert "http://10.0.0.1:8080/v1" in code["Python"]
    assert "secret" not in response.text
    assert "$SWITCHYARD_KEY" in code["curl"]


def test_only_signed_in_users_get_code_and_a_mistake_is_named() -> None:
    one_more_of_everything(0)
    assert Client().post("/playground/code/", data="{}", content_type="application/json").status_code == 401
    refused = signed_in().post("/playground/code/", data="{}", content_type="application/json")
    assert (refused.status_code, "deployment" in refused.json()["message"]) == (400, True)


def test_a_user_has_few_chats_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    one_more_of_everything(0)
    monkeypatch.setitem(stream._running, "operator", stream.MAX_PER_USER)
    assert post(signed_in()).status_code == 429


def test_a_key_is_sent_only_where_one_is_required_or_given() -> None:
    one_more_of_everything(0)
    plain, named = (parse_chat_request(json.dumps(BODY | key).encode()) for key in ({}, {"key": "sw_a_b"}))
    ingress, headers = _ingress(plain)
    assert (ingress.address, ingress.port, headers) == ("127.0.0.1", 8080, {})
    assert _ingress(named)[1] == {"Authorization": "Bearer sw_a_b"}
    KeyPolicy.objects.update_or_create(defaults={"required": True})
    internal = playground_key_text(settings.SECRET_KEY)
    assert _ingress(plain)[1] == {"Authorization": f"Bearer {internal}"}
    assert _ingress(named)[1] == {"Authorization": "Bearer sw_a_b"}
