"""Backends as text: the cells of a pool, the other regions that may take its requests, and the reader of long bodies.
Pure. It never decides which of the servers changes; that is `plan`."""

from urllib.parse import quote

from engine_agent.ingress import affinity, answers, headers, hops
from engine_agent.ingress.classes import ServingClass
from engine_agent.ingress.layout import Layout, PoolBackends, Server
from engine_agent.ingress.sections import (
    READER_FOLDER,
    READER_SOCKET,
    UNSENT_STATUS,
    held_bytes,
    replay_rule,
    section,
)
from engine_agent.ingress.settings import IngressSettings, Times

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
            f"http-response set-header {headers.CELL} %[srv_name,regsub(-g[0-9]+$,)]",
            f"http-response set-header {headers.REGION} {settings.region}",
            f"http-response set-header {headers.DEPLOYMENT} {pool.name}",
            *_servers(pool.local, layout, settings.times),
        ],
    )


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
        f"http-request set-priority-class int({settings.queues[own].priority})",
    ]
    for each in less_urgent:
        priority = settings.queues[each].priority
        rules.append(f"http-request set-priority-class int({priority}) if {{ req.hdr({headers.CLASS}) {each} }}")
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


def reader_backend(layout: Layout, settings: IngressSettings) -> str:
    """Where long requests go. While the reader is away they are told so at once: its agent starts it again."""
    address = f"unix@{READER_FOLDER}/{READER_SOCKET}"
    check = f"check inter {settings.times.check_interval_ms}ms fastinter {settings.times.check_fast_ms}ms fall 1 rise 1"
    at_once = "observe layer4 error-limit 1 on-error mark-down"
    lines = [
        f"timeout queue {settings.times.reader_wait_s}s",
        f"http-response set-status 503 if {{ status {UNSENT_STATUS} }}",
        *(answers.substituted(answer) for answer in answers.reader_own(layout.retry_after_s)),
        f"server reader {address} {check} {at_once} maxconn {settings.max_long_requests} pool-max-conn 0",
    ]
    return section("backend reader", lines)
