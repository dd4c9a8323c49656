"""Near-real-time requests in HAProxy's configuration: they go to the control plane, which keeps them, as do questions
about usage. Pure text.

Who asks is known by then; the key goes along, because the control plane must see for itself whose request it keeps.
"""

from collections.abc import Iterable
from urllib.parse import urlsplit

from engine_agent.ingress import answers, headers
from engine_agent.ingress.answers import Answer
from engine_agent.ingress.keys import SCHEME
from engine_agent.ingress.sections import refuse_longer_than, section
from engine_agent.ingress.settings import IngressSettings

ASYNC_PREFIX = "/v1/async/"
USAGE_PATH = "/v1/usage"
"""What a tenant used, which the control plane alone knows."""
BACKEND = "control_plane"
MAX_BODY_BYTES = 1024 * 1024
"""What the control plane accepts (`traffic.planning.async_request.AsyncSettings`)."""
MAX_AT_ONCE = 64
"""Connections to the control plane; each is over in milliseconds, and the rest wait here."""
QUEUE_S = 10
CHECK_INTERVAL_MS = 1000


def async_choice(settings: IngressSettings) -> list[str]:
    """The rules that send these requests there. Where the address of the control plane is not known there is no such
    path."""
    if not settings.control_plane:
        return []
    return [
        f"acl is_async path_beg {ASYNC_PREFIX}",
        f"acl is_async path {USAGE_PATH}",
        f"use_backend {BACKEND} if is_async",
    ]


def async_refusals(retry_after_s: int) -> tuple[Answer, ...]:
    return (_away(retry_after_s), answers.too_large(MAX_BODY_BYTES))


def async_backend(settings: IngressSettings, retry_after_s: int, who_asks: Iterable[str]) -> list[str]:
    """The section of the control plane; `who_asks` are rules that find that out."""
    if not settings.control_plane:
        return []
    parts = urlsplit(settings.control_plane)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    tls = f"ssl verify required ca-file @system-ca sni str({parts.hostname})" if parts.scheme == "https" else ""
    server = f"server web {host}:{port} check inter {CHECK_INTERVAL_MS}ms init-addr last,libc,none {tls}".rstrip()
    lines = [
        f"timeout queue {QUEUE_S}s",
        *who_asks,
        answers.refused(_away(retry_after_s), "{ nbsrv eq 0 }"),
        refuse_longer_than(MAX_BODY_BYTES, "req.hdr_val(content-length)"),
        f"http-request set-header Authorization '{SCHEME} %[var(txn.key_text)]' if {{ var(txn.key) -m found }}",
        f"http-request set-header {headers.REGION} {settings.region}",
        f"http-request set-header Host {parts.netloc}",
        f"{server} maxconn {MAX_AT_ONCE}",
    ]
    return [section(f"backend {BACKEND}", lines)]


def _away(retry_after_s: int) -> Answer:
    message = "near-real-time requests and usage cannot be served now; try again shortly"
    return Answer(503, "control_plane_away", message, None, retry_after_s)
