import json
from datetime import datetime
from typing import Any

from tests.fleet.rows import NOW
from traffic.planning.async_request import AsyncSettings, AttemptResponse
from traffic.planning.stored_response import JsonObject, StoreSettings
from traffic.selectors.application import Application
from traffic.services.async_lease import async_attempt_settle, async_requests_claim
from traffic.services.stored_response import PassedOn, ResponseSubmission, response_begin, response_keep

ACME, GLOBEX = Application("acme", "0a0a0a0a"), Application("globex", "0b0b0b0b")
STORE = StoreSettings()
SENDING = AsyncSettings()


def begin(
    application: Application = ACME,
    *,
    now: datetime = NOW,
    settings: StoreSettings = STORE,
    headers: dict[str, str] | None = None,
    **members: Any,
) -> PassedOn | JsonObject:
    body = json.dumps({"model": "sim-70b", "input": "hi", **members}).encode()
    stated = {"authorization": "Bearer sw_x", **(headers or {})}
    submission = ResponseSubmission(body, stated, "us-east-1")
    return response_begin(application=application, submission=submission, now=now, settings=settings)


def answer(text: str = "ho", **members: Any) -> JsonObject:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": content}
    return {"id": "resp_of_engine", "object": "response", "status": "completed", "output": [item], **members}


def kept(application: Application = ACME, *, text: str = "ho", now: datetime = NOW, **members: Any) -> str:
    """The id of a response that its application waited for."""
    passed = begin(application, now=now, store=True, **members)
    assert isinstance(passed, PassedOn)
    response_keep(passed=passed, answer={**answer(text), **passed.marks(is_kept=True)}, now=now)
    return passed.response_id


def in_background(application: Application = ACME, **members: Any) -> str:
    begun = begin(application, background=True, **members)
    assert isinstance(begun, dict)
    return str(begun["id"])


def attempt(received: AttemptResponse, now: datetime = NOW) -> bytes:
    """Have a sender make what waits; returns what it sent."""
    (leased,) = async_requests_claim(count=1, full=(), now=now, settings=SENDING)
    async_attempt_settle(leased=leased, received=received, now=now, settings=SENDING)
    return leased.body
