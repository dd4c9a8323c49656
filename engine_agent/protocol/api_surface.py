"""The API of applications: one row for each path, and the form of errors. The ingress serves only these paths, the cell
proxy counts tokens by them, and docs/api-applications.md is generated from them. Pure.

Paths must match byte by byte. Another spelling (an escape, a doubled slash, a trailing slash, other case) is an unknown
path, because the ingress, the cell proxy and the engine could each normalize it differently. Paths that serve GET also
serve HEAD.

Errors have the form of OpenAI's or Anthropic's API, also where an engine answers in another form. In Anthropic's form
they keep `param` and `code`, which its types do not express.

Sources: OpenAI's reference and openai-python's `_exceptions.py`, Anthropic's reference, and the routes of vLLM 0.32
(`vllm/entrypoints/**/api_router.py`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class AnsweredBy(StrEnum):
    CELL = "cell"
    INGRESS = "ingress"
    CONTROL_PLANE = "control plane"


class Counting(StrEnum):
    """Where an engine reports the tokens of a request."""

    STREAM_OPTIONS = "`usage`; in streams requested by the proxy with `stream_options`"
    RESPONSE_USAGE = "`usage` of the response object; in streams of the last event"
    MESSAGE_USAGE = "`usage` of the message; in streams of `message_start` and `message_delta`"
    PROMPT_USAGE = "`usage`: only prompt tokens"
    NOTHING = "nothing is counted"


class ErrorForm(StrEnum):
    """The API whose error format clients of a path expect."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"


@dataclass(frozen=True, slots=True)
class ApiPath:
    """One path. `{…}` stands for one segment, `{model}` for a name that may contain slashes. `has_model`: its body
    names the model, which selects the route. `has_priority`: engines read `priority` from its body. `engines`: those
    that serve it if their model can."""

    path: str
    methods: tuple[str, ...]
    what: str
    answered_by: AnsweredBy = AnsweredBy.CELL
    counting: Counting = Counting.NOTHING
    has_model: bool = True
    has_priority: bool = False
    streams: bool = False
    engines: tuple[str, ...] = ("vllm", "sim")
    errors: ErrorForm = ErrorForm.OPENAI


def _inference(path: str, what: str, counting: Counting, *, streams: bool = False, **more: object) -> ApiPath:
    has_priority = counting is not Counting.NOTHING and counting is not Counting.MESSAGE_USAGE
    return ApiPath(path, ("POST",), what, counting=counting, streams=streams, has_priority=has_priority, **more)  # type: ignore[arg-type]


def _control_plane_path(path: str, methods: tuple[str, ...], what: str) -> ApiPath:
    """A path that the control plane answers. Its requests to cells are counted like all others."""
    return ApiPath(path, methods, what, AnsweredBy.CONTROL_PLANE, has_model=False)


API_PATHS: Final[tuple[ApiPath, ...]] = (
    _inference("/v1/chat/completions", "chat", Counting.STREAM_OPTIONS, streams=True),
    _inference("/v1/completions", "completions", Counting.STREAM_OPTIONS, streams=True),
    _inference(
        "/v1/responses", "responses; the control plane answers stored ones", Counting.RESPONSE_USAGE, streams=True
    ),
    ApiPath(
        "/v1/responses/{id}",
        ("GET", "DELETE"),
        "a stored response",
        AnsweredBy.CONTROL_PLANE,
        has_model=False,
    ),
    ApiPath(
        "/v1/responses/{id}/cancel",
        ("POST",),
        "cancel a background response",
        AnsweredBy.CONTROL_PLANE,
        has_model=False,
    ),
    ApiPath("/v1/responses/{id}/input_items", ("GET",), "its input items", AnsweredBy.CONTROL_PLANE, has_model=False),
    _inference(
        "/v1/messages", "Anthropic's messages", Counting.MESSAGE_USAGE, streams=True, errors=ErrorForm.ANTHROPIC
    ),
    _inference("/v1/messages/count_tokens", "tokens of a message", Counting.NOTHING, errors=ErrorForm.ANTHROPIC),
    _inference("/v1/embeddings", "embeddings", Counting.PROMPT_USAGE),
    *(
        _inference(path, "scores of pairs", Counting.PROMPT_USAGE, engines=("vllm",))
        for path in ("/v1/score", "/score")
    ),
    *(
        _inference(path, "documents by relevance", Counting.PROMPT_USAGE)
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    ),
    _inference("/pooling", "pooled hidden states", Counting.PROMPT_USAGE, engines=("vllm",)),
    _inference("/classify", "classes of texts", Counting.PROMPT_USAGE, engines=("vllm",)),
    _inference("/tokenize", "a text as tokens", Counting.NOTHING),
    _inference("/detokenize", "tokens as a text", Counting.NOTHING),
    ApiPath("/v1/models", ("GET",), "the models that the key may use", AnsweredBy.INGRESS, has_model=False),
    ApiPath("/v1/models/{model}", ("GET",), "one model", AnsweredBy.INGRESS, has_model=False),
    *(
        ApiPath(
            path,
            ("GET",),
            "whether this ingress serves; with ?model=: whether a cell here serves it",
            AnsweredBy.INGRESS,
            has_model=False,
        )
        for path in ("/health", "/healthz")
    ),
    ApiPath("/version", ("GET",), "the version of Switchyard", AnsweredBy.INGRESS, has_model=False),
    _control_plane_path("/v1/async/chat/completions", ("POST",), "chat, answered later"),
    _control_plane_path("/v1/async/completions", ("POST",), "completions, answered later"),
    _control_plane_path("/v1/async/{id}", ("GET", "DELETE"), "state of such a request; cancel it"),
    _control_plane_path("/v1/files", ("GET", "POST"), "list the tenant's files; upload one as a form"),
    _control_plane_path("/v1/files/{id}", ("GET", "DELETE"), "a file; delete it"),
    _control_plane_path("/v1/files/{id}/content", ("GET",), "content of a file"),
    _control_plane_path("/v1/batches", ("GET", "POST"), "list the tenant's batches; start one from a file"),
    _control_plane_path("/v1/batches/{id}", ("GET",), "state of a batch"),
    _control_plane_path("/v1/batches/{id}/cancel", ("POST",), "cancel a batch; finished answers stay"),
    _control_plane_path("/v1/usage", ("GET",), "usage of the key's tenant"),
    _control_plane_path("/v1/usage/errors", ("GET",), "failed requests of the key, by request id"),
)
"""In the order of the documentation page."""
CELL_PATHS: Final[Mapping[str, ApiPath]] = {row.path: row for row in API_PATHS if row.answered_by is AnsweredBy.CELL}
"""Paths that engines answer. None of them has a variable part."""
ANTHROPIC_PATHS: Final = tuple(row.path for row in API_PATHS if row.errors is ErrorForm.ANTHROPIC)
SERVICE_TIERS: Final = ("auto", "default", "flex", "priority", "scale", "standard_only")
"""Values of `service_tier` in a request, with Anthropic's `standard_only`. `flex` is served as the least urgent class,
`priority` as the most urgent one or not at all; the others change nothing."""
LOADING_PATHS: Final = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
LOADING_REFUSED: Final = (
    "adapters belong to a model version and are loaded with its cells: an adapter loaded by a request would be on one"
    " cell, for all its users, and lost at its next start"
)
"""Why the ingress rejects these for every client (docs/design/models.md#lora-adapters)."""


ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""For other statuses see `anthropic_type`."""
OPENAI_TYPES: Final = frozenset(
    {"invalid_request_error", "server_error", "rate_limit_error", "authentication_error", "permission_error"}
    | {"insufficient_quota", "requests", "tokens"}
)
"""Types that clients of OpenAI's API know. Other types of engines are replaced by the type of the status."""
CONTEXT_LENGTH_EXCEEDED: Final = "context_length_exceeded"
"""Code of a prompt that is too long. Clients shorten their conversations when they get it."""


def openai_type(status: int) -> str:
    return "server_error" if status >= 500 else "invalid_request_error"


def anthropic_type(status: int) -> str:
    return ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else ANTHROPIC_TYPES[400])


def error_object(
    form: ErrorForm,
    status: int,
    message: str,
    *,
    code: str | None = None,
    param: str | None = None,
    kind: str | None = None,
) -> dict[str, object]:
    type_ = anthropic_type(status) if form is ErrorForm.ANTHROPIC else kind or openai_type(status)
    error = {"message": message, "type": type_, "param": param, "code": code}
    return {"type": "error", "error": error} if form is ErrorForm.ANTHROPIC else {"error": error}
