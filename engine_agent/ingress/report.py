"""The report of an ingress to the control plane: views and counters of cells, pools and application keys. Pure.
Thousands of keys do not fit one report, so reports take turns. All counts are totals, so a late or repeated report
changes nothing."""

import re
from collections import Counter
from collections.abc import Mapping

import msgspec

from engine_agent.ingress.desired import DesiredHaproxy, ServerKey, region_of
from engine_agent.ingress.running import CellView, RunningBackend, RunningHaproxy
from engine_agent.ingress.steering import Steered
from engine_agent.ingress.supervisor import HaproxySupervisor
from engine_agent.protocol.ingress_messages import (
    CellTraffic,
    IngressChanges,
    IngressTelemetry,
    KeyCounts,
    PoolTraffic,
    Refusals,
)
from engine_agent.protocol.stream_counts import StreamTotals

KEY_COUNTS_COMMAND = "show table keys"
KEY_COUNTS_INTERVAL_S = 5.0
"""Maximum age of counts. Reading 20,000 keys takes about 50 ms."""
KEYS_PER_REPORT = 2000
"""About 40 bytes each, well below the limit of a frame."""
TURN_S = 15.0
"""Three times the interval at which the control plane reads reports, so that it misses none."""
_ENTRY = re.compile(r"key=(\S{1,80}) .{0,300}\bhttp_req_cnt=(\d+) gpc0=(\d+) gpc1=(\d+)")

KeyTotals = Mapping[str, tuple[int, int, int]]
"""Prefix of a key -> its requests, of these over a limit, and answered with 5xx."""


def read_key_counts(text: str) -> dict[str, tuple[int, int, int]]:
    matches = (_ENTRY.search(line) for line in text.splitlines())
    return {entry[1]: (int(entry[2]), int(entry[3]), int(entry[4])) for entry in matches if entry}


class KeyCounting:
    """The counts of one worker, in turns. `worker` identifies one life of a worker on this machine."""

    def __init__(self) -> None:
        self._worker = ""
        self._counts: KeyTotals = {}
        self._counted_at_s = -KEY_COUNTS_INTERVAL_S
        self._turn_began_s = 0.0
        self._first = 0

    def is_due(self, worker: str, now_s: float) -> bool:
        return worker != self._worker or now_s >= self._counted_at_s + KEY_COUNTS_INTERVAL_S

    def update(self, worker: str, counts: KeyTotals, now_s: float) -> None:
        self._worker, self._counts, self._counted_at_s = worker, counts, now_s

    def report(self, now_s: float) -> KeyCounts | None:
        if not self._counts:
            return None
        if now_s >= self._turn_began_s + TURN_S:
            self._turn_began_s = now_s
            self._first = self._first + KEYS_PER_REPORT if self._first + KEYS_PER_REPORT < len(self._counts) else 0
        shown = sorted(self._counts)[self._first : self._first + KEYS_PER_REPORT]
        return KeyCounts(self._worker, {prefix: self._counts[prefix] for prefix in shown})


def cell_views(running: RunningHaproxy | None, desired: DesiredHaproxy) -> dict[str, str]:
    """The state of every cell of the table; `unknown` while HAProxy does not have it."""
    seen = {(server.backend, server.name): server.view for server in running.servers} if running else {}
    cells = [server for server in desired.servers if server.cell]
    return {server.cell: seen.get((server.backend, server.name), CellView.UNKNOWN) for server in cells}


def telemetry(
    running: RunningHaproxy | None,
    desired: DesiredHaproxy,
    keys: KeyCounts | None,
    refusals: Refusals | None = None,
    streams: StreamTotals | None = None,
) -> IngressTelemetry:
    if running is None:
        return IngressTelemetry(keys=keys, refusals=refusals, streams=streams)
    backends = {backend.name: backend for backend in running.backends}
    pools = {}
    for pool in desired.pools:
        local, spill = backends.get(pool.local), backends.get(pool.spill)
        if local is not None and spill is not None:
            pools[pool.name] = PoolTraffic(
                in_flight=local.in_flight,
                queued=local.queued,
                # Overflow counts where it was sent to: both are arrivals of this region.
                requests_total=max(0, local.requests_total - running.overflow.get(pool.name, 0)),
                errors_total=local.errors_total,
                spilled_in_flight=spill.in_flight,
                spilled_total=spill.requests_total,
                spilled_to=_spilled_to(pool.spill, running),
                bytes_in_total=local.bytes_in_total,
                bytes_out_total=local.bytes_out_total,
                **_held(backends.get(pool.hold)),
            )
    return IngressTelemetry(running.worker_pid, pools, keys, running.life, refusals, streams)


def _held(hold: RunningBackend | None) -> dict[str, int]:
    """Released requests get 503 as well, so they are subtracted. The counter of one that is on its way can lag."""
    if hold is None:
        return {}
    return {
        "held": hold.in_flight,
        "held_total": hold.requests_total,
        "released_total": hold.released_total,
        "turned_away_total": max(0, hold.errors_total - hold.released_total),
    }


def holding(running: RunningHaproxy | None) -> frozenset[str]:
    return frozenset(backend.name for backend in running.backends if backend.holds) if running else frozenset()


def cell_traffic(
    running: RunningHaproxy | None, desired: DesiredHaproxy, steered: Mapping[ServerKey, Steered]
) -> dict[str, CellTraffic]:
    cell_of = {(server.backend, server.name): server.cell for server in desired.servers if server.cell}
    servers = running.servers if running else ()
    traffic = {}
    for server in servers:
        key = (server.backend, server.name)
        if key in cell_of:
            counted = msgspec.convert(server, CellTraffic, from_attributes=True)
            why = steered[key].why if key in steered else ""
            traffic[cell_of[key]] = msgspec.structs.replace(counted, why=why) if why else counted
    return traffic


def change_counts(serving: HaproxySupervisor) -> IngressChanges:
    lost = serving.running.log_lines_lost_total if serving.running else 0
    return IngressChanges(serving.applied_total, serving.reloads_total, serving.starts_total, lost)


def _spilled_to(backend: str, running: RunningHaproxy) -> dict[str, int]:
    """Region -> requests sent there, in either role. Without it, both ends of a spill would count them."""
    sent: Counter[str] = Counter()
    for server in running.servers:
        if server.backend == backend:
            sent[region_of(server.name)] += server.requests_total
    return dict(sent)
