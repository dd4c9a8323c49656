"""Renders the configuration of an ingress's HAProxies from a desired state. Pure: the same input gives the same text.

`haproxy.cfg.j2` contains the rules, in the order in which a request meets them. This module computes the values in it.

HAProxy reads and replays no more of a request than one buffer holds, all buffers of a process have one size, and a
request that can be replayed costs a copy of a whole buffer (0.3 ms for 4 MiB). So the HAProxy that serves has buffers
for short bodies, and each body parser, a second HAProxy, for longer ones (`settings.BODY_PARSERS`)."""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import jinja2

from engine_agent.ingress import error_responses, headers
from engine_agent.ingress.certificates import APPLICATION_LIST, AUTHORITIES, CIPHERS, LINK_FILES
from engine_agent.ingress.desired import DesiredHaproxy, Server
from engine_agent.ingress.key_map import KeyField
from engine_agent.ingress.settings import BodyParserTier, IngressSettings, Times
from engine_agent.protocol.api_surface import (
    ANTHROPIC_PATHS,
    API_PATHS,
    CELL_PATHS,
    LOADING_PATHS,
    SERVICE_TIERS,
    AnsweredBy,
)
from engine_agent.protocol.ports import grpc_port, grpc_tls_port, hop_port, tls_port
from engine_agent.protocol.states import ServingClass
from engine_agent.protocol.strict_json import DEEPEST, LONGEST_NAME_CHARS, MOST_CONTAINERS

TEMPLATE = "haproxy.cfg.j2"
CONFIG_FILE = "haproxy.cfg"
ADMIN_SOCKET, MASTER_SOCKET = "admin.sock", "master.sock"
SCRIPTS = (
    *("limits.lua", "pause.lua", "read_body.lua", "body_shape.lua", "refuse.lua", "pick_cell.lua", "cells_up.lua"),
    *("adapter_cells.lua", "continue_stream.lua", "list_models.lua", "hold.lua", "cache_index.lua"),
    "prompt_prefixes.lua",
)
"""Copied into the folder of each configuration."""
HEAD_ROOM_BYTES = 16 * 1024
"""Room for a request's head next to the longest body. Both have to fit one buffer to be read and replayed."""
MAX_HEAD_BYTES = 8 * 1024
"""Half of the room: HAProxy reserves some of it, and a few bytes per header."""
MAX_HEADERS = 100
MAX_MODEL_BYTES = 200
STORED_BODY_BYTES = 1024 * 1024
"""The limit of the control plane (`traffic.async_requests.planner.AsyncSettings`)."""
FILE_BYTES = 1024 * 1024 * 1024
"""The highest limit that a control plane can have (SWITCHYARD_FILE_MIB). It refuses longer files itself."""
CONTROL_PLANE_CONNECTIONS = 64
"""To each web process. A call takes milliseconds, and further calls wait in HAProxy. One caller gets half of them."""
FILE_CONNECTIONS = 16
"""As above, for files. One caller gets a quarter."""
REGION_RETRIES = 3
"""How often a request that leaves for another region is sent to its next ingress."""
OVERFLOW_REFUSALS_PER_S = 10
"""While other regions refuse so much of a pool's overflow, an ingress offers none."""
HEALTH_PATHS = ("/health", "/healthz")
GRPC_SOCKETS = "grpc"
"""Folder of the sockets between HAProxy and the gRPC gateway, in the state directory."""
CONTINUED_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
"""Paths whose streams a relay can continue."""
RELAY_SOCKETS = "relay"
"""Folder of the sockets of the relays."""
VARIABLE_PART = re.compile(r"{[a-z_]+}")
SIGNED_REQUEST = "%[var(txn.request_id)]|%[method]|{}%[pathq]".format(
    "".join(f"%[req.hdr({name}),url_enc]|" for name in (headers.TENANT, headers.CLASS, headers.POOL))
)
"""The request in a hop mark. Only the last part can contain a bar, so two different requests give two texts."""
CORS_READABLE_HEADERS = (
    *(headers.REQUEST_ID, headers.CELL, headers.CLASS, headers.REGION, headers.INGRESS, headers.DEPLOYMENT),
    *("Request-Id", "Retry-After", "Retry-After-Ms", "Location", "Allow"),
    *(f"x-ratelimit-{what}-{kind}" for kind in ("requests", "tokens") for what in ("limit", "remaining", "reset")),
)
"""Response headers that a page of another origin may read, if its key lists the origin."""
_SECTIONS = ("global", "defaults", "peers", "frontend", "backend")


@dataclass(frozen=True, slots=True)
class ControlPlanePath:
    """A path that the control plane serves. `condition` is true for this path only."""

    path: str
    condition: str
    methods: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ControlPlaneServer:
    name: str
    arguments: str


def render(desired: DesiredHaproxy, settings: IngressSettings) -> str:
    """The configuration of the HAProxy that serves. Its description is `structure_of` the same input."""
    return _render(desired, settings, None, structure_of(desired, settings))


def structure_of(desired: DesiredHaproxy, settings: IngressSettings) -> str:
    """Digest of everything that only a reload can change: all of the text but its servers."""
    return _digest(_render(replace(desired, servers=()), settings, None, ""))


def render_body_parser(desired: DesiredHaproxy, settings: IngressSettings, tier: BodyParserTier) -> str:
    """The configuration of a body parser. Its description is `body_parser_structure_of` the same input."""
    return _render(desired, settings, tier, body_parser_structure_of(desired, settings, tier))


def body_parser_structure_of(desired: DesiredHaproxy, settings: IngressSettings, tier: BodyParserTier) -> str:
    return _digest(_render(desired, settings, tier, ""))


def grpc_answer(status: int, message: str) -> str:
    """A rule that ends a call with this gRPC status (https://grpc.github.io/grpc/core/md_doc_statuscodes.html)."""
    return (
        "http-request return status 200 content-type application/grpc "
        f"hdr grpc-status {status} hdr grpc-message '{message}'"
    )


def map_file(entries: Mapping[str, str]) -> str:
    return "".join(f"{key} {value}\n" for key, value in entries.items())


def server_arguments(server: Server, times: Times) -> str:
    """Address and keywords of a server, for the file and for `add server`, which inherits no defaults. A failed request
    only brings the next health check forward: the check decides whether the server is down."""
    host = f"[{server.address}]" if ":" in server.address else server.address
    arguments = [f"{host}:{server.port} check fastinter {times.check_fast_ms}ms fall {times.failed_checks} rise 1"]
    arguments += [f"observe layer{7 if server.cell else 4} error-limit 1 on-error fastinter"]
    arguments += [f"pool-purge-delay {times.idle_purge_s}s weight {server.weight}"]
    if server.tls_name:
        # Resumed sessions show no certificate. Without SNI all connections to a server are alike, so they are shared.
        arguments += [f"ssl {LINK_FILES} verifyhost {server.tls_name} check-ssl no-ssl-reuse"]
    arguments += [f"inter {times.check_interval_ms}ms"]
    arguments += [f"maxconn {server.max_connections}"] if server.cell else []
    return " ".join([*arguments, "backup"] if server.backup else arguments)


def _render(desired: DesiredHaproxy, settings: IngressSettings, tier: BodyParserTier | None, structure: str) -> str:
    return _laid_out(_template().render(_values(desired, settings, tier), structure=structure))


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(  # noqa: S701 - the text is no HTML
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["quote"] = lambda text: quote(text, safe="")
    environment.globals |= {
        "answer": error_responses.answer,
        "refuse": error_responses.refuse,
        "error_page": error_responses.error_page,
        "retry_after": error_responses.retry_after,
        "server_arguments": server_arguments,
        "with_head": lambda methods: " ".join((*methods, "HEAD") if "GET" in methods else methods),
    }
    return environment.get_template(TEMPLATE)


def _values(desired: DesiredHaproxy, settings: IngressSettings, tier: BodyParserTier | None) -> dict[str, Any]:
    def max_parsed_body_bytes(tier: BodyParserTier) -> int:
        return min(tier.body_bytes or desired.max_body_bytes, desired.max_body_bytes)

    body_bytes = max_parsed_body_bytes(tier) if tier else min(settings.buffered_body_bytes, desired.max_body_bytes)
    buffer_bytes = body_bytes + HEAD_ROOM_BYTES
    owner = "" if settings.worker_account is None else " uid {} gid {}".format(*settings.worker_account)
    kept = tuple(_control_plane_paths()) if settings.control_plane else ()
    # A request takes a second connection on its way within the ingress, and a held one a third.
    more = settings.max_outside_connections + (settings.max_held if desired.features.holds else 0)
    more += 2 * settings.grpc.calls if desired.features.grpc else 0
    return {
        "desired": desired,
        "features": desired.features,
        "settings": settings,
        "times": settings.times,
        "tier": tier,
        "body_bytes": body_bytes,
        "buffer_bytes": buffer_bytes,
        "most_replays": max(1, settings.replay_bytes // buffer_bytes),
        "max_connections": settings.max_connections + (0 if tier else more),
        "max_parsed_body_bytes": max_parsed_body_bytes,
        "threads": 1 if tier else settings.threads,
        "host": f"[{settings.host}]" if ":" in settings.host else settings.host,
        "hop_port": hop_port(settings.port),
        "tls_port": tls_port(settings.port),
        "grpc_port": grpc_port(settings.port),
        "grpc_tls_port": grpc_tls_port(settings.port),
        "grpc_sockets": GRPC_SOCKETS,
        "relay_sockets": RELAY_SOCKETS,
        "grpc_answer": grpc_answer,
        # Only the workers of this ingress may use its sockets.
        "own_socket": lambda path: f"bind unix@{path} mode 600{owner}",
        "link_files": LINK_FILES,
        "certificate_list": APPLICATION_LIST,
        "ciphers": CIPHERS,
        "errors": error_responses.error_responses(
            retry_after_s=desired.retry_after_s,
            max_body_bytes=desired.max_body_bytes,
            max_head_bytes=MAX_HEAD_BYTES,
            stored_body_bytes=STORED_BODY_BYTES,
            file_bytes=FILE_BYTES,
            tls_port=tls_port(settings.port),
        ),
        "bad_body": error_responses.BAD_BODY_RULE,
        "anthropic_types": error_responses.ANTHROPIC_TYPES_TEXT,
        "anthropic_paths": ANTHROPIC_PATHS,
        "cell_paths": CELL_PATHS,
        "continued_paths": CONTINUED_PATHS,
        "health_paths": HEALTH_PATHS,
        "loading_paths": LOADING_PATHS,
        "known_paths": [row.path for row in API_PATHS if not VARIABLE_PART.search(row.path)],
        "control_plane_paths": kept,
        "preflight_conditions": (
            f"{{ path {' '.join((*CELL_PATHS, *HEALTH_PATHS, '/v1/models', '/version'))} }}",
            "{ path_beg /v1/models/ }",
            *(row.condition for row in kept),
        ),
        "cors_readable_headers": ", ".join(CORS_READABLE_HEADERS),
        "control_plane_servers": tuple(_control_plane_servers(settings)),
        "control_plane_host": urlsplit(settings.control_plane[0]).netloc if settings.control_plane else "",
        "control_plane_connections": CONTROL_PLANE_CONNECTIONS,
        "file_connections": FILE_CONNECTIONS,
        "stored_body_bytes": STORED_BODY_BYTES,
        "file_bytes": FILE_BYTES,
        "region_retries": REGION_RETRIES,
        "overflow_refusals_per_s": OVERFLOW_REFUSALS_PER_S,
        "max_head_bytes": MAX_HEAD_BYTES,
        "max_headers": MAX_HEADERS,
        "max_model_bytes": MAX_MODEL_BYTES,
        "deepest_json": DEEPEST,
        "longest_json_name": LONGEST_NAME_CHARS,
        "most_json_containers": MOST_CONTAINERS,
        "classes": list(ServingClass),
        "service_tiers": SERVICE_TIERS,
        "key_fields": {field.name: field.value for field in KeyField},
        "signed_request": SIGNED_REQUEST,
    }


def _laid_out(text: str) -> str:
    """The text with one line per rule, indented by section, and an empty line before each section."""
    lines: list[str] = []
    for line in map(str.strip, re.sub(r"\\\n\s*", "", text).splitlines()):
        if line.split(" ", 1)[0] in _SECTIONS:
            lines += ["", line]
        elif line:
            lines.append(f"  {line}" if lines else line)
    return "\n".join([*lines, ""])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _control_plane_paths() -> Iterator[ControlPlanePath]:
    """HAProxy's `path` is not decoded, and compared byte by byte: another spelling of a path is another path."""
    rows = [row for row in API_PATHS if row.answered_by is AnsweredBy.CONTROL_PLANE]
    fixed = [row.path for row in rows if not VARIABLE_PART.search(row.path)]
    for row in rows:
        yield ControlPlanePath(row.path, _path_condition(row.path, fixed), tuple(row.methods))


def _path_condition(path: str, fixed: Sequence[str]) -> str:
    if path in fixed:
        return f"{{ path {path} }}"
    pattern = f"^{VARIABLE_PART.sub('[A-Za-z0-9_-]+', path)}$"
    others = [other for other in fixed if re.fullmatch(pattern, other)]
    return f"{{ path -m reg {pattern} }}" + (f" !{{ path {' '.join(others)} }}" if others else "")


def _control_plane_servers(settings: IngressSettings) -> Iterator[ControlPlaneServer]:
    for number, url in enumerate(settings.control_plane, start=1):
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        # The name of the control plane is checked, whatever the address is.
        name = settings.control_plane_name
        tls = f" ssl verify required ca-file {AUTHORITIES} verifyhost {name} sni str({name})"
        yield ControlPlaneServer(f"web{number}", f"{host}:{port}{tls if parts.scheme == 'https' else ''}")
