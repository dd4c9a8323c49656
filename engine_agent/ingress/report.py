"""What an ingress tells the control plane, made of what it saw. Pure."""

from collections import Counter

from engine_agent.ingress.layout import STANDBY_SUFFIX, Layout
from engine_agent.ingress.running import CellView, Running
from engine_agent.protocol.messages import JsonObject


def view_cells(running: Running | None, layout: Layout) -> dict[str, str]:
    """Every cell of the table as HAProxy sees it; `unknown` where it does not have it (yet)."""
    seen = {(server.backend, server.name): server.view for server in running.servers} if running else {}
    cells = [server for server in layout.servers if server.cell]
    return {server.cell: seen.get((server.backend, server.name), CellView.UNKNOWN) for server in cells}


def telemetry(running: Running | None, layout: Layout) -> JsonObject:
    """Counters since the worker started, by pool and by cell; whoever reads them takes differences."""
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
    cell_of = {(server.backend, server.name): server.cell for server in layout.servers if server.cell}
    cells = {
        cell_of[server.backend, server.name]: {
            "in_flight": server.in_flight,
            "queued": server.queued,
            "requests_total": server.requests_total,
            "errors_total": server.errors_total,
            "retries_total": server.retries_total,
            "reason": server.reason,
        }
        for server in running.servers
        if (server.backend, server.name) in cell_of
    }
    return {"worker_pid": running.worker_pid, "pools": pools, "cells": cells}


def _spilled_to(backend: str, running: Running) -> dict[str, int]:
    """Region -> requests that were sent there, whatever its role; without it the two ends of a spill both count it."""
    sent: Counter[str] = Counter()
    for server in running.servers:
        if server.backend == backend:
            sent[server.name.removesuffix(STANDBY_SUFFIX)] += server.requests_total
    return dict(sent)
