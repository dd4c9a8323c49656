"""All answers that the proxy gives instead of the engine, in the error format of the path. Pure. A refusal states what
was wrong and whether another cell may take the request, and never pretends that the engine answered."""

from dataclasses import dataclass

import msgspec

from engine_agent.protocol.api_surface import CONTEXT_LENGTH_EXCEEDED, ErrorForm, error_object
from engine_agent.protocol.request_bodies import BadRequest

RETRY_HEADER = (b"x-switchyard-retry", b"1")
ERROR_HEADER = b"x-switchyard-error"
"""The code of an error, for the counts of the ingress."""
RETRY_AFTER_S = 1


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error answer. `retry`: no byte of an answer was sent, so the ingress may try another cell. `is_final`: clients
    that retry by status should not. `param`: the wrong member of the body."""

    status: int
    code: str
    message: str
    retry: bool = False
    is_final: bool = False
    param: str | None = None


def error_body(refusal: Refusal, form: ErrorForm = ErrorForm.OPENAI) -> bytes:
    stated = error_object(form, refusal.status, refusal.message, code=refusal.code, param=refusal.param)
    return msgspec.json.encode(stated)


def error_event(refusal: Refusal, *, at_boundary: bool, form: ErrorForm = ErrorForm.OPENAI) -> bytes:
    """The same as a server-sent event. `at_boundary` False: the stream broke inside an event, which is ended first."""
    name = b"event: error\n" if form is ErrorForm.ANTHROPIC else b""
    event = name + b"data: " + error_body(refusal, form) + b"\n\n"
    return event if at_boundary else b"\n\n" + event


def draining(phase: str) -> Refusal:
    return Refusal(503, "cell_draining", f"the cell takes no new requests (phase {phase})", retry=True)


def other_start(wanted: str, own: str) -> Refusal:
    return Refusal(503, "other_generation", f"the request is for {wanted[:80]}, this is {own}", retry=True)


def adapter_not_here(wanted: str) -> Refusal:
    message = f"the version of this cell has no adapter {wanted[:80]!r}; a cell of another version may"
    return Refusal(503, "adapter_not_here", message, retry=True)


def engine_unhealthy(reason: str) -> Refusal:
    return Refusal(503, "engine_unhealthy", f"the cell's engine is not healthy: {reason}", retry=True)


def engine_unreachable(reason: str) -> Refusal:
    return Refusal(503, "engine_unreachable", f"the cell's engine cannot be reached: {reason}", retry=True)


def engine_died(reason: str) -> Refusal:
    return Refusal(503, "engine_died", f"the cell's engine failed before it answered: {reason}", retry=True)


def engine_dropped(reason: str) -> Refusal:
    message = f"the cell's engine is healthy, and closed the connection of this request without an answer: {reason}"
    return Refusal(502, "engine_dropped_request", message, is_final=True)


def engine_died_midway(reason: str) -> Refusal:
    return Refusal(502, "engine_died", f"the cell's engine failed while it answered: {reason}")


def engine_malformed(reason: str) -> Refusal:
    return Refusal(502, "engine_malformed", f"the cell's engine sent an answer that is not HTTP: {reason}")


def engine_silent(silence_s: float) -> Refusal:
    return Refusal(504, "engine_silent", f"the cell's engine sent nothing for {silence_s:.0f} s")


def class_full(serving_class: str, in_flight: int, limit: int) -> Refusal:
    message = f"the cell is full for class {serving_class}: {in_flight} requests in flight, its limit is {limit}"
    return Refusal(503, "cell_saturated", message, retry=True)


def batch_waits() -> Refusal:
    message = "the cell has as much batch work as its other requests allow, and more in its queue"
    return Refusal(503, "cell_saturated", message, retry=True)


def no_prefill_cell(role: str) -> Refusal:
    return Refusal(403, "no_prefill_cell", f"this cell is {role}: only prefill cells read prompts for decode cells")


def prefill_cell() -> Refusal:
    message = "this is a prefill cell, which answers no requests; a decode cell does"
    return Refusal(503, "prefill_cell", message, retry=True)


def prefill_forbidden(who: str) -> Refusal:
    return Refusal(
        403, "not_a_pair", f"{who} may not have prompts read here: its cell is not a decode cell of this one"
    )


def other_layout(given: str, own: str) -> Refusal:
    message = f"the other cell hands over in layout {given[:80]!r}, this one in {own!r}: they cannot be paired"
    return Refusal(409, "other_kv_layout", message)


def not_handed_over(paths: str) -> Refusal:
    return Refusal(400, "not_handed_over", f"only one answer to one prompt is handed over, on the paths {paths}")


def prefill_failed(reason: str) -> Refusal:
    return Refusal(502, "prefill_failed", f"the prompt was not read: {reason}")


def not_continued() -> Refusal:
    return Refusal(409, "continuation_refused", "the engine of this cell cannot continue streams of other cells")


def deadline_passed() -> Refusal:
    return Refusal(504, "deadline_exceeded", "the request's deadline had passed before it was answered", is_final=True)


def deadline_unreachable(limit_s: float, ttft_p50_s: float) -> Refusal:
    message = f"the deadline is in {limit_s:g} s, and the first token currently takes {ttft_p50_s:.3g} s here"
    return Refusal(503, "deadline_unreachable", message, retry=True)


def proxy_failed() -> Refusal:
    message = "the cell's proxy failed while it handled this request; its log has the cause"
    return Refusal(500, "internal_error", message, is_final=True)


def stopping() -> Refusal:
    return Refusal(503, "cell_stopping", "the cell stopped before the request could finish", retry=True)


def body_too_large(limit_bytes: int) -> Refusal:
    return Refusal(413, "request_too_large", f"the request body is longer than the limit of {limit_bytes} bytes")


def head_too_large(limit_bytes: int) -> Refusal:
    return Refusal(431, "request_head_too_large", f"the request's head is longer than the limit of {limit_bytes} bytes")


def too_slow(part: str, limit_s: float) -> Refusal:
    return Refusal(408, "request_timeout", f"the {part} of the request did not arrive within {limit_s:g} s")


def bad_request(reason: str) -> Refusal:
    return Refusal(400, "bad_http_request", f"the request is not valid HTTP/1.1: {reason}")


def bad_body(reason: str) -> Refusal:
    return Refusal(400, "invalid_json", f"the request body is not JSON with one meaning: {reason}")


def bad_member(error: BadRequest) -> Refusal:
    return Refusal(error.status, error.code or "invalid_value", str(error), param=error.param)


def body_encoded() -> Refusal:
    message = "compressed request bodies are not supported; omit Content-Encoding"
    return Refusal(415, "unsupported_encoding", message)


def prompt_too_long(tokens: int, limit: int, param: str) -> Refusal:
    message = f"the prompt has {tokens} tokens, and this model takes prompts of at most {limit}"
    return Refusal(400, CONTEXT_LENGTH_EXCEEDED, message, param=param)


def prompt_not_counted(why: str, limit: int) -> Refusal:
    message = f"this model takes prompts of at most {limit} tokens, and this one's cannot be counted: {why}"
    return Refusal(400, "unsupported_parameter", message)


def needs_store(member: str) -> Refusal:
    message = (
        f"`{member}` needs a stored response, and this request bypassed the control plane, which stores them: put "
        "`model`, `store`, `background` and `previous_response_id` first in the body; `conversation` is not supported"
    )
    return Refusal(400, "unsupported_parameter", message, param=member)
