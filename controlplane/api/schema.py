"""Serves the OpenAPI document, completed with what all operations have in common: errors, and one spelling of paths."""

from http import HTTPStatus
from typing import Any

from drf_spectacular.views import SpectacularAPIView
from rest_framework.negotiation import DefaultContentNegotiation
from rest_framework.settings import APISettings

import controlplane.accounts.schema  # noqa: F401 - tells drf-spectacular of bearer tokens
from controlplane.api.problems import CONTENT_TYPE

JsonObject = dict[str, Any]
Endpoint = tuple[str, str, str, Any]

WRITES = frozenset({"post", "put", "patch", "delete"})

PROBLEM: JsonObject = {
    "type": "object",
    "description": "What was wrong, as RFC 9457 says it.",
    "required": ["type", "title", "status", "detail", "instance"],
    "additionalProperties": False,
    "properties": {
        "type": {"type": "string", "format": "uri-reference", "description": "Always `about:blank`: `title` says it."},
        "title": {"type": "string", "description": "The HTTP status in words."},
        "status": {"type": "integer", "minimum": 400, "maximum": 599},
        "detail": {"type": "string", "description": "What was wrong this time, for people."},
        "instance": {"type": "string", "format": "uri-reference", "description": "The path that was asked for."},
        "errors": {
            "type": "array",
            "description": "With status 400: each value that breaks a rule.",
            "items": {
                "type": "object",
                "required": ["field", "rule", "message"],
                "additionalProperties": False,
                "properties": {
                    "field": {"type": "string", "description": "Parameter, or dotted path in the body; or empty."},
                    "rule": {"type": "string", "description": "Short name of the rule, for programs."},
                    "message": {"type": "string", "description": "What would be right, for people."},
                },
            },
        },
    },
}

UNKNOWN_PARAMETER = {
    "field": "stat",
    "rule": "unknown_parameter",
    "message": "unknown parameter; allowed: region, state, cursor, page_size",
}
WHEN: dict[HTTPStatus, tuple[str, str]] = {
    HTTPStatus.BAD_REQUEST: ("A parameter or the body breaks a rule; nothing was changed.", "Not accepted: stat."),
    HTTPStatus.UNAUTHORIZED: ("No valid token or session.", "Authentication credentials were not provided."),
    HTTPStatus.FORBIDDEN: ("A session without its CSRF token.", "CSRF Failed: CSRF token missing."),
    HTTPStatus.NOT_FOUND: ("There is no such thing.", "there is no cell 'sim-70b-us-east-1-9'"),
    HTTPStatus.NOT_ACCEPTABLE: ("`Accept` excludes JSON.", "Could not satisfy the request Accept header."),
    HTTPStatus.CONFLICT: (
        "Does not fit the state that the thing is in.",
        "cell sim-70b-us-east-1-1 is starting; drain needs a cell that is ready",
    ),
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: ("The body is too large.", "The body may have at most 262144 bytes."),
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: ("The body is not JSON.", 'Unsupported media type "text/plain" in request.'),
}


class _FormatInQuery(DefaultContentNegotiation):
    settings = APISettings({"URL_FORMAT_OVERRIDE": "format"})  # type: ignore[assignment] # the same class


class Schema(SpectacularAPIView):
    """YAML by default; JSON by `Accept: application/vnd.oai.openapi+json` or `?format=json`."""

    content_negotiation_class = _FormatInQuery


def one_spelling(endpoints: list[Endpoint]) -> list[Endpoint]:
    """Preprocessing hook: paths answer with and without a final slash; the document shows them without."""
    return [(path.rstrip("/"), regex, method, view) for path, regex, method, view in endpoints]


def with_problems(result: JsonObject, generator: Any, request: Any, public: bool) -> JsonObject:
    """Postprocessing hook: gives every operation the errors that it can answer."""
    components = result.setdefault("components", {})
    for name, schema in components.setdefault("schemas", {}).items():
        _complete(name, schema)
    components["schemas"]["Problem"] = PROBLEM
    components["responses"] = {_name(status): _response(status) for status in WHEN}
    for path, operations in result["paths"].items():
        for method, operation in operations.items():
            operation["responses"]["200"]["description"] = "Done."
            for parameter in operation.get("parameters", ()):
                _refuse_empty(parameter)
            for status in _statuses(path, method):
                operation["responses"][str(status.value)] = {"$ref": f"#/components/responses/{_name(status)}"}
    return result


def _complete(name: str, schema: JsonObject) -> None:
    """Answers always carry all of their fields; requests are refused if they carry others."""
    if name.endswith("Request"):
        schema["additionalProperties"] = False
    elif "properties" in schema:
        schema["required"] = sorted(schema["properties"])


def _refuse_empty(parameter: JsonObject) -> None:
    """As `controlplane.api.filters` does: a parameter without a value must not look like an unfiltered list."""
    if parameter["in"] == "query" and parameter["schema"] == {"type": "string"}:
        parameter["schema"] = {"type": "string", "pattern": r"^[^\u0000]+$"}


def _statuses(path: str, method: str) -> list[HTTPStatus]:
    statuses = [HTTPStatus.BAD_REQUEST, HTTPStatus.UNAUTHORIZED, HTTPStatus.NOT_ACCEPTABLE]
    if "{" in path:
        statuses.append(HTTPStatus.NOT_FOUND)
    if method in WRITES:
        statuses += [
            HTTPStatus.FORBIDDEN,
            HTTPStatus.CONFLICT,
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        ]
    return sorted(statuses)


def _name(status: HTTPStatus) -> str:
    return status.phrase.title().replace(" ", "")


def _response(status: HTTPStatus) -> JsonObject:
    description, detail = WHEN[status]
    example: JsonObject = {
        "type": "about:blank",
        "title": status.phrase,
        "status": status.value,
        "detail": detail,
        "instance": "/api/v1/cells",
    }
    if status is HTTPStatus.BAD_REQUEST:
        example["errors"] = [UNKNOWN_PARAMETER]
    schema = {"$ref": "#/components/schemas/Problem"}
    return {"description": description, "content": {CONTENT_TYPE: {"schema": schema, "example": example}}}
