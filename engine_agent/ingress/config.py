"""A desired state and an ingress's settings as the text of haproxy.cfg. Pure: the same input gives the same text.

File and socket names in it are relative to the ingress's state directory, where HAProxy runs. Here stands the order in
which a request meets the rules; what each says is in `frontend_rules` and `backends`. Bodies that its buffers cannot
hold go through a body parser (`body_parser_config`), which sends them back with the model in a header.
"""

from collections.abc import Mapping
from dataclasses import replace

from engine_agent.ingress import (
    access_log,
    adapters,
    affinity,
    api_paths,
    applications,
    backends,
    bad_bodies,
    cors,
    frontend_rules,
    hold,
    hops,
    keys,
    links,
    overflow,
    responses,
    stored_responses,
)
from engine_agent.ingress.backends import body_parser_backend, no_cell_frontend, pool_backend, spill_backend
from engine_agent.ingress.desired import DesiredHaproxy, Features
from engine_agent.ingress.responses import ErrorResponse
from engine_agent.ingress.sections import (
    ADAPTER_CELLS_LUA,
    CACHE_INDEX_LUA,
    CELLS_UP_LUA,
    LIST_MODELS_LUA,
    MAX_HEAD_BYTES,
    PARSED_SOCKET,
    PICK_CELL_LUA,
    PROMPT_PREFIXES_LUA,
    defaults_section,
    digest_of,
    global_section,
    max_buffered_body_bytes,
    section,
)
from engine_agent.ingress.settings import IngressSettings

ORIGIN_FORM_RULE = "http-request set-uri %[pathq] if !{ url_beg / }"
"""Of `POST http://host/path` our rules read the path; a cell would read another one, and take it for no request that it
has to judge."""
DEFAULT_BACKEND = "default"
"""The default backend has no cells: it answers everything but inference, and requests that name no model."""


def render(desired: DesiredHaproxy, settings: IngressSettings) -> str:
    """The whole haproxy.cfg. Its description is `structure_of` the same input."""
    return _render(desired, settings, structure_of(desired, settings))


def structure_of(desired: DesiredHaproxy, settings: IngressSettings) -> str:
    """Digest of everything that only a reload can change: all of the text but its servers."""
    return digest_of(_render(replace(desired, servers=()), settings, ""))


def map_file(entries: Mapping[str, str]) -> str:
    return "".join(f"{key} {value}\n" for key, value in entries.items())


def _render(desired: DesiredHaproxy, settings: IngressSettings, structure: str) -> str:
    body_bytes = max_buffered_body_bytes(desired, settings)
    extra_lines = [f"lua-load-per-thread {CELLS_UP_LUA}", *links.global_lines(desired.fleet)]
    extra_lines += [f"lua-load-per-thread {ADAPTER_CELLS_LUA}"] if desired.features.adapters else []
    extra_lines += [f"lua-load {LIST_MODELS_LUA}"] if desired.features.keys else []
    extra_lines += hold.global_lines() if desired.features.holds else []
    if desired.features.affinity:
        extra_lines += [f"lua-load-per-thread {PICK_CELL_LUA}", f"localpeer {settings.ingress_id}"]
    if desired.features.by_cache:
        extra_lines += [f"lua-load-per-thread {name}" for name in (CACHE_INDEX_LUA, PROMPT_PREFIXES_LUA)]
    sections = [
        "# Written by the ingress agent; what is changed here is lost.",
        global_section(
            settings,
            structure,
            _refusals(desired, settings),
            body_bytes=body_bytes,
            max_connections=_max_connections(desired.features, settings),
            threads=settings.threads,
            extra_lines=extra_lines,
        ),
        defaults_section(desired, settings),
        *(_peers_section(settings) if desired.features.affinity else ()),
        *(_frontends(desired, settings) if desired.has_table else _frontend_without_table(desired, settings)),
    ]
    for pool in desired.pools:
        sections.append(pool_backend(pool, desired, settings))
        sections.append(spill_backend(pool, desired, settings))
        if pool.hold_s:
            sections.append(hold.hold_backend(pool.name, pool.hold_s, settings, has_tenants=desired.features.keys))
    return "\n".join(sections)


def _max_connections(features: Features, settings: IngressSettings) -> int:
    """With those that requests take on their way within the ingress."""
    again = settings.max_outside_connections
    return settings.max_connections + again + (settings.max_held if features.holds else 0)


def _peers_section(settings: IngressSettings) -> list[str]:
    return affinity.peers_section(settings.ingress_id, settings.own_socket(affinity.PEERS_SOCKET))


def _refusals(desired: DesiredHaproxy, settings: IngressSettings) -> list[ErrorResponse]:
    """Every error response that a request may get while its body is still on the way."""
    return [
        *keys.REFUSALS,
        *backends.control_plane_refusals(desired.retry_after_s),
        responses.head_too_large(MAX_HEAD_BYTES),
        responses.too_large(desired.max_body_bytes),
        responses.body_parser_unavailable(desired.retry_after_s),
        bad_bodies.TOO_MANY,
        responses.DOUBLED_HEADER,
        responses.UNKNOWN_CLASS,
        responses.TWO_KEYS,
        responses.UNSUPPORTED_ENCODING,
        *([applications.tls_required(settings.port)] if desired.applications.refuses_plain_http else ()),
    ]


def _frontend_without_table(desired: DesiredHaproxy, settings: IngressSettings) -> list[str]:
    """The only frontends until the first table: there are no models yet."""
    lines = [*_entrance_lines(desired, settings), access_log.QUIET_RULE, *frontend_rules.health_rules(desired.features)]
    return _entrances(desired, settings, [*lines, responses.return_rule(responses.no_table(desired.retry_after_s))])


def _entrances(desired: DesiredHaproxy, settings: IngressSettings, lines: list[str]) -> list[str]:
    """The frontend for everybody and, with certificates, one of its own for applications over TLS: whoever fills that
    with handshakes that he does not finish takes nothing from the other."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    over_tls = applications.listener_lines(desired.applications, host, settings.port)
    limit = f"maxconn {settings.max_outside_connections // (2 if over_tls else 1)}"
    # One way to frame requests: else a connection could begin with HTTP/2's preface and speak that.
    binds = [f"bind {host}:{settings.port} proto h1", *links.listener_lines(desired.fleet, host, settings.port)]
    ingress = section("frontend ingress", [*binds, limit, *lines])
    return [ingress, section("frontend applications", [*over_tls, limit, *lines])] if over_tls else [ingress]


def _entrance_lines(desired: DesiredHaproxy, settings: IngressSettings) -> list[str]:
    return [
        *access_log.log_lines(only_failures=not settings.access_log),
        ORIGIN_FORM_RULE,
        *responses.form_rules(),
        *access_log.request_id_rules(),
        *(cors.answer_rules() if desired.features.origins else ()),
        *applications.plain_http_rules(desired.applications, settings.port),
    ]


def _frontends(desired: DesiredHaproxy, settings: IngressSettings) -> list[str]:
    features = desired.features
    availability = [*frontend_rules.availability_rules(desired)]
    lines = [*_entrance_lines(desired, settings), *frontend_rules.inference_rules(), *_caller_rules(desired, settings)]
    lines += keys.admission_rules() if features.keys else []
    lines += [*frontend_rules.deadline_rules(), *frontend_rules.body_rules(desired, settings)]
    lines += [access_log.ARRIVAL_RULE] if settings.access_log else []
    lines += stored_responses.found_rules(settings)
    lines += [*frontend_rules.pool_rules(features, has_body=True), *(keys.scope_rules() if features.keys else ())]
    lines += [
        *availability,
        *(keys.token_rules() if features.keys else ()),
        *keys.meter_lines(features=features.token_limits),
    ]
    lines += stored_responses.backend_choice(settings)
    lines += [*frontend_rules.BACKEND_CHOICE, *frontend_rules.body_parser_choice(desired, settings)]
    lines += [*backends.control_plane_choice(settings), f"default_backend {DEFAULT_BACKEND}"]
    # What comes through here is logged where it came from outside.
    parsed = [settings.own_socket(PARSED_SOCKET), "no log"]
    parsed += frontend_rules.parsed_body_rules(features, settings, desired.retry_after_s)
    parsed += stored_responses.parsed_rules(settings)
    parsed += [*frontend_rules.pool_rules(features, has_body=False), *keys.parsed_body_scope_rules()]
    parsed += availability
    parsed += overflow.leave_rules(desired.retry_after_s) if features.hops else []
    parsed += stored_responses.backend_choice(settings)
    parsed += [*frontend_rules.attempt_choice(features), *overflow.answer_rules(settings, has_regions=features.hops)]
    return [
        *_entrances(desired, settings, lines),
        section("frontend parsed", parsed),
        section(f"backend {DEFAULT_BACKEND}", _default_backend_lines(desired, settings)),
        *(body_parser_backend(tier, desired, settings) for tier in settings.body_parsers),
        overflow.again_backend(desired, settings),
        *overflow.stores(has_regions=features.hops),
        no_cell_frontend(features, settings, desired.retry_after_s),
        *(hold.door_frontend(settings) if features.holds else ()),
        keys.key_store(),
        bad_bodies.source_store(),
        *backends.control_plane_backend(settings, desired.retry_after_s, _caller_rules(desired, settings)),
    ]


def _caller_rules(desired: DesiredHaproxy, settings: IngressSettings) -> list[str]:
    """The rules that identify the caller: which region sent the request here, and which tenant it is of."""
    features, once = desired.features, frontend_rules.once_rules()
    hop_rules = hops.proof_rules(has_links=bool(desired.fleet)) if features.hops else hops.strip_rules()
    captures = access_log.capture_rules(has_tenant=features.keys or features.hops)
    readers = cors.reader_rules() if features.origins else []
    return [*once, *hop_rules, *keys.identity_rules(features=features.keys), *readers, *captures]


def _default_backend_lines(desired: DesiredHaproxy, settings: IngressSettings) -> list[str]:
    has_control_plane = bool(settings.control_plane)
    lines = [*frontend_rules.model_error_rules(), access_log.QUIET_RULE]
    lines += cors.preflight_rules(has_control_plane=has_control_plane) if desired.features.origins else []
    lines += frontend_rules.health_rules(desired.features)
    return [
        *lines,
        *_caller_rules(desired, settings),
        *frontend_rules.listing_rules(desired.features, settings.version),
        *adapters.loading_rules(),
        *api_paths.unserved_rules(has_control_plane=has_control_plane),
    ]
