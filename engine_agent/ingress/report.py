"""What an ingress tells the control plane, made of what it saw. Pure."""

from collections import Counter

from engine_agent.ingress.ejection import Key
from engine_agent.ingress.layout import STANDBY_SUFFIX, Layout
from engine_agent.ingress.running import CellView, Running
from engine_agent.ingress.tending import TendedHaproxy
from engine_agent.protocol.messages import CellTraffic, IngressChanges, JsonObject

EJECTED = "ejected: its answers are errors while other cells do better"


def view_cells(running: Running | None, layout: Layout, ejected: frozenset[Key]) -> dict[str, str]:
    """Every cell of the table as HAProxy sees it; `unknown` while it does not have it, `down` if it is ejected."""
    seen = {(server.backend, server.name): server.view for server in running.servers} if running else {}
    seen |= dict.fromkeys(ejected & seen.keys(), CellView.DOWN)
    cells = [server for server in layout.servers if server.cell]
    return {server.cell: seen.get((server.backend, server.name), CellView.UNKNOWN) for server in cells}


def telemetry(running: Running | None, layout: Layout) -> JsonObject:
    """Counters since the worker started, by pool; whoever reads them takes differences."""
    if running is None:
        return {}
    backends = {backend.name: backend for backend in running.backends}
    pools = {}
    for pool in layout.pools:
        local, spill = backends.get(pool.local), backends.get(pool.spill)
        if local is not None and spill is not None:
            pools[pool.name] = {
                "in_flight": local.in_flight,
                "queued": local.queued,
                "requests_total": local.requests_total,
                "errors_total": local.errors_total,
                "spilled_in_flight": spill.in_flight,
                "spilled_total": spill.requests_total,
                "spilled_to": _spilled_to(pool.spill, running),
            }
    return {"worker_pid": running.worker_pid, "pools": pools}


def cell_traffic(running: Running | None, layout: Layout, ejected: frozenset[Key]) -> dict[str, CellTraffic]:
    """Counters of every cell of the table that HAProxy has."""
    cell_of = {(server.backend, server.name): server.cell for server in layout.servers if server.cell}
    servers = running.servers if running else ()
    return {
        cell_of[server.backend, server.name]: CellTraffic(
            in_flight=server.in_flight,
            queued=server.queued,
            requests_total=server.requests_total,
            errors_total=server.errors_total,
            failures_total=server.failures_total,
            retries_total=server.retries_total,
            redispatches_total=server.redispatches_total,
            connections_total=server.connections_total,
            bytes_in_total=server.bytes_in_total,
            bytes_out_total=server.bytes_out_total,
            ejected=(server.backend, server.name) in ejected,
            reason=EJECTED if (server.backend, server.name) in ejected else server.reason,
        )
        for server in servers
        if (server.backend, server.name) in cell_of
    }


def changes(front: TendedHaproxy) -> IngressChanges:
    """What was done to the HAProxy that serves."""
    lost = front.running.log_lines_lost_total if front.running else 0
    return IngressChanges(front.applied_total, front.reloads_total, front.starts_total, lost)


def _spilled_to(backend: str, running: Running) -> dict[str, int]:
    """Region -> requests that were sent there, whatever its role; without it the two ends of a spill both count it."""
    sent: Counter[str] = Counter()
    for server in running.servers:
        if server.backend == backend:
            sent[server.name.removesuffix(STANDBY_SUFFIX)] += server.requests_total
    return dict(sent)
