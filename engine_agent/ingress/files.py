"""Uploads and downloads of files, and their way to the control plane. Pure text.

They have a backend of their own: one takes minutes, and the calls that are over in milliseconds must not wait for it.
"""

from collections.abc import Sequence

from engine_agent.ingress.fair_places import TOO_MANY, share_rules
from engine_agent.ingress.responses import ErrorResponse, refuse_rule, too_large
from engine_agent.ingress.sections import refuse_longer_than, section

BACKEND = "files"
PATHS = ("/v1/files", "/v1/files/{id}/content")
MAX_BODY_BYTES = 1024 * 1024 * 1024
"""The longest that a control plane may be told to take (SWITCHYARD_FILE_MIB); it says itself what is too long."""
MAX_CONNECTIONS = 16
MAX_CONNECTIONS_OF_ONE = MAX_CONNECTIONS // 4
"""Of one caller, to each web process."""
QUEUE_TIMEOUT_S = 10


def refusals() -> tuple[ErrorResponse, ...]:
    return (too_large(MAX_BODY_BYTES), TOO_MANY)


def backend(tracked: str, rules: Sequence[str], unavailable: ErrorResponse, servers: Sequence[str]) -> str:
    """The section. `rules` identify the caller and name the control plane; `tracked` is the backend that checks the
    same servers, `servers` their names and addresses."""
    lines = [
        f"timeout queue {QUEUE_TIMEOUT_S}s",
        *rules,
        *share_rules(MAX_CONNECTIONS_OF_ONE * len(servers)),
        refuse_rule(unavailable, "{ nbsrv eq 0 }"),
        *refuse_longer_than(MAX_BODY_BYTES, "req.hdr_val(content-length)"),
        *(
            f"server {name} {rest} track {tracked}/{name} maxconn {MAX_CONNECTIONS}"
            for name, rest in (server.split(" ", 1) for server in servers)
        ),
    ]
    return section(f"backend {BACKEND}", lines)
