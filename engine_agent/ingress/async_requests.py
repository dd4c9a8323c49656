"""Near-real-time requests in HAProxy's configuration: they go to the control plane, which keeps them, as do questions
about usage. Pure text.

Who asks is known by then; the key goes along, because the control plane must see for itself whose request it keeps.
"""

from urllib.parse import urlsplit

from engine_agent.ingress import answers, headers
from engine_agent.ingress.answers import Answer
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


def async_rules(settings: IngressSettings, retry_after_s: int) -> list[str]:
    """Let these requests through, past all rules that ask for a model, or say why they cannot be kept now. Where the
    address of the control plane is not known, there is no such path."""
    if not settings.control_plane:
        return []
    return [
        f"acl is_async path_beg {ASYNC_PREFIX}",
        f"acl is_async path {USAGE_PATH}",
        f"acl has_control_plane nbsrv({BACKEND}) gt 0",
        *answers.refused(_away(retry_after_s), "is_async !has_control_plane"),
        *(f"{rule} is_async" for rule in refuse_longer_than(MAX_BODY_BYTES, "req.hdr_val(content-length)")),
        "http-request set-header Authorization 'Bearer %[var(txn.key_text)]' if is_async has_key",
        f"http-request set-header {headers.REGION} {settings.region} if is_async",
        "http-request allow if is_async",
    ]


def async_choice(settings: IngressSettings) -> list[str]:
    """The rule that sends them there; it stands before all other choices."""
    return [f"use_backend {BACKEND} if is_async"] if settings.control_plane else []


def async_backend(settings: IngressSettings) -> list[str]:
    """The section of the control plane."""
    if not settings.control_plane:
        return []
    parts = urlsplit(settings.control_plane)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    tls = f"ssl verify required ca-file @system-ca sni str({parts.hostname})" if parts.scheme == "https" else ""
    server = f"server web {host}:{port} check inter {CHECK_INTERVAL_MS}ms init-addr last,libc,none {tls}".rstrip()
    lines = [
        f"timeout queue {QUEUE_S}s",
        f"http-request set-header Host {parts.netloc}",
        f"{server} maxconn {MAX_AT_ONCE}",
    ]
    return [section(f"backend {BACKEND}", lines)]


def _away(retry_after_s: int) -> Answer:
    message = "near-real-time requests and usage cannot be served now; try again shortly"
    return Answer(503, "control_plane_away", message, None, retry_after_s)
