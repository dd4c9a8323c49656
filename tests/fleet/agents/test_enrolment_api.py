"""`POST /agents/enrol`: the answer to a valid token, and the errors."""

import json
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client

from engine_agent.protocol.states import AgentKind
from fleet.agents.services.enrolment import agents_identify, join_token_issue
from fleet.nodes.api import MAX_ENROLMENT_BYTES
from kernel import clock

pytestmark = pytest.mark.django_db

BODY = {"kind": "node", "id": "n-a", "nonce": "5e" * 32}


@pytest.fixture
def token() -> str:
    soon = clock.now() + timedelta(minutes=1)
    return join_token_issue(kind=AgentKind.NODE, subject="n-a", region="us-east-1", expires_at=soon)


def enrol(authorization: str, body: Any = BODY, *, raw: bytes | None = None) -> tuple[int, dict[str, str]]:
    content = json.dumps(body).encode() if raw is None else raw
    headers = {"Authorization": authorization} if authorization else {}
    client = Client(enforce_csrf_checks=True)
    answer = client.post("/agents/enrol", content, content_type="application/json", headers=headers)
    return answer.status_code, answer.json()


def test_a_token_is_exchanged_for_a_credential_without_a_cookie(token: str) -> None:
    status, answer = enrol(f"Bearer {token}")
    assert status == 200
    identity = agents_identify([answer["credential"]])[0]
    assert identity is not None
    assert identity.id == "n-a"


@pytest.mark.parametrize("authorization", ["", "Bearer", "Bearer ", "Basic abc"])
def test_without_a_token_the_answer_says_how_to_send_one(authorization: str) -> None:
    status, answer = enrol(authorization)
    assert status == 401
    assert "Authorization: Bearer <token>" in answer["error"]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b'{"kind": "node"}',
        b'{"kind": "node", "id": "n-a"}',
        json.dumps({**BODY, "kind": None, "id": ["\0"]}).encode(),
        b"\xff",
        b"[" * MAX_ENROLMENT_BYTES,
        json.dumps({**BODY, "more": "x" * MAX_ENROLMENT_BYTES}).encode(),
    ],
)
def test_a_body_that_is_no_enrolment_is_told_what_one_is(token: str, raw: bytes) -> None:
    status, answer = enrol(f"Bearer {token}", raw=raw)
    assert status == 400
    assert '"kind": "node" or "ingress"' in answer["error"]


@pytest.mark.parametrize(
    "body", [{**BODY, "id": "n-b"}, {**BODY, "kind": "ingress"}, {**BODY, "kind": None, "id": ["x"]}]
)
def test_a_token_of_another_agent_is_refused_with_the_reason(token: str, body: dict[str, Any]) -> None:
    status, answer = enrol(f"Bearer {token}", body)
    assert status == 403
    assert "the join token is for node n-a" in answer["error"]


def test_an_unknown_token_is_refused() -> None:
    assert enrol("Bearer sw_00000000000000_11") == (403, {"error": "unknown join token"})


def test_a_network_that_tries_too_often_waits_whether_its_tokens_are_good_or_not(token: str, settings: Any) -> None:
    settings.API_ANONYMOUS_REQUESTS_PER_MIN = 1
    answers = [enrol("Bearer sw_00000000000000_11") for _ in range(3)] + [enrol(f"Bearer {token}")]
    assert [status for status, _ in answers][-2:] == [429, 429]
    assert "enrolments a minute from one network" in answers[-1][1]["error"]


def test_it_is_no_page_to_look_at() -> None:
    assert Client().get("/agents/enrol").status_code == 405
