"""Backends as text: the cells of a pool, the other regions that may take its requests, and the readers of long bodies.
Pure. It never decides which of the servers changes; that is `plan`."""

from urllib.parse import quote

from engine_agent.ingress import access_log, affinity, answers, headers, hops, keys
from engine_agent.ingress.classes import ServingClass
from engine_agent.ingress.layout import Layout, PoolBackends, Server
from engine_agent.ingress.running import NOBODY
from engine_agent.ingress.sections import (
    NOBODY_SOCKET,
    READER_SOCKET,
    UNSENT_STATUS,
    held_bytes,
    refuse_longer_than,
    replay_rule,
    section,
)
from engine_agent.ingress.settings import IngressSettings, ReaderTier, Times

IS_NOBODY = f"{{ srv_name {NOBODY} }}"
HAPROXY_PRIORITY = 0
"""Of a request that nothing was said about."""
FAILURES_IN_A_ROW = 5
"""Of a cell, without a success between them: then nothing new goes there until it was asked for its health again."""
RETRIES = (
    # A cell's 503 says that it did not send the request to its engine.
    "retry-on conn-failure empty-response 503",
    # Safe, because an answer that never began is asked for again.
    "http-reuse always",
)


def server_arguments(server: Server, times: Times) -> str:
    """A server's address and keywords, the same in the file and for `add server`, which inherits no defaults."""
    host = f"[{server.address}]" if ":" in server.address else server.address
    words = [f"{host}:{server.port}", "check", f"fastinter {times.check_fast_ms}ms", "fall 2", "rise 1"]
    words += [*_watch(server), "on-error mark-down", f"pool-purge-delay {times.idle_purge_ms}ms"]
    words += [f"weight {server.weight}"]
    if server.agent_check_port is not None:
        words += [f"inter {times.check_interval_ms}ms", f"maxconn {server.max_connections}", "agent-check"]
        words += [f"agent-inter {times.check_interval_ms}ms", f"agent-addr {server.address}"]
        words += [f"agent-port {server.agent_check_port}"]
    else:
        words += [f"inter {times.spill_check_interval_ms}ms"]
    return " ".join([*words, "backup"] if server.backup else words)


def _watch(server: Server) -> list[str]:
    """What of the traffic itself takes a server away until its next check.

    A cell's errors count as well, and so a few are allowed: one bad request fails at every cell. A refused connection
    is tried elsewhere, and another region's errors are not its ingress's.
    """
    if server.cell:
        return ["observe layer7", f"error-limit {FAILURES_IN_A_ROW}"]
    return ["observe layer4", "error-limit 1"]


def pool_backend(pool: PoolBackends, layout: Layout, settings: IngressSettings) -> str:
    queue = settings.queues[pool.serving_class]
    return section(
        f"backend {pool.local}",
        [
            "balance leastconn",
            *RETRIES,
            f"timeout queue {queue.wait_s}s",
            *_check("/healthz"),
            *_queue_limits(pool.serving_class, layout, settings),
            replay_rule(settings, body_bytes=held_bytes(layout, settings)),
            *_priorities(pool.serving_class, settings),
            f"http-request set-header {headers.DEPLOYMENT} {pool.name}",
            *(affinity.PICK_RULES if pool.has_affinity else ()),
            *_stand_in(layout),
            f"http-response set-header {headers.CELL} %[srv_name,regsub(-g[0-9]+$,)] if !{IS_NOBODY}",
            f"http-response set-header {headers.REGION} {settings.region}",
            f"http-response set-header {headers.DEPLOYMENT} {pool.name}",
            *_servers(pool.local, layout, settings.times),
        ],
    )


def _stand_in(layout: Layout) -> list[str]:
    """Who gets a request while no cell can take it.

    Without, one that was sent and came back unanswered as the last cell went down would end in a closed connection:
    HAProxy takes it for a keep-alive connection that idled too long.
    """
    return [
        f"http-response set-status 503 if {IS_NOBODY}",
        f"http-response set-header Retry-After {answers.retry_after(layout.retry_after_s)}"
        " if { status 503 } !{ res.hdr(Retry-After) -m found }",
        f"server {NOBODY} unix@{NOBODY_SOCKET} backup",
    ]


def nobody_frontend() -> str:
    """Says of every request that nobody could take it. With a status that is not tried again; the backend mends it."""
    answer = f"http-request return status 500 {answers.body_of(answers.NO_READY_CELL_HERE)}"
    return section("frontend nobody", [f"bind unix@{NOBODY_SOCKET} mode 600", "no log", answer])


def _queue_limits(pool_class: ServingClass, layout: Layout, settings: IngressSettings) -> list[str]:
    """Who may wait at all. Less urgent requests may fill half of the queue, so that there is room to overtake them."""
    full = answers.returned(answers.queue_full(layout.retry_after_s))
    waiting = settings.queues[pool_class].waiting_per_cell
    rules = [f"{full} if {{ avg_queue gt {waiting} }}"]
    if less_urgent := list(ServingClass)[list(ServingClass).index(pool_class) + 1 :]:
        is_less = f"{{ req.hdr({headers.CLASS}) {' '.join(less_urgent)} }}"
        rules.append(f"{full} if {{ avg_queue gt {waiting // 2} }} {is_less}")
    return rules


def _priorities(pool_class: ServingClass, settings: IngressSettings) -> list[str]:
    classes = list(ServingClass)
    own, *less_urgent = classes[classes.index(pool_class) :]
    is_less = f" if !{{ req.hdr({headers.CLASS}) {' '.join(less_urgent)} }}" if less_urgent else ""
    rules = [
        # The cell goes by it, too, and must not take a pool's batch work for anything else.
        f"http-request set-header {headers.CLASS} {own}{is_less}",
        f"http-request set-var(txn.log_class) req.hdr({headers.CLASS})",
    ]
    for each in (own, *less_urgent):
        if (priority := settings.queues[each].priority) != HAPROXY_PRIORITY:
            is_each = "" if each is own else f" if {{ req.hdr({headers.CLASS}) {each} }}"
            rules.append(f"http-request set-priority-class int({priority}){is_each}")
    return rules


def spill_backend(pool: PoolBackends, layout: Layout, settings: IngressSettings) -> str:
    return section(
        f"backend {pool.spill}",
        [
            "balance roundrobin",
            "option allbackups",
            "retry-on conn-failure empty-response",  # a 503 comes from a region that tried its own cells
            f"timeout queue {settings.queues[pool.serving_class].wait_s}s",
            *_check(f"/healthz?model={quote(pool.probe_model, safe='')}"),
            access_log.class_rule(),
            *hops.mark_rules(settings.region),
            *_servers(pool.spill, layout, settings.times),
        ],
    )


def _check(uri: str) -> list[str]:
    return [
        "option httpchk",
        f"http-check send meth GET uri {uri} ver HTTP/1.1 hdr Host switchyard",
        "http-check expect status 200",
    ]


def _servers(backend: str, layout: Layout, times: Times) -> list[str]:
    # A draining cell starts in maintenance, so that no request slips in before the agent sets it to drain.
    return [
        f"server {server.name} {server_arguments(server, times)}{' disabled' if server.drain else ''}"
        for server in layout.servers
        if server.backend == backend
    ]


def reader_backend(tier: ReaderTier, layout: Layout, settings: IngressSettings) -> str:
    """Where long requests go. While the reader is away they are told so at once: its agent starts it again."""
    in_use = layout.in_use
    address = f"unix@{tier.name}/{READER_SOCKET}"
    check = f"check inter {settings.times.check_interval_ms}ms fastinter {settings.times.check_fast_ms}ms fall 1 rise 1"
    at_once = "observe layer4 error-limit 1 on-error mark-down"
    lines = [
        f"timeout queue {settings.times.reader_wait_s}s",
        refuse_longer_than(layout.max_body_bytes, "req.hdr_val(content-length)"),
        answers.refused(answers.long_bodies_unread(layout.retry_after_s), "{ nbsrv eq 0 }"),
        access_log.ARRIVAL_RULE,
        access_log.class_rule(),
        *([f"http-request set-header {headers.AFFINITY} wanted"] if in_use.affinity or in_use.sticky_splits else ()),
        *((keys.long_scope_rule(), *keys.limit_rules()) if in_use.keys else ()),
        # For the access log: the name came out of the body.
        f"http-response set-var(txn.model) res.hdr({headers.MODEL}),url_dec if {{ res.hdr({headers.MODEL}) -m found }}",
        f"http-response del-header {headers.MODEL}",
        f"http-response set-status 503 if {{ status {UNSENT_STATUS} }}",
        *(answers.substituted(answer) for answer in answers.reader_own(layout.retry_after_s)),
        f"server reader {address} {check} {at_once} maxconn {settings.places_at(tier)} pool-max-conn 0",
    ]
    return section(f"backend {tier.name}", lines)
