"""Requests of OpenAI's Responses API that need what only the control plane keeps, and their way there. Pure text.

A response that is created without `store`, `background` and `previous_response_id` goes to a cell like any request.
What hides one of these from this reader gains nothing: the cell finds it and refuses. A request that another region's
ingress sent is for a cell in any case.
"""

from collections.abc import Iterable
from urllib.parse import urlsplit

from engine_agent.ingress import headers, responses
from engine_agent.ingress.key_map import SEPARATOR, KeyField
from engine_agent.ingress.keys import SCHEME
from engine_agent.ingress.responses import ErrorResponse
from engine_agent.ingress.sections import refuse_longer_than, section
from engine_agent.ingress.settings import IngressSettings

PATH = "/v1/responses"
BACKEND = "stored_responses"
MAX_BODY_BYTES = 1024 * 1024
"""What the control plane takes (`traffic.async_requests.planner.AsyncSettings`)."""
MAX_CONNECTIONS = 64
"""Of each web process. A stream keeps one for minutes; so they are not those of the calls that are over at once."""
QUEUE_TIMEOUT_S = 10
IS_STORED = "{ var(txn.is_stored) -m bool }"
_COUNTED_RULE = (
    f"http-request set-header {headers.COUNTED} %[var(txn.key),field({KeyField.SENDER.value},{SEPARATOR})]"
    " if { var(txn.key) -m found }"
)
"""An application cannot know it."""
_NEEDS = (
    ("previous_response_id", "-m found"),
    ("background", "-m bool"),
    ("store", "-m bool"),
)
"""Members and how they are compared. What is null is not found."""


def need_rules() -> list[str]:
    """Declares `needs_store`, of a request whose body is there."""
    return [f"acl needs_store req.body,json_query('$.{name}') {match}" for name, match in _NEEDS]


def found_rules(settings: IngressSettings) -> list[str]:
    """Of a request with a short body, whose model is known: past all rules about cells."""
    if not settings.control_plane:
        return []
    return [
        f"acl is_responses path {PATH}",
        *need_rules(),
        "http-request set-var(txn.is_stored) bool(true) if is_responses !is_marked needs_store",
        f"http-request allow if {IS_STORED}",
    ]


def parser_rules(settings: IngressSettings) -> list[str]:
    """In a body parser: tell the ingress what the body needs."""
    if not settings.control_plane:
        return []
    return [
        f"http-request del-header {headers.STORED}",
        *need_rules(),
        f"http-request set-header {headers.STORED} wanted if {{ path {PATH} }} needs_store",
    ]


def to_parser_rules(settings: IngressSettings) -> list[str]:
    """The control plane identifies the caller itself, so his key goes along with a large request that may be for it.
    What comes back says whether that was so."""
    if not settings.control_plane:
        return []
    return [
        f"http-request set-header Authorization '{SCHEME} %[var(txn.key_text)]'"
        f" if {{ path {PATH} }} {{ var(txn.key_text) -m found }}",
        f"{_COUNTED_RULE} {{ path {PATH} }}",
        *_stored_as_rules(),
    ]


def parsed_rules(settings: IngressSettings) -> list[str]:
    """Of a large request that comes back from its body parser."""
    if not settings.control_plane:
        return []
    return [
        f"http-request set-var(txn.key_text) http_auth_bearer if {{ path {PATH} }}",
        "http-request del-header Authorization",
        f"http-request set-var(txn.is_stored) bool(true) if !is_marked {{ req.hdr({headers.STORED}) -m found }}",
        f"http-request del-header {headers.STORED}",
        f"http-response del-header {headers.STORED} if !{IS_STORED}",
        f"http-request del-header {headers.COUNTED} if !{IS_STORED}",
        f"http-request allow if {IS_STORED}",
    ]


def backend_choice(settings: IngressSettings) -> list[str]:
    return [f"use_backend {BACKEND} if {IS_STORED}"] if settings.control_plane else []


def backend(settings: IngressSettings, tracked: str, unavailable: ErrorResponse, servers: Iterable[str]) -> list[str]:
    """The section; `tracked` is the backend that checks the same servers, `servers` their names and addresses."""
    if not settings.control_plane:
        return []
    lines = [
        f"timeout queue {QUEUE_TIMEOUT_S}s",
        responses.refuse_rule(unavailable, "{ nbsrv eq 0 }"),
        *refuse_longer_than(MAX_BODY_BYTES, "req.hdr_val(content-length)"),
        f"http-request set-header Authorization '{SCHEME} %[var(txn.key_text)]' if {{ var(txn.key_text) -m found }}",
        _COUNTED_RULE,
        f"http-request set-header {headers.REGION} {settings.region}",
        f"http-request set-header Host {urlsplit(settings.control_plane[0]).netloc}",
        *_stored_as_rules(),
        *(
            f"server {name} {rest} track {tracked}/{name} maxconn {MAX_CONNECTIONS}"
            for name, rest in (server.split(" ", 1) for server in servers)
        ),
    ]
    return [section(f"backend {BACKEND}", lines)]


def _stored_as_rules() -> list[str]:
    return [
        f"http-response set-var(txn.stored_as) res.hdr({headers.STORED}) if {{ res.hdr({headers.STORED}) -m found }}",
    ]
