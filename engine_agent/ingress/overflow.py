"""Second attempts: which requests are sent once more, and where. Pure text.

Only a process that still has a request can send it again after its backend failed. Large requests are kept by their
body parser, short ones by the backend `again` of this module. Both send to the frontend `parsed`, which counts each
attempt.

A connection that closes without a byte may be the request's fault: two of them, in any regions, end the request.
HAProxy answers a lost connection with 502, or, where it had used that connection before, closes its own without a byte.
So an attempt counts as dropped until it is answered. A request that reached no cell is not at fault: it waits until
health checks have found the dead cells, and is sent again.

A refusal is an answer, and is overflow: refused here, the next attempt leaves for another region that has room; refused
there, the next one stays. A region takes overflow only while enough of its places are free, and an ingress stops
offering any while others refuse it. A request with a hop mark has one attempt here: its own region has the others.
"""

from engine_agent.ingress import access_log, headers, responses
from engine_agent.ingress.desired import LOCAL_PREFIX, SPILL_PREFIX, DesiredHaproxy
from engine_agent.ingress.sections import (
    PARSED_SOCKET,
    UNANSWERED_STATUS,
    max_buffered_body_bytes,
    replay_rule,
    section,
)
from engine_agent.ingress.settings import IngressSettings
from engine_agent.protocol.states import ServingClass

AGAIN_BACKEND = "again"
SHORT_RETRIES = 4
"""Of a short request: after a dropped connection, after cells that none could reach, to another region, and back."""
DROPS = 2
"""Connections that closed without a byte, after which a request is not sent again."""
PAUSE_CHECKS = 4
"""A request waits for so many fast health checks before it is sent again; two of them take a dead cell out."""
ATTEMPTS_TABLE = "attempts"
"""Backend whose stick table has, for a moment, how often each request was tried and where it goes next."""
OVERFLOW_TABLE = "overflow"
"""Backend whose stick table counts each pool's overflow, and what of that other regions refused."""
SHORT = "short"
"""How the id of the attempts of a short request begins."""
ATTEMPTS_EXPIRE_S = 10
"""An entry that a request uses stays; between two attempts are milliseconds."""
ATTEMPTS, POOLS = 32_768, 4096
NEXT, DROPPED, WAITS = 0, 1, 2
"""Tags of an entry: where the next attempt goes, how many attempts were not answered, and whether the next one waits
for health checks."""
LEAVES, STAYS = 1, 2
"""Values of `NEXT` for a request that was refused: by its own region, and by another one."""
LARGE_TRIES_AT_HOME = 8
"""Of the 12 that a body parser has: each meets one cell, where a try of a short request meets as many as refuse it."""
ONE_FREE_IN = {ServingClass.REALTIME: 10, ServingClass.NEAR_REALTIME: 4, ServingClass.BATCH: 2}
"""Of so many places of a pool here, one must be free when another region's overflow of this class comes: trunk
reservation (R. S. Krupp, "Stabilization of alternate routing networks", 1982). Without it two regions near their
capacity take each other's requests in place of their own."""
REFUSALS_PER_S = 10
"""Of one pool's overflow at one ingress: from here on it offers none, until fewer were refused within a second."""


def strip_rules() -> list[str]:
    return [f"http-request del-header {headers.OVERFLOW} if !is_marked"]


def large_body_rule() -> str:
    """A large request is counted from its body parser on."""
    return f"http-request set-header {headers.ATTEMPT} %[uuid]"


_PREFIXES_RULE = f"http-request set-header {headers.PREFIXES} %[var(txn.prefixes)] if {{ var(txn.prefixes) -m found }}"


def again_backend(desired: DesiredHaproxy, settings: IngressSettings) -> str:
    """Short requests. What was found out about one goes along: pool, model, affinity, beginnings."""
    return section(
        f"backend {AGAIN_BACKEND}",
        [
            f"retry-on conn-failure empty-response {UNANSWERED_STATUS}",
            f"retries {SHORT_RETRIES}",
            replay_rule(settings, body_bytes=max_buffered_body_bytes(desired, settings)),
            f"http-request set-header {headers.ATTEMPT} {SHORT}-%[uuid]",
            f"http-request set-header {headers.POOL} %[var(txn.pool)]",
            f"http-request set-header {headers.MODEL} %[var(txn.model),url_enc]",
            f"http-request set-header {headers.AFFINITY} %[var(txn.affinity)] if {{ var(txn.affinity) -m found }}",
            *([_PREFIXES_RULE] if desired.features.by_cache else ()),
            access_log.class_rule(),
            *access_log.trail_rules(),
            f"http-response del-header {headers.MODEL}",
            f"http-response set-status 503 if {{ status {UNANSWERED_STATUS} }}",
            f"server parsed unix@{PARSED_SOCKET} pool-max-conn 0",
        ],
    )


def attempt_rules(settings: IngressSettings) -> list[str]:
    """In the frontend `parsed`: count this attempt. Declares `is_short`, `must_leave`, `must_stay`."""
    waits = f"{{ sc_get_gpt({WAITS},1) gt 0 }} or {{ sc_get_gpt({DROPPED},1) gt 0 }}"
    # One of another region was counted there.
    is_over = f"{{ sc_get_gpt({DROPPED},1) ge {DROPS} }} or is_marked {{ sc_get_gpt({DROPPED},1) gt 0 }}"
    return [
        f"http-request set-var(txn.attempt) req.hdr({headers.ATTEMPT})",
        f"http-request del-header {headers.ATTEMPT}",
        f"http-request track-sc1 var(txn.attempt) table {ATTEMPTS_TABLE}",
        f"{responses.return_rule(responses.BAD_CELL_ANSWER)} if {is_over}",
        f"http-request lua.pause {PAUSE_CHECKS * settings.times.check_fast_ms} if {waits}",
        "http-request sc-inc-gpc0(1)",
        f"http-request sc-set-gpt({WAITS},1) 0",
        f"http-request sc-set-gpt({DROPPED},1) sc_get_gpt({DROPPED},1),add(1)",
        "http-request set-var(txn.is_attempt) bool(true)",
        f"acl is_short var(txn.attempt) -m beg {SHORT}",
        f"acl must_leave sc_get_gpt({NEXT},1) eq {LEAVES}",
        f"acl must_stay sc_get_gpt({NEXT},1) eq {STAYS}",
    ]


def pool_rules() -> list[str]:
    """Which pool a short request is for was found out before: a second draw could end elsewhere."""
    return [
        f"http-request set-var(txn.pool) req.hdr({headers.POOL}) if is_short !is_marked",
        f"http-request del-header {headers.POOL} if !is_marked",
    ]


def leave_rules(retry_after_s: int) -> list[str]:
    """Say of a request that leaves for want of room here that it is overflow. After the rules of availability."""
    return [
        f"{responses.return_rule(responses.no_free_cell(retry_after_s))} if must_leave !can_spill",
        f"http-request set-header {headers.OVERFLOW} 1 if must_leave",
        "http-request set-var(txn.overflow) bool(true) if must_leave",
    ]


def answer_rules(settings: IngressSettings, *, has_regions: bool) -> list[str]:
    """Whether a failure is the final answer, or the sender of the attempt is to send the request again."""
    return [
        *_dropped_rules(),
        *(_refused_rules() if has_regions else _refused_at_home_rules()),
        *_unreached_rules(settings),
        f"http-after-response set-status {UNANSWERED_STATUS} if {{ var(txn.again) -m found }}",
    ]


def _dropped_rules() -> list[str]:
    """HAProxy's own 502: the cell, or the other region's ingress, closed the connection. Everything else is an
    answer."""
    is_dropped = f"{{ be_name -m beg {LOCAL_PREFIX} {SPILL_PREFIX} }} {{ status 502 }}"
    return [
        f"http-after-response set-var(txn.dropped) bool(true) if {is_dropped} !{{ res.hdr({headers.CELL}) -m found }}",
        "acl was_dropped var(txn.dropped) -m found",
        "acl is_attempt var(txn.is_attempt) -m found",
        f"http-after-response sc-set-gpt({DROPPED},1) sc_get_gpt({DROPPED},1),sub(1) if is_attempt !was_dropped",
        "http-after-response set-var(txn.again) bool(true)"
        f" if !is_marked was_dropped {{ sc_get_gpt({DROPPED},1) lt {DROPS} }}",
    ]


def _unreached_rules(settings: IngressSettings) -> list[str]:
    """HAProxy's own 503 after its last try to connect: the request reached no cell."""
    is_last = f"{{ sc_get_gpc0(1) gt {SHORT_RETRIES} }}"
    is_own = f"{{ status 503 }} {{ be_name -m beg {LOCAL_PREFIX} }} !{{ res.hdr({headers.CELL}) -m found }}"
    return [
        f"http-after-response set-var-fmt(txn.tries) %rc if {is_own}",
        f"acl is_unreached var(txn.tries) -m str {settings.retries} +{settings.retries}",
        f"http-after-response sc-set-gpt({WAITS},1) 1 if !is_marked is_unreached !{{ var(txn.again) -m found }}",
        f"http-after-response set-var(txn.again) bool(true) if !is_marked is_unreached !{is_last}",
    ]


def _refused_at_home_rules() -> list[str]:
    """Where there are no other regions: a body parser tries the next cell; for a short request its pool did."""
    is_refused = f"{{ status 503 }} {{ res.hdr({headers.RETRY}) -m found }}"
    return [f"http-after-response set-var(txn.again) bool(true) if !is_marked !is_short {is_refused}"]


def _refused_rules() -> list[str]:
    by_cell = f"{{ status 503 }} {{ res.hdr({headers.RETRY}) -m found }}"
    by_nobody = f"{{ status 503 }} !{{ res.hdr({headers.CELL}) -m found }}"
    is_last = f"{{ res.hdr({headers.UNSERVED}) -m found }}"
    once_more = "http-after-response set-var(txn.again) bool(true) if was_refused"
    next_is = f"http-after-response sc-set-gpt({NEXT},1)"
    return [
        f"http-after-response set-var(txn.refused) bool(true) if !is_marked {by_cell} or !is_marked {by_nobody}",
        f"http-after-response unset-var(txn.refused) if {is_last}",
        f"http-after-response del-header {headers.UNSERVED}",
        "acl was_refused var(txn.refused) -m found",
        f"acl was_here be_name -m beg {LOCAL_PREFIX}",
        f"acl was_there be_name -m beg {SPILL_PREFIX}",
        "acl was_overflow var(txn.overflow) -m found",
        f"acl may_try_here sc_get_gpc0(1) lt {LARGE_TRIES_AT_HOME}",
        "acl may_try_here var(txn.spill),nbsrv eq 0",
        # One cell refused a large request: there may be others.
        f"{once_more} was_here !is_short may_try_here {{ res.hdr({headers.RETRY}) -m found }}",
        "acl goes_again var(txn.again) -m found",
        # Nobody here could take it.
        f"{next_is} {LEAVES} if was_refused was_here can_spill !goes_again",
        f"{once_more} was_here can_spill",
        # Another region had no room: for its share, which this one may serve; or for a large one, which tries the next.
        f"{next_is} {STAYS} if was_refused was_there !was_overflow can_serve",
        f"{once_more} was_there !was_overflow can_serve",
        f"{once_more} was_there was_overflow !is_short",
    ]


def marked_answer_rules() -> list[str]:
    """A large request of another region that one cell refused: its body parser tries the next."""
    is_refused = f"{{ status 503 }} {{ res.hdr({headers.RETRY}) -m found }}"
    return [f"http-after-response set-status {UNANSWERED_STATUS} if is_marked {is_refused}"]


def admission_rules(retry_after_s: int) -> list[str]:
    """In a pool's backend: take another region's overflow only while there is room. Here `be_conn` counts what runs and
    what waits, this request too; the class has been judged."""
    full = responses.return_rule(responses.queue_full(retry_after_s))
    rules = [
        f"acl is_overflow req.hdr({headers.OVERFLOW}) -m found",
        "http-request set-var(txn.in_use) be_conn if is_overflow",
    ]
    for each, places in ONE_FREE_IN.items():
        has_room = f"{{ be_conn_free,mul({places - 1}),sub(txn.in_use) ge 0 }}"
        rules.append(f"{full} if is_overflow {{ req.hdr({headers.CLASS}) {each} }} !{has_room}")
    return rules


def budget_rules(pool: str, retry_after_s: int) -> list[str]:
    """In the backend of a pool's other regions: offer no overflow while too much of it was refused."""
    spent = f"{{ str({pool}),table_http_fail_rate({OVERFLOW_TABLE}) ge {REFUSALS_PER_S} }}"
    refused = responses.return_rule(responses.queue_full(retry_after_s), (headers.UNSERVED, "1"))
    return [
        f"acl is_overflow req.hdr({headers.OVERFLOW}) -m found",
        f"{refused} if is_overflow {spent}",
        f"http-request track-sc0 str({pool}) table {OVERFLOW_TABLE} if is_overflow",
    ]


def stores(*, has_regions: bool) -> list[str]:
    """The sections of the stick tables."""
    attempts = f"stick-table type string len 48 size {ATTEMPTS} expire {ATTEMPTS_EXPIRE_S}s store gpc0,gpt(3)"
    if not has_regions:
        return [section(f"backend {ATTEMPTS_TABLE}", [attempts])]
    of_pools = f"stick-table type string len 80 size {POOLS} expire 1d store http_req_cnt,http_fail_rate(1s)"
    return [section(f"backend {ATTEMPTS_TABLE}", [attempts]), section(f"backend {OVERFLOW_TABLE}", [of_pools])]
