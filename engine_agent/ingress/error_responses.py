"""Error responses of the ingress itself, in OpenAI's form or, on Anthropic's paths, in Anthropic's. `haproxy.cfg.j2`
decides when each is given. Every body contains both forms, as expressions of two variables that are set at the
entrance. HAProxy takes a body between single quotes, so no text may contain one. `%[…]` is an expression of HAProxy,
and a lone `%` is an error."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Final

from engine_agent.ingress import headers
from engine_agent.protocol.api_surface import (
    ANTHROPIC_TYPES,
    LOADING_REFUSED,
    SERVICE_TIERS,
    ErrorForm,
    anthropic_type,
    error_object,
    openai_type,
)
from engine_agent.protocol.ingress_messages import Withheld
from engine_agent.protocol.states import ServingClass

JSON_CONTENT_TYPE: Final = "content-type application/json"
_OPEN = "%[var(txn.error_open)]"
"""The beginning of an error in Anthropic's form, and empty in OpenAI's."""
ANTHROPIC_TYPES_TEXT = "".join(f"{status}={kind} " for status, kind in ANTHROPIC_TYPES.items())
"""For `refuse.lua`, which turns OpenAI's form into Anthropic's."""
BAD_BODY_RULE: Final = (
    f"http-request return status 400 {JSON_CONTENT_TYPE} hdr {headers.ERROR} '%[var(txn.body_code)]' lf-string "
    f"""'{{{_OPEN}"error":{{"message":"%[var(txn.body_error),json(utf8s)]","type":"invalid_request_error","""
    """"param":%[var(txn.body_param)],"code":"%[var(txn.body_code)]"}}'"""
)
"""For a body that `read_body.lua` or `body_shape.lua` refused; the script sets the variables."""


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """One error response. `retry_after_s`: upper bound of `Retry-After`, 0 if a retry cannot help."""

    status: int
    code: str
    message: str
    param: str | None = None
    retry_after_s: int = 0
    variant: str = ""
    """Distinguishes responses of one code."""
    kind: str = ""
    """OpenAI's `type` of the error, if it differs from that of its status."""
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        return f"{self.code}{self.variant}"

    @property
    def body(self) -> str:
        error = error_object(
            ErrorForm.OPENAI, self.status, self.message, code=self.code, param=self.param, kind=self.kind
        )
        return json.dumps(error, ensure_ascii=False, separators=(",", ":"))

    @property
    def arguments(self) -> str:
        own, either = (f'"type":"{kind}"' for kind in (openai_type(self.status), _type_of_either_form(self.status)))
        body = f"{{{_OPEN}{self.body.removeprefix('{').replace(own, either, 1)}"
        more = self.headers
        if self.retry_after_s:
            more = (*more, ("Retry-After", retry_after(self.retry_after_s)))
        more = (*more, (headers.ERROR, self.code))
        return f"{JSON_CONTENT_TYPE} lf-string '{body}'" + "".join(f" hdr {name} '{text}'" for name, text in more)


def _type_of_either_form(status: int) -> str:
    return f"%[var(txn.is_anthropic,0),iif({anthropic_type(status)},{openai_type(status)})]"


def retry_after(most_s: int) -> str:
    """An expression: a random number from half of `most_s` to `most_s`, so that clients do not retry together. Longer
    waits would only make a storm of retries last longer (docs/bench/traffic.md)."""
    least_s = max(1, most_s // 2)
    return f"%[rand({most_s - least_s + 1}),add({least_s})]"


def answer(error: ErrorResponse) -> str:
    """A rule that returns this response. Expressions in its message are evaluated."""
    return f"http-request return status {error.status} {error.arguments}"


def refuse(error: ErrorResponse) -> str:
    """A rule that reads the rest of the body and then returns this response."""
    return f"http-request use-service lua.refuse_{error.name}"


def error_page(error: ErrorResponse) -> str:
    """A line that replaces HAProxy's own page of this status."""
    # The bytes after an invalid request are no next request, for example after the preface of HTTP/2.
    close = " hdr Connection 'close'" if error.status == 400 else ""
    return f"http-error status {error.status} {error.arguments}{close}"


def wrong_method(methods: Sequence[str]) -> ErrorResponse:
    message = f"%[method] is not allowed on %[path,json(utf8s)]; use {' or '.join(methods)}"
    return ErrorResponse(405, "method_not_allowed", message, headers=(("Allow", ", ".join(methods)),))


WITHHELD_TEXTS: Mapping[Withheld, str] = {
    Withheld.QUOTA: "the quota of its team allows none now",
    Withheld.MACHINES: "deployments with a higher priority need the machines now",
}
"""For clients. The page of the deployment names the quota and the other deployments."""


def _without_cell(code: str, text: str) -> ErrorResponse:
    message = f"no cell serves `%[req.hdr({headers.DEPLOYMENT})]`, and {text}; try again after Retry-After"
    return ErrorResponse(503, code, message)


def _too_large(max_body_bytes: int) -> ErrorResponse:
    message = f"the request body is longer than the limit of {max_body_bytes} bytes"
    return ErrorResponse(413, "request_too_large", message, variant=f"_{max_body_bytes}")


def error_responses(
    *,
    retry_after_s: int,
    max_body_bytes: int,
    max_head_bytes: int,
    stored_body_bytes: int,
    file_bytes: int,
    tls_port: int,
) -> SimpleNamespace:
    body_parser_away = ErrorResponse(
        503,
        "long_bodies_unread",
        "large request bodies cannot be parsed at the moment; try again shortly",
        None,
        retry_after_s,
    )
    bad_cell_answer = ErrorResponse(
        502, "bad_cell_answer", "the cell closed the connection or sent a response that is not HTTP"
    )
    no_free_cell = ErrorResponse(
        503, "no_free_cell", "no cell could take the request in time; try again shortly", None, retry_after_s
    )
    queue_full = "too many requests are waiting for this model; try again shortly"
    return SimpleNamespace(
        wrong_method=wrong_method,
        # The client.
        doubled_header=ErrorResponse(
            400,
            "doubled_header",
            "a header that may occur only once was sent twice; send Authorization and each X-... header once",
        ),
        unknown_class=ErrorResponse(
            400,
            "invalid_value",
            f"the header {headers.CLASS} must be one of {', '.join(ServingClass)}",
            headers.CLASS,
            variant="_of_class",
        ),
        two_keys=ErrorResponse(
            400, "two_api_keys", "Authorization and x-api-key have different keys; send the key in one of them"
        ),
        missing_key=ErrorResponse(
            401,
            "missing_api_key",
            "You did not provide an API key: send it as `Authorization: Bearer sw_...` or `x-api-key: sw_...`",
        ),
        invalid_key=ErrorResponse(401, "invalid_api_key", "Incorrect API key provided: it is unknown, or was revoked"),
        expired_key=ErrorResponse(401, "expired_api_key", "This API key has expired; request a new one"),
        over_quota=ErrorResponse(
            429,
            "insufficient_quota",
            "You exceeded your current quota: the budget of this month is used up; "
            "request a higher one, or wait for the next month",
            kind="insufficient_quota",
        ),
        tls_required=ErrorResponse(
            403, "tls_required", f"this ingress serves your address over TLS only: use https and port {tls_port}"
        ),
        forged_mark=ErrorResponse(403, "forged_mark", "the hop mark was signed for a request with another body"),
        # The head and the body.
        head_too_large=ErrorResponse(
            431,
            "request_head_too_large",
            f"the path or the headers exceed the limit of {max_head_bytes} bytes, or there are too many headers",
        ),
        unsupported_encoding=ErrorResponse(
            415, "unsupported_encoding", "compressed request bodies are not supported; omit Content-Encoding"
        ),
        body_too_large=_too_large(max_body_bytes),
        stored_body_too_large=_too_large(stored_body_bytes),
        file_too_large=_too_large(file_bytes),
        too_many_bad_bodies=ErrorResponse(
            429,
            "rate_limit_exceeded",
            "too many invalid request bodies from this address; try again in a few seconds",
            None,
            10,
        ),
        body_parser_away=body_parser_away,
        body_parser_pages=(
            ErrorResponse(
                502,
                "long_body_lost",
                "the ingress lost this request with a large body; try again",
                None,
                retry_after_s,
            ),
            body_parser_away,
        ),
        # The path and the model.
        unknown_model=ErrorResponse(
            404, "model_not_found", "The model `%[var(txn.model),json(utf8s)]` does not exist", "model"
        ),
        model_not_allowed=ErrorResponse(
            403, "model_not_allowed", "This API key does not include the model `%[var(txn.model),json(utf8s)]`", "model"
        ),
        unknown_tier=ErrorResponse(
            400,
            "invalid_value",
            f"`service_tier` must be one of {', '.join(SERVICE_TIERS)}",
            "service_tier",
            variant="_of_tier",
        ),
        tier_not_allowed=ErrorResponse(
            403,
            "service_tier_not_allowed",
            "The service tier `priority` is not allowed for this request: its API key, its deployment or its class "
            "header states a less urgent class",
            "service_tier",
        ),
        adapters_by_version=ErrorResponse(
            403,
            "adapters_by_version",
            f"{LOADING_REFUSED}; ask the operator for a version that includes yours, and name the adapter as `model`",
        ),
        unknown_url=ErrorResponse(
            404, "unknown_url", "Unknown request URL: %[method] %[path,json(utf8s)]. Check the URL for typos"
        ),
        near_url=ErrorResponse(
            404, "unknown_url", "Unknown request URL: %[method] %[path,json(utf8s)]. Did you mean %[var(txn.near)]?"
        ),
        # Cells.
        no_table=ErrorResponse(
            503, "no_routing_table", "this ingress has no routing table yet; try again shortly", None, retry_after_s
        ),
        no_ready_cell=ErrorResponse(
            503,
            "no_ready_cell",
            "no cell is ready to serve the model `%[var(txn.model),json(utf8s)]`; try again shortly",
            None,
            retry_after_s,
        ),
        # The same where the model's name is not known.
        no_ready_cell_of_deployment=ErrorResponse(
            503, "no_ready_cell", f"no cell is ready to serve `%[req.hdr({headers.DEPLOYMENT})]`; try again shortly"
        ),
        no_free_cell=no_free_cell,
        bad_cell_answer=bad_cell_answer,
        queue_full=ErrorResponse(503, "queue_full", queue_full, None, retry_after_s),
        overflow_refused=ErrorResponse(
            503, "queue_full", queue_full, None, retry_after_s, headers=((headers.UNSERVED, "1"),)
        ),
        # Requests on hold.
        too_many_held=_without_cell("too_many_held", "too many requests are waiting for its first cell"),
        no_cell_in_time=_without_cell("no_cell_in_time", "its first cell was not ready in time"),
        deadline_before_cell=_without_cell("deadline_before_cell", "its first cell is expected after the deadline"),
        batch_not_held=_without_cell("no_ready_cell", "batch requests do not wait for its first cell"),
        withheld={reason: _without_cell("cell_withheld", text) for reason, text in WITHHELD_TEXTS.items()},
        # The control plane.
        control_plane_away=ErrorResponse(
            503,
            "control_plane_away",
            "the control plane cannot be reached; try again shortly",
            None,
            retry_after_s,
        ),
        too_many_at_once=ErrorResponse(
            429,
            "rate_limit_exceeded",
            "your requests in flight use your share of the connections to the control plane; "
            "try again when one has finished",
            None,
            10,
            variant="_of_places",
        ),
        # In place of HAProxy's own pages.
        haproxy_pages=(
            ErrorResponse(400, "bad_http_request", "the request is not valid HTTP"),
            ErrorResponse(403, "forbidden", "the request is forbidden"),
            ErrorResponse(408, "request_timeout", "the request did not arrive in time"),
            ErrorResponse(413, "request_too_large", "the request is too large"),
            ErrorResponse(500, "ingress_error", "the ingress failed"),
            ErrorResponse(501, "not_implemented", "the ingress does not support this method"),
            bad_cell_answer,
            no_free_cell,
            ErrorResponse(504, "cell_silent", "the cell did not answer in time"),
        ),
    )
