"""A layout and an ingress's settings as the text of haproxy.cfg. Pure: the same input gives the same text.

File and socket names in it are relative to the ingress's home, where HAProxy runs. Here stands the order in which a
request meets the rules; what each says is in `frontend_rules` and `backends`. Bodies that its buffers cannot hold go
through the reader (`reader_config`), which sends them back with the model in a header.
"""

from collections.abc import Mapping
from dataclasses import replace

from engine_agent.ingress import access_log, answers, async_requests, frontend_rules, hops, keys
from engine_agent.ingress.backends import pool_backend, reader_backend, spill_backend
from engine_agent.ingress.layout import Layout
from engine_agent.ingress.sections import (
    NAMED_SOCKET,
    defaults_section,
    digest_of,
    global_section,
    held_bytes,
    section,
)
from engine_agent.ingress.settings import IngressSettings

METRICS_RULE = "http-request use-service prometheus-exporter if METH_GET { path /metrics } { src 127.0.0.0/8 ::1 }"
CHOICE = (
    "use_backend %[var(txn.spill)] if !is_marked can_spill !can_serve",
    "use_backend %[var(txn.spill)] if !is_marked can_spill must_spill",
    "use_backend %[var(txn.pool)]",
)
"""Cells of this region by the pool's share; other regions for the rest, and when no cell here can serve."""


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
    sections = [
        "# Written by the ingress agent; what is changed here is lost.",
        global_section(settings, structure, body_bytes=held_bytes(layout, settings), threads=settings.threads),
        defaults_section(layout, settings),
        *_frontends(layout, settings),
    ]
    for pool in layout.pools:
        sections.append(pool_backend(pool, layout, settings))
        sections.append(spill_backend(pool, layout, settings))
    return "\n".join(sections)


def _frontends(layout: Layout, settings: IngressSettings) -> list[str]:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    # The rest is for what the reader sends back: were it taken by requests that wait for the reader, none would go on.
    limit = f"maxconn {settings.max_connections - settings.max_long_requests}"
    lines = [f"bind {host}:{settings.port}", limit, *access_log.log_lines(), *access_log.request_id_rules()]
    lines += [*frontend_rules.health_rules(), METRICS_RULE]
    if not layout.told:
        return [section("frontend ingress", [*lines, answers.returned(answers.no_table(layout.retry_after_s))])]
    judgement = frontend_rules.judgement_rules(layout)
    lines += [*hops.proof_rules(), *keys.identity_rules(), *access_log.capture_rules()]
    lines += async_requests.async_rules(settings, layout.retry_after_s)
    lines += [*frontend_rules.listing_rules(), *frontend_rules.path_rules()]
    lines += [*frontend_rules.body_rules(layout, settings), access_log.ARRIVAL_RULE]
    lines += frontend_rules.deadline_rules()
    lines += [*frontend_rules.pool_rules(has_body=True), *keys.scope_rules()]
    lines += [*judgement, *keys.limit_rules(), *keys.meter_lines(layout.meters_tokens)]
    lines += [*async_requests.async_choice(settings), "use_backend reader if is_long", *CHOICE]
    # What comes through here is logged where it came from outside.
    named = [f"bind unix@{NAMED_SOCKET} mode 600", "no log", *frontend_rules.named_rules()]
    named += [*frontend_rules.pool_rules(has_body=False), *keys.named_scope_rules(), *judgement, *CHOICE]
    return [
        section("frontend ingress", lines),
        section("frontend named", named),
        reader_backend(layout, settings),
        keys.key_store(),
        *async_requests.async_backend(settings),
    ]
