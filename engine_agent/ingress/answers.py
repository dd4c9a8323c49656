"""Every answer that the ingress gives by itself, in the form of OpenAI's errors. Pure text; it never routes.

HAProxy takes a body between single quotes, so no text here may hold one; in a `lf-string` body `%[…]` is an expression
of HAProxy's and a lone `%` would be an error.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from engine_agent.ingress import headers

JSON_TYPE: Final = "content-type application/json"


@dataclass(frozen=True, slots=True)
class Answer:
    """One error answer. `retry_after_s`: when to ask again, at the latest; 0: asking again cannot help."""

    status: int
    code: str
    message: str
    param: str | None = None
    retry_after_s: int = 0
    variant: str = ""
    """Tells answers of one code apart."""

    @property
    def name(self) -> str:
        """Of the service that gives it."""
        return f"{self.code}{self.variant}"

    @property
    def body(self) -> str:
        """The JSON body as OpenAI clients expect it."""
        kind = "server_error" if self.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
        return json.dumps(
            {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}},
            ensure_ascii=False,
            separators=(",", ":"),
        )


def retry_after(most_s: int) -> str:
    """An expression: from half of `most_s` to that, at random, so that those who were refused together do not come back
    together. Longer waits would only make a storm of retries last longer (docs/bench/traffic.md)."""
    least_s = max(1, most_s // 2)
    return f"%[rand({most_s - least_s + 1}),add({least_s})]"


def returned(answer: Answer, *more: tuple[str, str]) -> str:
    """The `http-request return …` rule that gives this answer; expressions in the message are evaluated."""
    return f"http-request return status {answer.status} {body_of(answer, *more)}"


def body_of(answer: Answer, *more: tuple[str, str]) -> str:
    """The type, body and headers of an answer, as `return` rules take them."""
    return _with_headers(f"{JSON_TYPE} lf-string '{answer.body}'", answer, more)


def refused(answer: Answer, condition: str) -> str:
    """The rule that gives this answer after reading the rest of the body; `refusal_lines` must know the answer."""
    return f"http-request use-service lua.refuse_{answer.name} if {condition}"


def refusal_lines(answers: Sequence[Answer]) -> list[str]:
    """Lines of the section `global`: a service for each of these answers, and what it says."""
    said = (f"{answer.status} {answer.retry_after_s} {answer.body}" for answer in answers)
    return [
        f"lua-load refuse.lua {' '.join(answer.name for answer in answers)}",
        *(f"set-var-fmt proc.refuse_{answer.name} '{text}'" for answer, text in zip(answers, said, strict=True)),
    ]


def substituted(answer: Answer) -> str:
    """The `http-error …` line that puts this answer in place of HAProxy's own page of that status."""
    return _with_headers(f"http-error status {answer.status} {JSON_TYPE} string '{answer.body}'", answer, ())


def _with_headers(rule: str, answer: Answer, more: tuple[tuple[str, str], ...]) -> str:
    if answer.retry_after_s:
        more = (*more, ("Retry-After", retry_after(answer.retry_after_s)))
    return rule + "".join(f" hdr {name} '{text}'" for name, text in more)


BAD_BODY_RULE: Final = (
    f"http-request return status 400 {JSON_TYPE} lf-string "
    """'{"error":{"message":"%[var(txn.body_error),json(utf8s)]","type":"invalid_request_error","""
    """"param":%[var(txn.body_param)],"code":"%[var(txn.body_code)]"}}'"""
)
"""The answer to a body that `read_body.lua` could not take a model from; the script wrote the variables."""

UNKNOWN_MODEL = Answer(404, "model_not_found", "The model `%[var(txn.model),json(utf8s)]` does not exist", "model")
UNKNOWN_URL = Answer(
    404, "unknown_url", "Unknown request URL: %[method] %[path,json(utf8s)]. Did you mean /v1/chat/completions?"
)
ONLY_POST = Answer(405, "method_not_allowed", "%[method] is not allowed on %[path,json(utf8s)]; use POST")
ONLY_GET = Answer(405, "method_not_allowed", "%[method] is not allowed on %[path,json(utf8s)]; use GET")


NO_READY_CELL_HERE = Answer(
    503, "no_ready_cell", f"no cell is ready to serve `%[req.hdr({headers.DEPLOYMENT})]`; try again shortly"
)
"""As `no_ready_cell`, where the name that the application used is not known."""


def too_large(max_body_bytes: int) -> Answer:
    message = f"the request body is longer than the limit of {max_body_bytes} bytes"
    return Answer(413, "request_too_large", message, variant=f"_{max_body_bytes}")


def no_table(retry_after_s: int) -> Answer:
    return Answer(503, "no_routing_table", "this ingress has not been told its routes yet", None, retry_after_s)


def no_ready_cell(retry_after_s: int) -> Answer:
    message = "no cell is ready to serve the model `%[var(txn.model),json(utf8s)]`; try again shortly"
    return Answer(503, "no_ready_cell", message, None, retry_after_s)


def queue_full(retry_after_s: int) -> Answer:
    return Answer(503, "queue_full", "too many requests wait for this model; try again shortly", None, retry_after_s)


def head_too_large(max_head_bytes: int) -> Answer:
    return Answer(
        431, "request_head_too_large", f"path and headers are longer than the limit of {max_head_bytes} bytes"
    )


def long_bodies_unread(retry_after_s: int) -> Answer:
    message = "the ingress cannot read requests with long bodies now; try again shortly"
    return Answer(503, "long_bodies_unread", message, None, retry_after_s)


def reader_own(retry_after_s: int) -> tuple[Answer, ...]:
    """Answers in place of HAProxy's own pages where a reader of long bodies fails."""
    lost = "the ingress lost this request with a long body; try again"
    return (Answer(502, "long_body_lost", lost, None, retry_after_s), long_bodies_unread(retry_after_s))


def haproxy_own(retry_after_s: int) -> tuple[Answer, ...]:
    """Answers in place of HAProxy's own pages."""
    return (
        Answer(400, "bad_http_request", "the request is not valid HTTP"),
        Answer(403, "forbidden", "the request is forbidden"),
        Answer(408, "request_timeout", "the request did not arrive in time"),
        Answer(413, "request_too_large", "the request is too large"),
        Answer(500, "ingress_error", "the ingress failed"),
        Answer(501, "not_implemented", "the ingress does not know this method"),
        Answer(502, "bad_cell_answer", "the cell closed the connection or sent an answer that is not HTTP"),
        Answer(503, "no_free_cell", "no cell could take the request in time; try again shortly", None, retry_after_s),
        Answer(504, "cell_silent", "the cell did not answer in time"),
    )
