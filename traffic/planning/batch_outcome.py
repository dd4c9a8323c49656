"""Outcomes of a batch's lines: what an answer means, how it reads in the output and error files, and the journal that a
range's outcomes are kept in until then. Pure.

A journal's line is `crc position kind input cached output reasoning JSON`: the position of the line in its range, `o`
or `e` for output or error, and tokens. A line that was cut, or damaged, ends what is read of its journal.
"""

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from engine_agent.protocol.api_surface import ErrorForm, error_object
from traffic.planning.async_request import AttemptResponse, is_complete_answer
from traffic.planning.batch import Tally

OUTPUT, ERROR = b"o", b"e"
EXPIRED, CANCELLED, LOST, TIMEOUT = "batch_expired", "batch_cancelled", "outcome_lost", "request_timeout"
_SAID = {
    EXPIRED: "This request could not be executed before the completion window expired.",
    CANCELLED: "This request was not executed, because the batch was cancelled.",
    LOST: "The outcome of this request was damaged in the file store.",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The one terminal outcome of a line: `text` is its line of the output or the error file."""

    position: int
    is_output: bool
    tally: Tally
    text: bytes


def outcome_of(position: int, request_id: str, custom_id: str, received: AttemptResponse) -> Outcome:
    """What ends a line: an answer, or the last of its errors."""
    if received.status is None:
        error = {"code": TIMEOUT, "message": received.reason[:500]}
        return _outcome(position, request_id, custom_id, None, error, Tally(failed=1))
    try:
        body = json.loads(received.body)
    except ValueError:
        message = received.body[:500].decode("utf-8", "replace")
        body = error_object(ErrorForm.OPENAI, received.status, message)
    response = {"status_code": received.status, "request_id": request_id, "body": body}
    if not is_complete_answer(received):
        return _outcome(position, request_id, custom_id, response, None, Tally(failed=1))
    usage = body.get("usage") if isinstance(body.get("usage"), dict) else {}
    return _outcome(position, request_id, custom_id, response, None, _tally(usage), is_output=True)


def unsent_outcome(position: int, request_id: str, custom_id: str, code: str) -> Outcome:
    return _outcome(position, request_id, custom_id, None, {"code": code, "message": _SAID[code]}, Tally(failed=1))


def _outcome(
    position: int,
    request_id: str,
    custom_id: str,
    response: Mapping[str, Any] | None,
    error: Mapping[str, Any] | None,
    tally: Tally,
    *,
    is_output: bool = False,
) -> Outcome:
    line = {"id": request_id, "custom_id": custom_id, "response": response, "error": error}
    return Outcome(position, is_output, tally, json.dumps(line, separators=(",", ":")).encode())


def _tally(usage: Mapping[str, Any]) -> Tally:
    """Chat, completions and embeddings name tokens one way, responses another."""
    read = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    written = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
    return Tally(
        completed=1,
        input_tokens=_count(usage, "prompt_tokens", "input_tokens"),
        cached_tokens=_count(read, "cached_tokens"),
        output_tokens=_count(usage, "completion_tokens", "output_tokens"),
        reasoning_tokens=_count(written, "reasoning_tokens"),
    )


def _count(numbers: object, *names: str) -> int:
    found = [numbers.get(name) for name in names] if isinstance(numbers, dict) else []
    return next((number for number in found if isinstance(number, int) and 0 <= number < 2**40), 0)


def journal_line(outcome: Outcome) -> bytes:
    tally = outcome.tally
    tokens = (tally.input_tokens, tally.cached_tokens, tally.output_tokens, tally.reasoning_tokens)
    head = b"%d %s %d %d %d %d" % (outcome.position, OUTPUT if outcome.is_output else ERROR, *tokens)
    written = head + b" " + outcome.text
    return b"%08x %s\n" % (zlib.crc32(written), written)


def journal_outcomes(lines: Iterable[bytes]) -> Iterator[Outcome]:
    """What a journal has, up to the first line that is not whole."""
    for line in lines:
        if not line.endswith(b"\n") or len(line) < 10:
            return
        crc, written = line[:8], line[9:-1]
        if line[8:9] != b" " or crc != b"%08x" % zlib.crc32(written):
            return
        position, kind, *tokens, text = written.split(b" ", 6)
        is_output = kind == OUTPUT
        counts = [int(number) for number in tokens]
        tally = Tally(1, 0, *counts) if is_output else Tally(0, 1, *counts)
        yield Outcome(int(position), is_output, tally, text)


def error_key(text: bytes) -> tuple[str, str]:
    """Code and message of a line of the error file, as they are counted for a summary."""
    line = json.loads(text)
    if line["error"]:
        return str(line["error"]["code"]), str(line["error"]["message"])[:300]
    body = line["response"]["body"]
    error = body.get("error") if isinstance(body, dict) else None
    said = error if isinstance(error, dict) else {}
    code = str(said.get("code") or f"http_{line['response']['status_code']}")
    return code[:80], str(said.get("message") or f"answered {line['response']['status_code']}")[:300]
