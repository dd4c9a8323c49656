"""What the configurations of an ingress's HAProxies share: the sections `global` and `defaults`, and the names that
they agree on. Pure text."""

import hashlib
from collections.abc import Iterable, Sequence

from engine_agent.ingress import responses
from engine_agent.ingress.desired import MODELS_MAP, DesiredHaproxy
from engine_agent.ingress.responses import ErrorResponse
from engine_agent.ingress.settings import BodyParserTier, IngressSettings
from engine_agent.protocol.strict_json import DEEPEST, LONGEST_NAME_CHARS, MOST_CONTAINERS

CONFIG_FILE = "haproxy.cfg"
ADMIN_SOCKET = "admin.sock"
MASTER_SOCKET = "master.sock"
PARSED_SOCKET = "parsed.sock"
"""Where the body parsers send requests back to."""
PARSER_SERVER = "parser"
PARSER_SOCKET = "parser.sock"
"""Where requests with large bodies are sent to, in the folder of their body parser."""
REFUSE_LUA = "refuse.lua"
"""Loaded with the names of the refusals that it is to give."""
READ_BODY_LUA, BODY_SHAPE_LUA = "read_body.lua", "body_shape.lua"
LUA_FILES = ("limits.lua", "pause.lua")
PICK_CELL_LUA, CELLS_UP_LUA = "pick_cell.lua", "cells_up.lua"
CACHE_INDEX_LUA, PROMPT_PREFIXES_LUA = "cache_index.lua", "prompt_prefixes.lua"
"""Every thread has these for itself, because most requests may come to them."""
ADAPTER_CELLS_LUA = "adapter_cells.lua"
"""As these, while there are adapters."""
LIST_MODELS_LUA = "list_models.lua"
HOLD_LUA = "hold.lua"
SCRIPTS = (
    *(
        *LUA_FILES,
        READ_BODY_LUA,
        BODY_SHAPE_LUA,
        REFUSE_LUA,
        PICK_CELL_LUA,
        CELLS_UP_LUA,
        ADAPTER_CELLS_LUA,
        LIST_MODELS_LUA,
        HOLD_LUA,
    ),
    *(CACHE_INDEX_LUA, PROMPT_PREFIXES_LUA),
)
"""The files that lie beside a configuration."""
NO_CELL_SOCKET = "no-cell.sock"
"""Behind it a frontend answers for pools without a cell."""
UNANSWERED_STATUS = 425
"""To a body parser: no cell answered, so it may send the request again. Applications never see it."""
HEAD_ROOM_BYTES = 16 * 1024
"""Room for a request's head beside the longest body: both must lie in one buffer to be read and replayed."""
MAX_REWRITE_BYTES = 4 * 1024
MAX_HEAD_BYTES = 8 * 1024
"""Half the room, because HAProxy keeps some of it for itself and a few bytes for each header."""
MAX_HEADERS, READ_HEADERS = 100, 1000
"""How many headers a request may have, and how many HAProxy reads: more than it reads, or a head that its buffer does
not hold, it answers by itself, in HTML, which no rule can change (HAProxy 2.8, `h1_send_error`)."""
HOT_BUFFERS = 64
"""Free buffers that each thread keeps, because memory fresh from the system must be cleared first."""
MAX_MODEL_BYTES = 200
MODEL_NAME = f"^[A-Za-z][^[:cntrl:]]{{0,{MAX_MODEL_BYTES - 1}}}$"
"""What the quick query takes out of a body and may be the name of a model. Numbers, booleans and lists, which it finds,
too, begin otherwise; the script says what is wrong with those."""
MODEL_LOOKUP_RULE = f"http-request set-var(txn.pool) var(txn.model),map_str({MODELS_MAP})"


def section(head: str, lines: Iterable[str]) -> str:
    return "\n".join([head, *(f"  {line}" for line in lines), ""])


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def global_section(
    settings: IngressSettings,
    structure: str,
    refusals: Sequence[ErrorResponse],
    *,
    body_bytes: int,
    max_connections: int,
    threads: int,
    extra_lines: Iterable[str] = (),
) -> str:
    """`structure` becomes the description that a running HAProxy reports; `body_bytes` is the longest body it holds."""
    buffer_bytes = body_bytes + HEAD_ROOM_BYTES
    return section(
        "global",
        [
            f"description {structure}",
            f"node {settings.ingress_id}",
            f"maxconn {max_connections}",
            f"nbthread {threads}",
            "quick-exit",  # HAProxy 2.8.25 often aborts while it frees its memory at its end
            *_account_lines(settings),
            f"stats socket unix@{ADMIN_SOCKET} mode 600 level admin expose-fd listeners",
            "stats timeout 10s",
            f"hard-stop-after {settings.times.old_worker_s}s",
            f"tune.bufsize {buffer_bytes}",
            f"tune.maxrewrite {MAX_REWRITE_BYTES}",
            f"tune.http.maxhdr {READ_HEADERS}",
            f"tune.memory.hot-size {HOT_BUFFERS * buffer_bytes}",
            *(f"lua-load {name}" for name in LUA_FILES),
            f"lua-load {READ_BODY_LUA} {DEEPEST} {MAX_MODEL_BYTES}",
            # For each thread, because every request comes to it.
            f"lua-load-per-thread {BODY_SHAPE_LUA} {DEEPEST} {LONGEST_NAME_CHARS} {MOST_CONTAINERS}",
            *responses.refusal_service_lines(refusals),
            *extra_lines,
            "log stderr format raw daemon",
        ],
    )


def _account_lines(settings: IngressSettings) -> list[str]:
    """The workers give up root once they listen; the master keeps it, to listen again in a reload."""
    if settings.worker_account is None:
        return []
    uid, gid = settings.worker_account
    return [f"uid {uid}", f"gid {gid}"]


def defaults_section(desired: DesiredHaproxy, settings: IngressSettings) -> str:
    times = settings.times
    return section(
        "defaults",
        [
            "mode http",
            "log global",
            "option httplog",
            "option dontlog-normal",
            "option dontlognull",
            "option http-no-delay",  # without it the first token waits up to 170 ms
            "option abortonclose",
            "option clitcpka",
            "option srvtcpka",
            *(f"{side}tcpka-{setting}" for side in ("cli", "srv") for setting in ("idle 15s", "intvl 5s", "cnt 3")),
            f"timeout connect {times.connect_s}s",
            f"timeout client {times.client_stall_s}s",
            f"timeout server {times.silence_s}s",
            f"timeout tunnel {times.silence_s}s",
            f"timeout http-request {times.request_head_s}s",
            f"timeout http-keep-alive {times.keep_alive_s}s",
            f"timeout check {times.check_timeout_ms}ms",
            f"retries {settings.retries}",
            "option redispatch 1",
            *(responses.error_page_line(error) for error in responses.haproxy_error_pages(desired.retry_after_s)),
        ],
    )


def max_buffered_body_bytes(desired: DesiredHaproxy, settings: IngressSettings) -> int:
    """The longest body that the serving HAProxy reads itself."""
    return min(settings.buffered_body_bytes, desired.max_body_bytes)


def max_parsed_body_bytes(desired: DesiredHaproxy, tier: BodyParserTier) -> int:
    """The longest body that this body parser reads."""
    return min(tier.body_bytes or desired.max_body_bytes, desired.max_body_bytes)


def model_rules(before: Sequence[str] = (), after: Sequence[str] = ()) -> list[str]:
    """Rules that find the model which the body names, or what is wrong with the body. Declares `has_pool` and, for what
    the quick query finds and no table has to know, `is_name`.

    A script reads only what the query finds no name in, after the rules `before` and before the rules `after`.
    """
    return [
        "http-request set-var(txn.model) req.body,json_query('$.model')",
        MODEL_LOOKUP_RULE,
        "acl has_pool var(txn.pool) -m found",
        f"acl is_name var(txn.model) -m reg {MODEL_NAME}",
        *before,
        "http-request lua.read_body if !has_pool !is_name",
        *after,
    ]


def shape_rules() -> list[str]:
    """Rules that refuse a body whose shape a later reader could not take. After `model_rules`."""
    return ["http-request lua.check_shape", f"{responses.BAD_BODY_RULE} if {{ var(txn.body_error) -m found }}"]


def replay_rule(settings: IngressSettings, *, body_bytes: int) -> str:
    """A request that may be replayed is copied when it is sent, as a whole buffer however short it is."""
    most = max(1, settings.replay_bytes // (body_bytes + HEAD_ROOM_BYTES))
    return f"http-request disable-l7-retry if {{ be_conn gt {most} }}"


def refuse_longer_than(limit_bytes: int, size: str) -> tuple[str, str]:
    """The rules that respond 413 when the sample `size` exceeds the limit. A client that waits for 100 before it sends
    the body gets 413 instead."""
    refused, is_longer = responses.too_large(limit_bytes), f"{{ {size} gt {limit_bytes} }}"
    early = f"{responses.return_rule(refused)} if {is_longer} {{ req.hdr(Expect) -m found }}"
    return early, responses.refuse_rule(refused, is_longer)


def encoding_rule() -> str:
    """Refuse a compressed body: what it unpacks to has no bound that its length tells."""
    is_plain = "{ req.fhdr(Content-Encoding) -m str -i identity }"
    return responses.refuse_rule(
        responses.UNSUPPORTED_ENCODING, f"{{ req.fhdr_cnt(Content-Encoding) gt 0 }} !{is_plain}"
    )
