"""Requests and their expected outcome behind the cell proxy: one table for the simulator and vLLM.

Each line of `request_table.jsonl` is `[path, change, status, code, param]`: a change of the plain body of that path, or
another body as a text, and the expected answer. `code` and `param` are those of the error, null if it is answered.
"""

import json
from pathlib import Path
from typing import Any

from tests.engine_agent.cell_proxy.http_stream import Message, ask, request

Row = tuple[str, dict[str, Any] | str, int, str | None, str | None]
Outcome = tuple[int, str | None, str | None]
"""Status, code and member of the error."""
MODEL = "smollm2"
CONTEXT_TOKENS = 2048
USER = [{"role": "user", "content": "Say why"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER, "max_tokens": 2},
    "/v1/completions": {"prompt": "Say why", "max_tokens": 2},
    "/v1/responses": {"input": "Say why", "max_output_tokens": 2, "store": False},
    "/v1/messages": {"messages": USER, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": USER},
}
ABSENT = {"absent": True}
"""Marks a member that is removed from the plain body."""
LONG = "x " * 3000
"""The text that replaces LONG: longer than the model's context."""
TABLE: tuple[Row, ...] = tuple(
    tuple(json.loads(line))
    for line in (Path(__file__).parent / "request_table.jsonl").read_text(encoding="utf-8").splitlines()
)


def body_of(row: Row) -> bytes:
    path, change = row[:2]
    if isinstance(change, str):
        return change.encode()
    members = {"model": MODEL, **BODIES.get(path, {}), **change}
    text = json.dumps({name: value for name, value in members.items() if value != ABSENT})
    return text.replace("LONG", LONG).encode()


async def outcome_of(port: int, row: Row) -> Outcome:
    """Returns the answer of the proxy at this port."""
    answer = await ask(port, request(row[0], body_of(row), content_type="application/json"))
    assert answer.whole, row
    if answer.status == 200:
        return answer.status, None, None
    error = answer.json()["error"]
    assert isinstance(error["message"], str), row
    assert _form_of(answer) == ("error" if row[0].startswith("/v1/messages") else None), row
    return answer.status, error["code"], error["param"]


def _form_of(answer: Message) -> Any:
    return answer.json().get("type")
