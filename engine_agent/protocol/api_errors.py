"""Errors in the forms that clients of OpenAI's and of Anthropic's API read. The ingress and the cell proxy use these
and no others, also for what engines say in another form. Pure.

Sources: OpenAI's `{"error": {"message", "type", "param", "code"}}` (openai-python, `_exceptions.py`), Anthropic's
`{"type": "error", "error": {"type", "message"}}` and its types by status (Anthropic's reference, "Errors"). An error in
Anthropic's form keeps `param` and `code`, which say what no type does.
"""

from typing import Final

from engine_agent.protocol.api_surface import ErrorForm

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
"""Of other statuses, see `anthropic_type`."""
OPENAI_TYPES: Final = frozenset(
    {"invalid_request_error", "server_error", "rate_limit_error", "authentication_error", "permission_error"}
    | {"insufficient_quota", "requests", "tokens"}
)
"""That clients of OpenAI's API know. Another one, of an engine, is replaced by that of the status."""
CONTEXT_LENGTH_EXCEEDED: Final = "context_length_exceeded"
"""Code of a prompt that is too long. Clients shorten their conversations by it."""


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
    """The JSON object of an error. `kind`: OpenAI's type of it, where it is not that of its status."""
    of_status = anthropic_type(status) if form is ErrorForm.ANTHROPIC else kind or openai_type(status)
    error = {"message": message, "type": of_status, "param": param, "code": code}
    return {"type": "error", "error": error} if form is ErrorForm.ANTHROPIC else {"error": error}
