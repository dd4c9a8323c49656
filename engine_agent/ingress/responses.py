"""Every error response that the ingress itself gives, in the form of OpenAI's errors or, on Anthropic's paths, of
theirs. Pure text; it never routes.

Which form it is, is decided once, at the entrance (`form_rules`); every text holds both, as expressions of two
variables.
HAProxy takes a body between single quotes, so no text here may hold one; in a `lf-string` body `%[…]` is an expression
of HAProxy's and a lone `%` would be an error.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from engine_agent.ingress import headers
from engine_agent.protocol.api_surface import (
    ANTHROPIC_PATHS,
    ANTHROPIC_TYPES,
    ErrorForm,
    anthropic_type,
    error_object,
    openai_type,
)
from engine_agent.protocol.states import ServingClass

JSON_CONTENT_TYPE: Final = "content-type application/json"
_OPEN = "%[var(txn.error_open)]"
"""How an error begins in Anthropic's form; nothing in OpenAI's."""
_ANTHROPIC_TYPES_VARIABLE = "proc.anthropic_types"
"""Where `refuse.lua` finds the types of Anthropic's errors by status."""


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """One error response. `retry_after_s`: the most that `Retry-After` says; 0: a retry cannot help."""

    status: int
    code: str
    message: str
    param: str | None = None
    retry_after_s: int = 0
    variant: str = ""
    """Distinguishes responses of one code."""
    kind: str = ""
    """OpenAI's `type` of the error, where it is not that of its status."""

    @property
    def name(self) -> str:
        return f"{self.code}{self.variant}"

    @property
    def body(self) -> str:
        """The JSON body as OpenAI's clients expect it; `refuse.lua` makes Anthropic's of it."""
        error = error_object(
            ErrorForm.OPENAI, self.status, self.message, code=self.code, param=self.param, kind=self.kind
        )
        return json.dumps(error, ensure_ascii=False, separators=(",", ":"))

    @property
    def either_body(self) -> str:
        """The same in whichever form the request's path has, for a `lf-string`."""
        own, either = (f'"type":"{kind}"' for kind in (openai_type(self.status), _either_type(self.status)))
        return f"{{{_OPEN}{self.body.removeprefix('{').replace(own, either, 1)}"


def _either_type(status: int) -> str:
    return f"%[var(txn.is_anthropic,0),iif({anthropic_type(status)},{openai_type(status)})]"


def form_rules() -> list[str]:
    """Note whose form of an error the client reads, before anything is refused. Unknown paths below Anthropic's have
    theirs."""
    return [
        f"acl is_anthropic path {' '.join(ANTHROPIC_PATHS)}",
        f"acl is_anthropic path_beg {' '.join(f'{path}/' for path in ANTHROPIC_PATHS)}",
        "http-request set-var(txn.is_anthropic) bool(true) if is_anthropic",
        """http-request set-var-fmt(txn.error_open) '"type":"error",' if is_anthropic""",
    ]


def retry_after(most_s: int) -> str:
    """An expression: from half of `most_s` to that, at random, so that clients refused together do not retry
    together. Longer waits would only make a storm of retries last longer (docs/bench/traffic.md)."""
    least_s = max(1, most_s // 2)
    return f"%[rand({most_s - least_s + 1}),add({least_s})]"


def return_rule(response: ErrorResponse, *more: tuple[str, str]) -> str:
    """The `http-request return …` rule that gives this response; expressions in the message are evaluated."""
    return f"http-request return status {response.status} {return_arguments(response, *more)}"


def return_arguments(response: ErrorResponse, *more: tuple[str, str]) -> str:
    """The type, body and headers of a response, as `return` rules take them."""
    return _with_headers(f"{JSON_CONTENT_TYPE} lf-string '{response.either_body}'", response, more)


def refuse_rule(response: ErrorResponse, condition: str) -> str:
    """The rule that gives this response after reading the rest of the body; it must be one of
    `refusal_service_lines`."""
    return f"http-request use-service lua.refuse_{response.name} if {condition}"


def refusal_service_lines(responses: Sequence[ErrorResponse]) -> list[str]:
    """Lines of the section `global`: a service for each of these responses, and its text."""
    texts = (f"{response.status} {response.retry_after_s} {response.body}" for response in responses)
    types = "".join(f"{status}={kind} " for status, kind in ANTHROPIC_TYPES.items())
    return [
        f"set-var-fmt {_ANTHROPIC_TYPES_VARIABLE} '{types}'",
        f"lua-load refuse.lua {' '.join(response.name for response in responses)}",
        *(f"set-var-fmt proc.refuse_{response.name} '{text}'" for response, text in zip(responses, texts, strict=True)),
    ]


def error_page_line(response: ErrorResponse) -> str:
    """The `http-error …` line that puts this response in place of HAProxy's own page of that status."""
    # What follows bytes that are not HTTP is not the next request, as behind the preface of HTTP/2.
    more = (("Connection", "close"),) if response.status == 400 else ()
    return _with_headers(
        f"http-error status {response.status} {JSON_CONTENT_TYPE} lf-string '{response.either_body}'", response, more
    )


def _with_headers(rule: str, response: ErrorResponse, more: tuple[tuple[str, str], ...]) -> str:
    if response.retry_after_s:
        more = (*more, ("Retry-After", retry_after(response.retry_after_s)))
    if response.status >= 500:
        more = (*more, (headers.ERROR, response.code))
    return rule + "".join(f" hdr {name} '{text}'" for name, text in more)


BAD_BODY_RULE: Final = (
    f"http-request return status 400 {JSON_CONTENT_TYPE} lf-string "
    f"""'{{{_OPEN}"error":{{"message":"%[var(txn.body_error),json(utf8s)]","type":"invalid_request_error","""
    """"param":%[var(txn.body_param)],"code":"%[var(txn.body_code)]"}}'"""
)
"""The response to a body that `read_body.lua` could not take a model from; the script wrote the variables."""

UNKNOWN_MODEL = ErrorResponse(
    404, "model_not_found", "The model `%[var(txn.model),json(utf8s)]` does not exist", "model"
)
UNKNOWN_URL = ErrorResponse(
    404, "unknown_url", "Unknown request URL: %[method] %[path,json(utf8s)]. Check the URL for typos"
)
NEAR_URL = ErrorResponse(
    404, "unknown_url", "Unknown request URL: %[method] %[path,json(utf8s)]. Did you mean %[var(txn.near)]?"
)
UNSUPPORTED_ENCODING = ErrorResponse(
    415, "unsupported_encoding", "a request body is taken as it is, not compressed: leave Content-Encoding out"
)
DOUBLED_HEADER = ErrorResponse(
    400,
    "doubled_header",
    "a header that decides about the request is there twice; send Authorization and X-... once each",
)
TWO_KEYS = ErrorResponse(
    400, "two_api_keys", "Authorization and x-api-key are both there and differ; send the key in one of them"
)


NO_READY_CELL_OF_DEPLOYMENT = ErrorResponse(
    503, "no_ready_cell", f"no cell is ready to serve `%[req.hdr({headers.DEPLOYMENT})]`; try again shortly"
)
"""As `no_ready_cell`, where the name that the application used is not known."""


BAD_CELL_ANSWER = ErrorResponse(
    502, "bad_cell_answer", "the cell closed the connection or sent a response that is not HTTP"
)


UNKNOWN_CLASS = ErrorResponse(
    400,
    "invalid_value",
    f"the header {headers.CLASS} must be one of {', '.join(ServingClass)}",
    headers.CLASS,
    variant="_of_class",
)


def too_large(max_body_bytes: int) -> ErrorResponse:
    message = f"the request body is longer than the limit of {max_body_bytes} bytes"
    return ErrorResponse(413, "request_too_large", message, variant=f"_{max_body_bytes}")


def no_table(retry_after_s: int) -> ErrorResponse:
    return ErrorResponse(
        503, "no_routing_table", "this ingress has no routing table yet; try again shortly", None, retry_after_s
    )


def no_ready_cell(retry_after_s: int) -> ErrorResponse:
    message = "no cell is ready to serve the model `%[var(txn.model),json(utf8s)]`; try again shortly"
    return ErrorResponse(503, "no_ready_cell", message, None, retry_after_s)


def queue_full(retry_after_s: int) -> ErrorResponse:
    return ErrorResponse(
        503, "queue_full", "too many requests wait for this model; try again shortly", None, retry_after_s
    )


def no_free_cell(retry_after_s: int) -> ErrorResponse:
    message = "no cell could take the request in time; try again shortly"
    return ErrorResponse(503, "no_free_cell", message, None, retry_after_s)


def head_too_large(max_head_bytes: int) -> ErrorResponse:
    return ErrorResponse(
        431,
        "request_head_too_large",
        f"the path, or the headers, are longer than the limit of {max_head_bytes} bytes, or too many",
    )


def body_parser_unavailable(retry_after_s: int) -> ErrorResponse:
    message = "large request bodies cannot be parsed at the moment; try again shortly"
    return ErrorResponse(503, "long_bodies_unread", message, None, retry_after_s)


def body_parser_error_pages(retry_after_s: int) -> tuple[ErrorResponse, ...]:
    """Answers in place of HAProxy's own pages where a body parser fails."""
    lost = "the ingress lost this request with a large body; try again"
    return (ErrorResponse(502, "long_body_lost", lost, None, retry_after_s), body_parser_unavailable(retry_after_s))


def haproxy_error_pages(retry_after_s: int) -> tuple[ErrorResponse, ...]:
    """Answers in place of HAProxy's own pages."""
    return (
        ErrorResponse(400, "bad_http_request", "the request is not valid HTTP"),
        ErrorResponse(403, "forbidden", "the request is forbidden"),
        ErrorResponse(408, "request_timeout", "the request did not arrive in time"),
        ErrorResponse(413, "request_too_large", "the request is too large"),
        ErrorResponse(500, "ingress_error", "the ingress failed"),
        ErrorResponse(501, "not_implemented", "the ingress does not know this method"),
        BAD_CELL_ANSWER,
        no_free_cell(retry_after_s),
        ErrorResponse(504, "cell_silent", "the cell did not answer in time"),
    )
