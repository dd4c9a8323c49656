"""Requests that web refuses before an application sees them, in the form that clients of their path read."""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from controlplane.api.problems import API_ROOT, CONTENT_TYPE, problem_document
from traffic.tenants.api import RETRY_AFTER_S, refusal_json
from traffic.tenants.planner import ApplicationRefused

APPLICATIONS_ROOT = "/v1/"

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]


class RequestRefused(Exception):
    """`code` and `param` as applications read them."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


async def refuse(scope: Scope, refusal: RequestRefused | ApplicationRefused, send: Send) -> None:
    """Send the whole response: an error of OpenAI's API, a problem document, or a sentence."""
    path, headers = scope["path"], [("Retry-After", str(RETRY_AFTER_S))] if refusal.status in {429, 503} else []
    if path.startswith(APPLICATIONS_ROOT):
        of_application = ApplicationRefused(refusal.status, refusal.code, str(refusal), refusal.param)
        headers, body = refusal_json(of_application)
        kind = "application/json"
    elif path.startswith(API_ROOT):
        kind, body = CONTENT_TYPE, json.dumps(problem_document(refusal.status, str(refusal), path)).encode()
    else:
        kind, body = "text/plain; charset=utf-8", f"{refusal}\n".encode()
    headers += [("Content-Type", kind), ("Content-Length", str(len(body)))]
    coded = [(name.lower().encode(), text.encode()) for name, text in headers]
    await send({"type": "http.response.start", "status": refusal.status, "headers": coded})
    await send({"type": "http.response.body", "body": body})
