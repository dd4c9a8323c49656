"""No body without an end reaches Django, which would take all of it onto its disk."""

import json
from typing import Any, cast

import pytest

from traffic.api.stored_file import OTHER_BYTES, BodiesInBounds

PIECE = b"x" * 65536


class Reading:
    """An application that takes in a whole body before it answers, as Django does."""

    def __init__(self) -> None:
        self.read = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            self.read += len(message["body"])
            if not message.get("more_body"):
                break
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


async def answered(method: str, path: str, pieces: int) -> tuple[int, bytes, int, int]:
    """Status and body of the answer to a body of so many pieces; bytes that were read, and pieces asked for."""
    reading, asked, said = Reading(), 0, list[dict[str, Any]]()

    async def receive() -> dict[str, Any]:
        nonlocal asked
        asked += 1
        return {"type": "http.request", "body": PIECE, "more_body": asked < pieces}

    async def send(message: dict[str, Any]) -> None:
        said.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": []}
    await BodiesInBounds(cast(Any, reading))(scope, cast(Any, receive), cast(Any, send))
    (start, body) = said
    return start["status"], body["body"], reading.read, asked


@pytest.mark.asyncio
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "GET"])
@pytest.mark.parametrize("path", ["/v1/async/chat/completions", "/v1/batches", "/api/v1/deployments/", "/login/"])
async def test_a_body_without_an_end_is_refused_once_it_is_too_long(method: str, path: str) -> None:
    status, body, read, asked = await answered(method, path, pieces=10**9)
    assert status == 413
    assert json.loads(body)["error"]["code"] == "request_too_large"
    assert read <= OTHER_BYTES
    assert asked == OTHER_BYTES // len(PIECE) + 1


@pytest.mark.asyncio
@pytest.mark.parametrize("pieces", [1, OTHER_BYTES // len(PIECE)])
async def test_a_body_within_bounds_goes_through_whole(pieces: int) -> None:
    assert await answered("POST", "/v1/async/chat/completions", pieces) == (200, b"{}", pieces * len(PIECE), pieces)
