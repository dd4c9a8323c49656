"""Validates a line of a batch's input, builds its request, turns answers into output or error lines, and encodes the
journals of ranges. Pure.

A journal line is `crc position kind input cached output reasoning JSON`: the position in the range, `o` or `e` for
output or error, and tokens. Reading stops at a truncated or damaged line."""

import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from engine_agent.protocol.api_surface import ErrorForm, error_object
from kernel.decoding import decode_json
from traffic.async_requests.planner import MOVED, AttemptResponse
from traffic.batches.planning.batch import Tally

MAX_CUSTOM_ID = 512
PREFIX_LETTERS = (64, 256, 1024, 4096)
"""Prompt lengths at which prefixes are compared: the levels of a trie. 256 letters are about 64 tokens, four blocks of
an engine's cache."""
DIGEST_BYTES = 4
PATH_BYTES = DIGEST_BYTES * len(PREFIX_LETTERS)
MAX_OUTPUT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A valid line. `texts` is its number of inputs; `output` the maximum tokens of its answer, 0 if unstated."""

    custom_id: str
    body: dict[str, Any]
    texts: int
    output: int

    @property
    def model(self) -> str:
        return str(self.body["model"])


class BadLine(ValueError):
    """An invalid line. `code` and `param` are OpenAI's."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


def line_of(text: bytes, endpoint: str) -> BatchLine:
    """Raises BadLine if the line is invalid."""
    try:
        line = decode_json(text)
    except ValueError as error:
        raise BadLine("invalid_json_line", f"This line is not parseable as valid JSON: {error}"[:300]) from error
    if not isinstance(line, dict):
        raise BadLine("invalid_json_line", "A line must be a JSON object with custom_id, method, url and body.")
    custom_id = line.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID:
        message = f"`custom_id` must be a string of 1 to {MAX_CUSTOM_ID} characters."
        raise BadLine("missing_required_parameter" if custom_id is None else "invalid_value", message, "custom_id")
    if line.get("method") != "POST":
        raise BadLine("invalid_method", "`method` must be POST.", "method")
    if line.get("url") != endpoint:
        url = str(line.get("url"))[:80]
        raise BadLine("url_mismatch", f"`url` is {url!r} and must be the batch's endpoint, {endpoint!r}.", "url")
    body = line.get("body")
    if not isinstance(body, dict):
        raise BadLine("missing_required_parameter", "`body` must be a JSON object.", "body")
    if not isinstance(body.get("model"), str) or not body["model"] or len(body["model"]) > 200:
        raise BadLine("missing_required_parameter", "`body.model` must name a model.", "body.model")
    _check_body(body)
    return BatchLine(custom_id, body, _input_count(body), _max_output_tokens(body))


def _check_body(body: dict[str, Any]) -> None:
    if body.get("stream"):
        raise BadLine("invalid_value", "`body.stream` is not possible in a batch; omit it.", "body.stream")
    for name in ("store", "background", "previous_response_id"):
        if body.get(name):
            raise BadLine("invalid_value", f"`body.{name}` is not possible in a batch; omit it.", f"body.{name}")


def _input_count(body: dict[str, Any]) -> int:
    texts = body.get("input")
    return len(texts) if isinstance(texts, list) and texts and not isinstance(texts[0], int) else 1


def _max_output_tokens(body: dict[str, Any]) -> int:
    names = ("max_completion_tokens", "max_tokens", "max_output_tokens")
    stated = next((body[name] for name in names if isinstance(body.get(name), int)), 0)
    return max(0, min(int(stated), MAX_OUTPUT))


def prefix_path(body: dict[str, Any]) -> bytes:
    """Returns the prompt's path in the trie: paths share a level if the prompts are equal up to it."""
    prompt = body.get("messages", body.get("prompt", body.get("input", "")))
    text = prompt if isinstance(prompt, str) else _rendered_prompt(prompt, PREFIX_LETTERS[-1])
    path = b""
    for letters in PREFIX_LETTERS:
        # In the prompt of a response, the instructions come first.
        head = f"{body.get('instructions') or ''}\0{text}"[:letters].encode("utf-8", "surrogatepass")
        path += hashlib.blake2b(head, digest_size=DIGEST_BYTES).digest()
    return path


def _rendered_prompt(prompt: object, letters: int) -> str:
    found, length = [], 0
    for text in _texts_in(prompt, 0):
        found.append(text[:letters])
        length += len(found[-1])
        if length >= letters:
            break
    return "\0".join(found)


def _texts_in(value: object, depth: int) -> Iterator[str]:
    if isinstance(value, str | int | float):
        yield str(value)
    elif isinstance(value, list) and depth < 8:
        for inner in value:
            yield from _texts_in(inner, depth + 1)
    elif isinstance(value, dict) and depth < 8:
        for name in ("role", "type", "content", "text"):
            if name in value:
                yield from _texts_in(value[name], depth + 1)


def work_line(line: BatchLine) -> bytes:
    """Returns a line of a work file: its `custom_id` in JSON, a tab, and the body to send. The body is serialised
    again, with the model first, so that all readers on the way parse it alike. JSON escapes tabs."""
    written = json.dumps({"model": line.model, **line.body}, separators=(",", ":"), allow_nan=False)
    return f"{json.dumps(line.custom_id)}\t{written}".encode()


def sent_body(text: bytes) -> tuple[str, bytes]:
    """Returns the `custom_id` of a line of a work file, and the body to send."""
    custom_id, _, body = text.partition(b"\t")
    return str(json.loads(custom_id)), body


OUTPUT, ERROR = b"o", b"e"
EXPIRED, CANCELLED, LOST, TIMEOUT = "batch_expired", "batch_cancelled", "outcome_lost", "request_timeout"
_UNEXECUTED_TEXT = {
    EXPIRED: "This request could not be executed before the completion window expired.",
    CANCELLED: "This request was not executed, because the batch was cancelled.",
    LOST: "The outcome of this request was damaged in the file store.",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The terminal outcome of a line; `text` is its line in the output or error file."""

    position: int
    is_output: bool
    tally: Tally
    text: bytes


def outcome_of(position: int, request_id: str, custom_id: str, received: AttemptResponse) -> Outcome:
    """Returns the outcome of an answer or of the last error."""
    if received.status is None:
        error = {"code": TIMEOUT, "message": received.reason[:500]}
        return _new_outcome(position, request_id, custom_id, None, error, Tally(failed=1))
    is_invalid = False
    try:
        body = json.loads(received.body)
    except ValueError:
        is_invalid = True
        message = received.body[:500].decode("utf-8", "replace")
        body = error_object(ErrorForm.OPENAI, received.status, message)
    response = {"status_code": received.status, "request_id": request_id, "body": body}
    if not 200 <= received.status < MOVED or not isinstance(body, dict) or is_invalid:
        return _new_outcome(position, request_id, custom_id, response, None, Tally(failed=1))
    usage = body.get("usage")
    tally = _usage_tally(usage if isinstance(usage, dict) else {})
    if received.body.isascii() and received.body.startswith(b"{") and not _CONTROL.search(received.body):
        return Outcome(position, True, tally, _with_answer(request_id, custom_id, received.status, received.body))
    return _new_outcome(position, request_id, custom_id, response, None, tally, is_output=True)


_CONTROL = re.compile(rb"[\x00-\x1f]")


def _with_answer(request_id: str, custom_id: str, status: int, body: bytes) -> bytes:
    """Returns an output line with an answer as it was received, without the cost of serialising it again."""
    head = {"id": request_id, "custom_id": custom_id}
    start = json.dumps(head, separators=(",", ":")).encode().removesuffix(b"}")
    id = json.dumps(request_id).encode()
    return b'%s,"response":{"status_code":%d,"request_id":%s,"body":%s},"error":null}' % (start, status, id, body)


def unsent_outcome(position: int, request_id: str, custom_id: str, code: str) -> Outcome:
    return _new_outcome(
        position, request_id, custom_id, None, {"code": code, "message": _UNEXECUTED_TEXT[code]}, Tally(failed=1)
    )


def _new_outcome(
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


def _usage_tally(usage: Mapping[str, Any]) -> Tally:
    """Responses name tokens differently from chat, completions and embeddings."""
    read = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    written = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
    return Tally(
        completed=1,
        input_tokens=_token_count(usage, "prompt_tokens", "input_tokens"),
        cached_tokens=_token_count(read, "cached_tokens"),
        output_tokens=_token_count(usage, "completion_tokens", "output_tokens"),
        reasoning_tokens=_token_count(written, "reasoning_tokens"),
    )


def _token_count(numbers: object, *names: str) -> int:
    found = [numbers.get(name) for name in names] if isinstance(numbers, dict) else []
    return next((number for number in found if isinstance(number, int) and 0 <= number < 2**40), 0)


def journal_line(outcome: Outcome) -> bytes:
    tally = outcome.tally
    tokens = (tally.input_tokens, tally.cached_tokens, tally.output_tokens, tally.reasoning_tokens)
    head = b"%d %s %d %d %d %d" % (outcome.position, OUTPUT if outcome.is_output else ERROR, *tokens)
    written = head + b" " + outcome.text
    return b"%08x %s\n" % (zlib.crc32(written), written)


def journal_outcomes(lines: Iterable[bytes]) -> Iterator[Outcome]:
    """Returns a journal's outcomes up to the first incomplete line."""
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
    """Code and message of an error line, by which a summary counts."""
    line = json.loads(text)
    if line["error"]:
        return str(line["error"]["code"]), str(line["error"]["message"])[:300]
    body = line["response"]["body"]
    error = body.get("error") if isinstance(body, dict) else None
    details = error if isinstance(error, dict) else {}
    code = str(details.get("code") or f"http_{line['response']['status_code']}")
    return code[:80], str(details.get("message") or f"answered {line['response']['status_code']}")[:300]
