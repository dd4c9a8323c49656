"""Requests that are held: those for a pool without cells whose first one is started because somebody asks. Pure text.

They wait in HAProxy, in a queue of their own behind the server that stands in for cells (`backends.no_cell_frontend`),
and nothing is sent to their clients meanwhile. The queue's one server is a door that takes one request at a time
(`hold.lua`): once a cell has room, it answers the request with a status by which whoever sent it here, and still has it
whole, sends it again. So neither the agent nor the control plane is needed to hold them, a client that leaves gives up
its place, and all counts are HAProxy's own. Of several workers during a reload the newest holds: it alone learns of new
cells.
"""

from engine_agent.ingress import headers, responses
from engine_agent.ingress.desired import HOLD_PREFIX, LOCAL_PREFIX, SPILL_PREFIX
from engine_agent.ingress.hold_maps import COLD_STARTS_MAP, HOLDS_MAP, READY_MAP, WITHHELD_MAP
from engine_agent.ingress.responses import ErrorResponse
from engine_agent.ingress.running import DOOR_SERVER
from engine_agent.ingress.sections import HOLD_LUA, UNANSWERED_STATUS, section
from engine_agent.ingress.settings import IngressSettings
from engine_agent.protocol.ingress_messages import Withheld
from engine_agent.protocol.states import ServingClass

DOOR_SOCKET = "door.sock"
BELL_SOCKET = "held.sock"
"""Where the agent listens for the first request that is held, in the ingress's state directory."""
HELD_TABLE = "held"
"""Backend whose stick table counts what is held: by size, and by tenant and size."""
HELD_KEYS = 16_384
MOST_OFFSET_MS = 500_000
"""What HAProxy's offset of a place in a queue can be is a little more."""
OVERDUE_RETRY_S = 5
SHORT, LONG = "short", "long"
WITHHELD_TEXTS = {
    Withheld.QUOTA: "the quota of its team leaves it none now",
    Withheld.MACHINES: "others that go before it need the machines now",
}
"""What an application is told; whose quota and which others is on the page of the deployment."""
IS_HOLD = f"be_name -m beg {HOLD_PREFIX}"


def may_hold_rule() -> str:
    """Declares `may_hold`: requests of the pool wait for its first cell. Adds to what has been said of it."""
    return f"acl may_hold var(txn.pool),regsub(^pool\\.,),map_str({HOLDS_MAP}) -m found"


def arrival_rules(local: str, hold_s: int) -> list[str]:
    """In a pool's backend: from when a request counts as held, and its place before those that come later."""
    offset_ms = min(MOST_OFFSET_MS, hold_s * 1000)
    none = "!has_cells"
    return [
        "acl has_cells nbsrv gt 1",
        f"acl has_cells str({local}),lua.cells_up,add(0) gt 0",
        f"http-request set-header {headers.WORKER} %pid",
        f"http-request del-header {headers.HELD}",
        f"http-request set-header {headers.HELD} %[date(0,ms)] if {none}",
        f"http-request set-priority-offset int(-{offset_ms}) if {none}",
    ]


def choice_rules() -> list[str]:
    """In the frontend that stands in for cells, after other regions came into question: hold the request. A request of
    another region goes back there, which holds it where no region can serve. One that a worker from before a reload has
    is sent to a cell from here: that worker knows none."""
    return [
        "http-request set-var-fmt(txn.worker) %pid",
        f"http-request set-var(txn.pool) str({LOCAL_PREFIX}),concat(,txn.deployment)",
        f"acl is_own req.hdr({headers.WORKER}),strcmp(txn.worker) eq 0",
        "acl has_cells var(txn.pool),lua.cells_up,add(0) gt 0",
        f"http-request set-var(txn.hold) str({HOLD_PREFIX}),concat(,txn.deployment)",
        f"acl may_hold var(txn.deployment),map_str({HOLDS_MAP}) -m found",
        f"acl is_foreign req.hdr({headers.HOP}) -m found",
        "use_backend %[var(txn.pool)] if may_hold !is_own has_cells",
        "use_backend %[var(txn.hold)] if may_hold !is_foreign",
    ]


def answer_rules(retry_after_s: int) -> list[str]:
    """There: what the door let go is sent again by whoever has it; whom it turned away learns when to come back."""
    ready = f"var(txn.deployment),map_str_int({READY_MAP},0)"
    turned_away = "is_held { status 503 }"
    expected = f"http-after-response set-header Retry-After %[var(txn.left)] if {turned_away}"
    return [
        f"acl is_held {IS_HOLD}",
        f"http-after-response set-var(txn.ready_at) {ready} if {turned_away}",
        f"http-after-response set-var(txn.left) date,neg,add(txn.ready_at) if {turned_away}",
        f"http-after-response set-header Retry-After {min(OVERDUE_RETRY_S, retry_after_s)} if {turned_away}",
        f"{expected} {{ var(txn.left) -m int gt 0 }}",
        f"http-after-response set-header Retry-After %[var(txn.deployment),map_str({COLD_STARTS_MAP})]"
        f" if {turned_away} {{ var(txn.ready_at) -m int eq 0 }}",
    ]


def released_rules() -> list[str]:
    """After the rules for what must not be sent again."""
    is_let_go = f"is_held {{ status {UNANSWERED_STATUS} }}"
    return [
        f"http-after-response set-header {headers.RETRY} 1 if {is_let_go}",
        f"http-after-response set-status 503 if {is_let_go}",
    ]


def hold_backend(pool: str, hold_s: int, settings: IngressSettings, *, has_tenants: bool) -> str:
    """The queue of a pool's held requests."""
    limits = settings.hold
    full = responses.return_rule(too_many())
    is_long = f"{{ req.hdr_val(content-length) gt {settings.buffered_body_bytes} }}"
    has_tenant = f"{{ req.hdr({headers.TENANT}) -m found }}"
    tenant = f"http-request track-sc1 req.hdr({headers.TENANT}),concat(/,txn.size) table {HELD_TABLE} if {has_tenant}"
    is_size = {size: f"{{ var(txn.size) -m str {size} }}" for size in (SHORT, LONG)}
    most = {SHORT: settings.max_held, LONG: settings.max_held_long}
    rules = [
        f"http-request set-var(txn.withheld) var(txn.deployment),map_str({WITHHELD_MAP})",
        *_withheld_rules(),
        f"{responses.return_rule(not_held())} if {{ req.hdr({headers.CLASS}) {ServingClass.BATCH} }}",
        f"http-request set-var(txn.size) str({SHORT})",
        # A body that does not say how long it is counts as a long one.
        f"http-request set-var(txn.size) str({LONG}) if {is_long} or !{{ req.hdr(content-length) -m found }}",
        f"http-request track-sc0 var(txn.size) table {HELD_TABLE}",
        *(f"{full} if {is_size[size]} {{ sc0_conn_cur gt {count} }}" for size, count in most.items()),
    ]
    if has_tenants:
        of_tenant = {size: max(1, round(count * limits.tenant_share)) for size, count in most.items()}
        rules += [tenant, *(f"{full} if {is_size[size]} {{ sc1_conn_cur gt {n} }}" for size, n in of_tenant.items())]
    return section(
        f"backend {HOLD_PREFIX}{pool}",
        [
            f"timeout queue {hold_s}s",
            *rules,
            *_deadline_rules(),
            *(
                f"http-request set-priority-class int({queue.priority}) if {{ req.hdr({headers.CLASS}) {each} }}"
                for each, queue in settings.queues.items()
                if queue.priority
            ),
            f"http-request set-header {headers.WORKER} %pid",
            responses.error_page_line(too_late()),
            f"server {DOOR_SERVER} unix@{DOOR_SOCKET} maxconn 1 pool-max-conn 0",
        ],
    )


def _deadline_rules() -> list[str]:
    """Who cannot wait for the first cell is told at once."""
    deadline = f"req.hdr_val({headers.DEADLINE})"
    return [
        f"http-request set-var(txn.ready_at) var(txn.deployment),map_str_int({READY_MAP},0)",
        "http-request set-var(txn.left) date,neg,add(txn.ready_at)",
        f"http-request set-var(txn.left) var(txn.deployment),map_str_int({COLD_STARTS_MAP},0)"
        " if { var(txn.ready_at) -m int eq 0 }",
        "http-request set-var(txn.left_ms) var(txn.left),mul(1000)",
        f"{responses.return_rule(too_short())} if {{ {deadline} gt 0 }} {{ {deadline},sub(txn.left_ms) lt 0 }}",
    ]


def _withheld_rules() -> list[str]:
    """Who would wait for a cell that may have no machines is told at once."""
    return [f"{responses.return_rule(withheld(by))} if {{ var(txn.withheld) -m str {by} }}" for by in WITHHELD_TEXTS]


def door_frontend(settings: IngressSettings) -> list[str]:
    """Behind the queues' server: one request of each pool at a time."""
    again = f"http-request return status {UNANSWERED_STATUS}"
    lines = [
        settings.own_socket(DOOR_SOCKET),
        "no log",
        *responses.form_rules(),
        # What an older worker held goes to this one's queue: its door is this one's, too.
        "http-request set-var-fmt(txn.worker) %pid",
        f"{again} if !{{ req.hdr({headers.WORKER}),strcmp(txn.worker) eq 0 }}",
        f"http-request set-var(txn.deployment) req.hdr({headers.DEPLOYMENT})",
        f"http-request set-var(txn.pool) str({LOCAL_PREFIX}),concat(,txn.deployment)",
        f"http-request set-var(txn.spill) str({SPILL_PREFIX}),concat(,txn.deployment)",
        f"http-request set-var(txn.hold_s) var(txn.deployment),map_str_int({HOLDS_MAP},0)",
        f"http-request set-var(txn.held_since_ms) req.hdr({headers.HELD})",
        "http-request lua.wait_for_cell",
        f"{again} if {{ var(txn.goes) -m found }}",
        *_withheld_rules(),
        responses.return_rule(too_late()),
    ]
    stick = f"stick-table type string len 96 size {HELD_KEYS} expire 1h store conn_cur"
    return [section("frontend door", lines), section(f"backend {HELD_TABLE}", [stick])]


def global_lines() -> list[str]:
    """Of the section `global`."""
    return [f"lua-load {HOLD_LUA}"]


def too_many() -> ErrorResponse:
    return ErrorResponse(503, "too_many_held", _text("too many requests wait for its first cell"))


def too_late() -> ErrorResponse:
    return ErrorResponse(503, "no_cell_in_time", _text("its first cell was not ready in the time that requests wait"))


def withheld(by: Withheld) -> ErrorResponse:
    return ErrorResponse(503, "cell_withheld", _text(WITHHELD_TEXTS[by]))


def too_short() -> ErrorResponse:
    return ErrorResponse(503, "deadline_before_cell", _text("its first cell is expected after this deadline"))


def not_held() -> ErrorResponse:
    return ErrorResponse(503, "no_ready_cell", _text("batch requests do not wait for its first cell"))


def _text(what: str) -> str:
    return f"no cell serves `%[req.hdr({headers.DEPLOYMENT})]`, and {what}; try again after Retry-After"
