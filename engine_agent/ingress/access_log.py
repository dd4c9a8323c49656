"""The access log as HAProxy writes it: one line of JSON for every request, to its standard output. Pure text.

-1 and "-" stand for what is unknown, because the request never got that far or no header stated it. Text that came from
outside is escaped and cut, so that a line is always JSON and always fits the pipe in one piece. Where the lines go is
for `log_pipe`.
"""

from engine_agent.ingress import headers
from engine_agent.ingress.api_paths import HEALTH_PATHS

QUIET_RULE = f"http-request set-log-level silent if {{ path {' '.join(HEALTH_PATHS)} }}"
"""Polled several times a second by machines."""
ARRIVAL_RULE = "http-request set-var(txn.arrived_ms) date(0,ms)"
"""From here, where all that is to be read was read, the time to the first token counts."""
MAX_LINE_BYTES = 4096
"""PIPE_BUF of Linux: up to here a line is written whole or not at all."""
MAX_TEXT_BYTES = 120
"""Of each text from outside; escaped it may be six times as long."""
_ESCAPED = f"bytes(0,{MAX_TEXT_BYTES}),json(utf8s)"

RESPONSE_HEADERS = {
    "cell": headers.CELL,
    "region": headers.REGION,
    "deployment": headers.DEPLOYMENT,
    "prompt_tokens": headers.PROMPT_TOKENS,
    "completion_tokens": headers.COMPLETION_TOKENS,
}
"""Response headers that are kept for the log line; the cell sends token counts only where it knew them in time."""


TRAIL = {"pool_queue_ms": "%Tw", "log_class": "%[var(txn.log_class)]", "server": "%s"}
"""Variable of the outer request -> what the inner one knows of it, in the order of the header that carries it."""


def request_id_rules() -> list[str]:
    """Every request has an id: the client's, if it looks like one, else a new one. Every response carries it."""
    given = f"req.fhdr({headers.REQUEST_ID})"
    # Judged as a whole, and there once: what is judged here is what every line says, unescaped.
    is_fit = f"{{ {given} -m reg ^[A-Za-z0-9._:/+=-]{{1,128}}$ }}"
    return [
        f"http-request set-header {headers.REQUEST_ID} %[uuid]"
        f" if !{is_fit} or {{ req.fhdr_cnt({headers.REQUEST_ID}) gt 1 }}",
        f"http-request set-var(txn.request_id) {given}",
        f"http-after-response set-header {headers.REQUEST_ID} %[var(txn.request_id)]"
        " if { var(txn.request_id) -m found }",
        # As Anthropic's clients know it.
        "http-after-response set-header Request-Id %[var(txn.request_id)] if { var(txn.error_open) -m found }",
    ]


def capture_rules(*, has_tenant: bool) -> list[str]:
    """Keep what the line will say: when that is written the request is gone. After the rules that judge headers, before
    the body is waited for. `has_tenant`: a key or another region may have named a tenant."""
    tenant = f"http-request set-var(txn.log_tenant) req.hdr({headers.TENANT})"
    return [
        "http-request set-var(txn.log_path) path",
        "http-request set-var(txn.log_traceparent) req.hdr(traceparent)",
        *([tenant] if has_tenant else ()),
    ]


def class_rule() -> str:
    """Keep the serving class of a request that goes on to where its class is judged."""
    return f"http-request set-var(txn.log_class) req.hdr({headers.CLASS}),{_ESCAPED}"


def trail_rule() -> str:
    """Where a request is tried that somebody else of this ingress logs: say how it went."""
    return f"http-response set-header {headers.TRAIL} {'|'.join(TRAIL.values())}"


def trail_rules() -> list[str]:
    """Where it is logged: take that over."""
    trail = f"res.hdr({headers.TRAIL})"
    return [
        *(
            f"http-response set-var(txn.{name}) {trail},field({place},|) if {{ {trail} -m found }}"
            for place, name in enumerate(TRAIL, start=1)
        ),
        f"http-response del-header {headers.TRAIL}",
    ]


def log_lines(*, only_failures: bool) -> list[str]:
    """The lines of the frontend that logs. `only_failures`: answers of 5xx, which are counted from here."""
    quiet = ["http-after-response set-log-level silent unless { status ge 500 }"] if only_failures else []
    kept = [f"http-response set-var(txn.log_{name}) res.hdr({header})" for name, header in RESPONSE_HEADERS.items()]
    return [
        "no log",
        f"log stdout len {MAX_LINE_BYTES} format raw daemon",
        "no option dontlog-normal",
        f"log-format '{_format()}'",
        *kept,
        "http-response set-var(txn.first_byte_ms) date(0,ms),sub(txn.arrived_ms)",
        "http-response set-var-fmt(txn.server) %s if !{ var(txn.server) -m found }",
        # Of what was answered here, too.
        f"http-after-response set-var(txn.log_error) res.hdr({headers.ERROR}),{_ESCAPED} if {{ status ge 500 }}",
        f"http-after-response set-var(txn.log_handed_back) bool(true) if {{ res.hdr({headers.RETRY}) -m found }}",
        *quiet,
    ]


def _format() -> str:
    fields = {
        "time": "%Ts.%ms",
        "request_id": _word("request_id"),
        "traceparent": _text("log_traceparent"),
        "client": '"%ci"',
        "method": '"%HM"',
        "path": _text("log_path"),
        "tenant": _word("log_tenant"),
        "key": _word("key_prefix"),
        "is_sender": _number("is_sender"),
        "class": _word("log_class"),
        "model": _text("model"),
        "pool": _word("pool"),
        "deployment": _word("log_deployment"),
        "cell": _word("log_cell"),
        "region": _word("log_region"),
        "server": _word("server"),
        "hop": _word("hop"),
        "status": "%ST",
        "request_bytes": "%U",
        "response_bytes": "%B",
        "queue_ms": "%Tw",
        "pool_queue_ms": _number("pool_queue_ms"),
        "ttft_ms": _number("first_byte_ms"),
        "total_ms": "%Ta",
        "prompt_tokens": _number("log_prompt_tokens"),
        "completion_tokens": _number("log_completion_tokens"),
        "error": _word("log_error"),
        "handed_back": _number("log_handed_back"),
        "retries": "%rc",
        "ended": '"%ts"',
    }
    return "{" + ",".join(f'"{name}":{value}' for name, value in fields.items()) + "}"


def _text(variable: str) -> str:
    return f'"%[var(txn.{variable}),{_ESCAPED}]"'


def _word(variable: str) -> str:
    """A name that was judged before it was kept, or is ours: nothing in it needs escaping."""
    return f'"%[var(txn.{variable})]"'


def _number(variable: str) -> str:
    return f"%[var(txn.{variable},-1),add(0)]"
