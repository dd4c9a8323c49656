"""Serves the OpenAPI document, with the errors that all operations share and one spelling of paths."""

from functools import cache
from http import HTTPStatus
from typing import Any

from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.views import SpectacularAPIView, SpectacularSwaggerSplitView
from rest_framework.negotiation import DefaultContentNegotiation
from rest_framework.settings import APISettings

from controlplane.api.auto_schema import ETAG, RATE_HEADERS, described_header
from controlplane.api.problems import CONTENT_TYPE
from kernel.rest import idempotency
from kernel.rest.changes import BEGINNING, FORM

JsonObject = dict[str, Any]
Endpoint = tuple[str, str, str, Any]

WRITES = frozenset({"post", "put", "patch", "delete"})

PROBLEM: JsonObject = {
    "type": "object",
    "description": "The error, as in RFC 9457.",
    "required": ["type", "title", "status", "detail", "instance"],
    "additionalProperties": False,
    "properties": {
        "type": {"type": "string", "format": "uri-reference", "description": "Always `about:blank`: see `title`."},
        "title": {"type": "string", "description": "Name of the HTTP status."},
        "status": {"type": "integer", "minimum": 400, "maximum": 599},
        "detail": {"type": "string", "description": "The specific error, for people."},
        "instance": {"type": "string", "format": "uri-reference", "description": "The requested path."},
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
                    "message": {"type": "string", "description": "The expected value, for people."},
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
    HTTPStatus.FORBIDDEN: (
        (
            "Your role or the scope of your token does not allow it, or the request used a session without its "
            "CSRF token."
        ),
        "Needs the operator role; you have viewer.",
    ),
    HTTPStatus.NOT_FOUND: ("The object does not exist.", "there is no cell 'sim-70b-us-east-1-9'"),
    HTTPStatus.NOT_ACCEPTABLE: ("`Accept` excludes JSON.", "Could not satisfy the request Accept header."),
    HTTPStatus.CONFLICT: (
        "It conflicts with the object's current state.",
        "cell sim-70b-us-east-1-1 is starting; drain needs a cell that is ready",
    ),
    HTTPStatus.GONE: (
        "Changes since that revision are no longer stored; read the list again.",
        "what changed since r700-702-700 is no longer known; begin again with r0",
    ),
    HTTPStatus.PRECONDITION_FAILED: (
        "The object has changed since you read it; `ETag` is the current one.",
        'it has changed since; it is "0f1e2d3c4b5a69788796-a1b2c3d4e5f60718293a" now',
    ),
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: ("The body is too large.", "The body may have at most 262144 bytes."),
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: ("The body is not JSON.", 'Unsupported media type "text/plain" in request.'),
    HTTPStatus.UNPROCESSABLE_ENTITY: (
        "The `Idempotency-Key` was used for another request.",
        "this Idempotency-Key was used for another request; every request needs its own",
    ),
    HTTPStatus.PRECONDITION_REQUIRED: (
        "`If-Match` is required.",
        "this needs If-Match with the ETag of the object that you read, or `*`",
    ),
    HTTPStatus.TOO_MANY_REQUESTS: (
        "Too many requests in this minute; `Retry-After` is the time until the next one.",
        "Request was throttled. Expected available in 12 seconds.",
    ),
}


_HEADERS_OF: dict[HTTPStatus, JsonObject] = {
    HTTPStatus.PRECONDITION_FAILED: ETAG,
    HTTPStatus.TOO_MANY_REQUESTS: {"Retry-After": described_header("Seconds.", "integer")},
}


class _FormatInQuery(DefaultContentNegotiation):
    settings = APISettings({"URL_FORMAT_OVERRIDE": "format"})  # type: ignore[assignment] # the same class


@cache
def api_document() -> JsonObject:
    """The OpenAPI document, equal for all users. Built once per process, because it takes a second."""
    return dict(SchemaGenerator().get_schema(request=None, public=True))  # type: ignore[no-untyped-call]


class _MadeOnce(SchemaGenerator):
    def get_schema(self, request: Any = None, public: bool = False) -> JsonObject:
        return api_document()


class Schema(SpectacularAPIView):
    """YAML by default; JSON with `Accept: application/vnd.oai.openapi+json` or `?format=json`."""

    generator_class = _MadeOnce
    content_negotiation_class = _FormatInQuery


class Documentation(SpectacularSwaggerSplitView):
    """Swagger UI from this host. Its template has no inline script or style, so it needs no exception from the Content-
    Security-Policy."""

    template_name = "api/docs.html"


def one_spelling(endpoints: list[Endpoint]) -> list[Endpoint]:
    """Preprocessing hook: paths work with and without a trailing slash; the document shows those without."""
    return [(path.rstrip("/"), regex, method, view) for path, regex, method, view in endpoints]


def with_problems(result: JsonObject, generator: Any, request: Any, public: bool) -> JsonObject:
    """Postprocessing hook: adds the possible errors to every operation."""
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
                _take_revision(parameter, operation)
            if any(parameter["name"] == "timeout" for parameter in operation.get("parameters", ())):
                _describe_changes(operation, components["schemas"])
            for status in _statuses(path, method, operation):
                operation["responses"][str(status.value)] = {"$ref": f"#/components/responses/{_name(status)}"}
    return result


def _complete(name: str, schema: JsonObject) -> None:
    """Responses always have all of their fields; requests with unknown fields are rejected."""
    if name.endswith("Request"):
        schema["additionalProperties"] = False
    elif name.startswith("Paginated"):
        return  # declares itself which fields only watchers receive
    elif "properties" in schema:
        schema["required"] = sorted(schema["properties"])


def _refuse_empty(parameter: JsonObject) -> None:
    """As in `controlplane.api.filters`: a parameter without a value must never return an unfiltered list."""
    if parameter["in"] == "query" and parameter["schema"] == {"type": "string"}:
        parameter["schema"] = {"type": "string", "pattern": r"^[^\u0000]+$"}


def _take_revision(parameter: JsonObject, operation: JsonObject) -> None:
    """`since` of a list filtered by time also accepts revisions."""
    times = parameter["name"] == "since" and parameter["schema"].get("format") == "date-time"
    if times and any(other["name"] == "timeout" for other in operation["parameters"]):
        parameter["schema"] = {"type": "string", "anyOf": [parameter["schema"], {"pattern": f"^({FORM})$"}]}
        description = (
            f"Or a revision: only changes after it, with `gone` and the next `revision`; `{BEGINNING}`: everything."
        )
        parameter["description"] = f"{parameter.get('description', '')} {description}".strip()


def _describe_changes(operation: JsonObject, schemas: JsonObject) -> None:
    """Lists that can be watched have two more fields for watchers."""
    page = operation["responses"]["200"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    gone = {"type": "array", "items": {"type": "string"}}
    schemas[page]["properties"] |= {
        "gone": {**gone, "description": "With a revision in `since`: objects that are no longer in the list."},
        "revision": {"type": "string", "description": "With `since`: the revision for the next request."},
    }


def _statuses(path: str, method: str, operation: JsonObject) -> list[HTTPStatus]:
    statuses = [HTTPStatus.BAD_REQUEST, HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_ACCEPTABLE]
    statuses.append(HTTPStatus.TOO_MANY_REQUESTS)
    named = {parameter["name"]: parameter for parameter in operation.get("parameters", ())}
    if "{" in path:
        statuses.append(HTTPStatus.NOT_FOUND)
    if method in WRITES:
        statuses += [HTTPStatus.CONFLICT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNSUPPORTED_MEDIA_TYPE]
    if "timeout" in named:
        statuses.append(HTTPStatus.GONE)
    if "set" in named:
        statuses.append(HTTPStatus.CONFLICT)  # a recording that cannot be decoded
    if idempotency.HEADER in named:
        statuses.append(HTTPStatus.UNPROCESSABLE_ENTITY)
    if "If-Match" in named:
        statuses.append(HTTPStatus.PRECONDITION_FAILED)
        statuses += [HTTPStatus.PRECONDITION_REQUIRED] * named["If-Match"]["required"]
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
    described = {"description": description, "content": {CONTENT_TYPE: {"schema": schema, "example": example}}}
    return {**described, "headers": dict(_HEADERS_OF.get(status, {}), **RATE_HEADERS)}
