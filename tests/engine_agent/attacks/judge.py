"""Whether the answer to an attack is readable for clients of its path, and whether cells stayed as they were. Pure."""

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass

from engine_agent.protocol.api_surface import CELL_PATHS, ErrorForm
from tests.engine_agent.attacks.attacks import Attack

HTTP = (b"HTTP/1.1 ", b"HTTP/1.0 ")
OPENAI_TYPES = frozenset(
    {
        "invalid_request_error", "authentication_error", "permission_error", "not_found_error", "rate_limit_error",
        "requests", "tokens", "insufficient_quota",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Served:
    """One server of a backend as HAProxy has it. `went_down`: transitions from up to down since its start."""

    status: str
    weight: str
    went_down: int


def complaint(attack: Attack, answer: bytes) -> str | None:
    """What is wrong with the answer to an attack, or None. Only the first answer of a connection counts."""
    if not answer:
        return None if attack.leaves else "the connection closed without an answer"
    head, _, rest = answer.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    if not head.startswith(HTTP):
        return None if attack.is_framing else f"not HTTP: {answer[:60]!r}"
    status = int(lines[0].split()[1])
    if status == 100:
        return complaint(attack, rest)
    if attack.pieces[0].startswith(b"HEAD "):
        rest = b""  # what follows is the answer to the next request
    if status >= 500 and not (attack.may_fail and status == 500):
        return f"{status}: {rest[:300]!r}"
    if status < 400:
        return None if attack.may_serve else f"{status}, though it cannot be valid: {rest[:100]!r}"
    is_json = any(line.lower().startswith(b"content-type: application/json") for line in lines)
    if not is_json or not rest:
        return None if attack.is_framing else f"{status} without JSON: {rest[:100]!r}"
    return _form_complaint(attack, status, _body(lines, rest))


def _body(lines: list[bytes], rest: bytes) -> bytes:
    for line in lines:
        if line.lower().startswith(b"content-length:"):
            return rest[: int(line.partition(b":")[2])]
    return rest


def _form_complaint(attack: Attack, status: int, body: bytes) -> str | None:
    said = f"{status} {body[:300]!r}"
    try:
        answer = json.loads(body)
    except ValueError:
        return f"a body that is no JSON: {said}"
    error = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(error, dict) or not isinstance(error.get("message"), str) or not error["message"]:
        return f"no error with a message: {said}"
    if not isinstance(error.get("code"), str | None):
        return f"`code` is no string: {said}"
    if attack.is_framing:
        return None  # the path may be another one than meant
    is_anthropic = CELL_PATHS[attack.path].errors is ErrorForm.ANTHROPIC
    if is_anthropic != (answer.get("type") == "error"):
        return f"the form of another API: {said}"
    if not is_anthropic and error.get("type") not in OPENAI_TYPES and status != 500:
        return f"`type` is none of OpenAI's: {said}"
    return None


def servers_of(stat: str) -> dict[tuple[str, str], Served]:
    """Cells and other regions from HAProxy's `show stat`, by backend and server."""
    rows = csv.DictReader(io.StringIO(stat.lstrip("# ")))
    return {
        (row["pxname"], row["svname"]): Served(row["status"].split()[0], row["weight"], int(row["chkdown"] or 0))
        for row in rows
        if row["svname"] not in {"FRONTEND", "BACKEND"}
    }


def changes(before: Mapping[tuple[str, str], Served], after: Mapping[tuple[str, str], Served]) -> list[str]:
    """What differs between two moments, one line for each server."""
    return [
        f"{backend}/{server}: {before.get((backend, server))} -> {after.get((backend, server))}"
        for backend, server in sorted({*before, *after})
        if before.get((backend, server)) != after.get((backend, server))
    ]
