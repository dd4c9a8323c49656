"""A layout and an ingress's settings as the text of haproxy.cfg. Pure: the same input gives the same text.

File and socket names in it are relative to the ingress's home, where HAProxy runs. Here stands the order in which a
request meets the rules; what each says is in `frontend_rules` and `backends`. Bodies that its buffers cannot hold go
through a reader (`reader_config`), which sends them back with the model in a header.
"""

from collections.abc import Mapping
from dataclasses import replace

from engine_agent.ingress import access_log, affinity, answers, async_requests, frontend_rules, hops, keys
from engine_agent.ingress.answers import Answer
from engine_agent.ingress.backends import nobody_frontend, pool_backend, reader_backend, spill_backend
from engine_agent.ingress.layout import InUse, Layout
from engine_agent.ingress.sections import (
    CELLS_UP_LUA,
    MAX_HEAD_BYTES,
    NAMED_SOCKET,
    PICK_CELL_LUA,
    defaults_section,
    digest_of,
    global_section,
    held_bytes,
    section,
)
from engine_agent.ingress.settings import IngressSettings

METRICS_RULE = "http-request use-service prometheus-exporter if METH_GET { path /metrics } { src 127.0.0.0/8 ::1 }"
ELSEWHERE = "elsewhere"
"""The backend without cells: it answers everything but inference, and what of that names no model."""


def render(layout: Layout, settings: IngressSettings) -> str:
    """The whole haproxy.cfg. Its description is `structure_of` the same input."""
    return _render(layout, settings, structure_of(layout, settings))


def structure_of(layout: Layout, settings: IngressSettings) -> str:
    """Digest of everything that only a reload can change: all of the text but its servers."""
    return digest_of(_render(replace(layout, servers=()), settings, ""))


def map_file(entries: Mapping[str, str]) -> str:
    """The text of a map file."""
    return "".join(f"{key} {value}\n" for key, value in entries.items())


def _render(layout: Layout, settings: IngressSettings, structure: str) -> str:
    body_bytes = held_bytes(layout, settings)
    more = [f"lua-load-per-thread {CELLS_UP_LUA}"]
    if layout.in_use.affinity:
        more += [f"lua-load-per-thread {PICK_CELL_LUA}", f"localpeer {settings.ingress_id}"]
    sections = [
        "# Written by the ingress agent; what is changed here is lost.",
        global_section(
            settings,
            structure,
            _refusals(layout),
            body_bytes=body_bytes,
            threads=settings.threads,
            more=more,
        ),
        defaults_section(layout, settings),
        *(affinity.peers_section(settings.ingress_id) if layout.in_use.affinity else ()),
        *(_frontends(layout, settings) if layout.told else _untold(layout, settings)),
    ]
    for pool in layout.pools:
        sections.append(pool_backend(pool, layout, settings))
        sections.append(spill_backend(pool, layout, settings))
    return "\n".join(sections)


def _refusals(layout: Layout) -> list[Answer]:
    """Every answer that a request may get while its body is still on the way."""
    return [
        *keys.REFUSALS,
        *async_requests.async_refusals(layout.retry_after_s),
        answers.head_too_large(MAX_HEAD_BYTES),
        answers.too_large(layout.max_body_bytes),
        answers.long_bodies_unread(layout.retry_after_s),
    ]


def _untold(layout: Layout, settings: IngressSettings) -> list[str]:
    """Until the first table there is nothing to say of models."""
    lines = [*_entrance(settings), access_log.QUIET_RULE, *frontend_rules.health_rules(), METRICS_RULE]
    return [section("frontend ingress", [*lines, answers.returned(answers.no_table(layout.retry_after_s))])]


def _entrance(settings: IngressSettings) -> list[str]:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    limit = f"maxconn {settings.max_outside_connections}"
    log_lines = access_log.log_lines() if settings.access_log else ["no log"]
    return [f"bind {host}:{settings.port}", limit, *log_lines, *access_log.request_id_rules()]


def _frontends(layout: Layout, settings: IngressSettings) -> list[str]:
    in_use = layout.in_use
    judgement = [*frontend_rules.judgement_rules(layout)]
    lines = [*_entrance(settings), *frontend_rules.inference_rules(), *_who_asks(in_use, settings)]
    lines += [*frontend_rules.deadline_rules(), *frontend_rules.body_rules(layout, settings)]
    lines += [access_log.ARRIVAL_RULE] if settings.access_log else []
    lines += [*frontend_rules.pool_rules(in_use, has_body=True), *(keys.scope_rules() if in_use.keys else ())]
    lines += [*judgement, *(keys.limit_rules() if in_use.keys else ()), *keys.meter_lines(in_use=in_use.token_limits)]
    lines += [*frontend_rules.choice(in_use), *frontend_rules.reader_choice(layout, settings)]
    lines += [*async_requests.async_choice(settings), f"default_backend {ELSEWHERE}"]
    # What comes through here is logged where it came from outside.
    named = [f"bind unix@{NAMED_SOCKET} mode 600", "no log", *frontend_rules.named_rules()]
    named += [*frontend_rules.pool_rules(in_use, has_body=False), *keys.named_scope_rules()]
    named += [*judgement, *frontend_rules.choice(in_use)]
    return [
        section("frontend ingress", lines),
        section("frontend named", named),
        section(f"backend {ELSEWHERE}", _elsewhere(in_use, settings)),
        *(reader_backend(tier, layout, settings) for tier in settings.readers),
        nobody_frontend(),
        keys.key_store(),
        *async_requests.async_backend(settings, layout.retry_after_s, _who_asks(in_use, settings)),
    ]


def _who_asks(in_use: InUse, settings: IngressSettings) -> list[str]:
    """The rules that judge what a request says of itself: which region sent it here, and whose it is."""
    hop_rules = hops.proof_rules() if in_use.hops else hops.strip_rules()
    captures = access_log.capture_rules(has_tenant=in_use.keys or in_use.hops) if settings.access_log else []
    return [*hop_rules, *keys.identity_rules(in_use=in_use.keys), *captures]


def _elsewhere(in_use: InUse, settings: IngressSettings) -> list[str]:
    lines = [*frontend_rules.unanswered_rules(), access_log.QUIET_RULE, *frontend_rules.health_rules(), METRICS_RULE]
    return [*lines, *_who_asks(in_use, settings), *frontend_rules.listing_rules(), *frontend_rules.path_rules()]
