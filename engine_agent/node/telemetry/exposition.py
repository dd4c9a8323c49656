"""Metrics of an agent for Prometheus: its newest report and its connection as text, and a port on loopback that answers
only `GET /metrics`. If the port is in use, that is logged and retried; the agent works without it."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping

from msgspec import structs

from engine_agent.cell_proxy.meter import cumulative
from engine_agent.protocol.ingress_messages import IngressReport
from engine_agent.protocol.local_servers import closing_connections
from engine_agent.protocol.machine_messages import MachineReport
from engine_agent.protocol.messages import Report
from engine_agent.protocol.metrics import CONTENT_TYPE, family, midpoint_s, sample, single
from engine_agent.protocol.states import EngineState
from engine_agent.protocol.stream_counts import StreamTotals

UP = "up"
CELL_COUNTERS = {
    "requests_total": "Requests that the ingress sent to a cell.",
    "errors_total": "Broken connections and answers.",
    "failures_total": "Answers of 5xx.",
    "retries_total": "Further attempts for requests without an answer.",
    "redispatches_total": "Requests that moved to another cell.",
}
CELL_GAUGES = {
    "in_flight": "Requests in flight.",
    "queued": "Requests that wait.",
    "weight": "Weight of the cell among those of its pool, in force.",
    "max_connections": "Requests that the ingress may have at the cell, in force.",
}
POOL_HOLDS = {
    "held": ("gauge", "Requests that wait for a pool's first cell."),
    "held_total": ("counter", "Requests that had to wait for a pool's first cell."),
    "released_total": ("counter", "Waiting requests that were sent to a cell."),
    "turned_away_total": ("counter", "Waiting requests that were rejected: too many, or too late."),
}
CHANGES = {
    "applied_total": "Changes to HAProxy in place.",
    "reloads_total": "Reloads of HAProxy.",
    "starts_total": "Starts of HAProxy.",
    "log_lines_lost_total": "Lines of the access log that were lost.",
}


def agent_exposition(agent: str, connected: bool, report: Report | IngressReport | MachineReport | None) -> str:
    """All metrics of an agent. `report` is its newest, None before the first."""
    labels = {"agent": agent}
    text = "1 while the agent is connected to the control plane."
    lines = single("switchyard_agent_connected", "gauge", text, labels, int(connected))
    if isinstance(report, Report):
        lines += _node(labels, report)
    elif isinstance(report, IngressReport):
        lines += _ingress(labels, report)
    return "\n".join(lines) + "\n"


def _node(labels: Mapping[str, str], report: Report) -> list[str]:
    lines = family("switchyard_node_engine_state", "gauge", "1 for the state that the node's engine is in.")
    for state in EngineState:
        lines.append(
            sample("switchyard_node_engine_state", {**labels, "state": state}, int(state is report.observed.state))
        )
    generation = report.observed.generation
    lines += single("switchyard_node_generation", "gauge", "Generation that the node runs.", labels, generation)
    if report.health is not None:
        text = "1 while the engine counts as healthy."
        lines += single("switchyard_node_healthy", "gauge", text, labels, int(report.health.ok))
    numbers = {name: value for name, value in structs.asdict(report.telemetry).items() if _is_number(value)}
    if numbers:
        lines += family("switchyard_node_telemetry", "gauge", "Use of the machine, by name.")
        lines += [
            sample("switchyard_node_telemetry", {**labels, "name": name}, float(value))
            for name, value in sorted(numbers.items())
        ]
    return lines + _devices(labels, report) + _host(labels, report)


DEVICE_FIGURES = ("utilisation_percent", "memory_used_bytes", "memory_total_bytes", "temperature_c", "power_watts")


def _devices(labels: Mapping[str, str], report: Report) -> list[str]:
    devices = report.telemetry.accelerators
    if not devices:
        return []
    lines = family("switchyard_node_device", "gauge", "Use of an accelerator, by name.")
    lines += family("switchyard_node_device_errors", "gauge", "Errors of an accelerator since its driver was loaded.")
    for device in devices:
        own = {**labels, "device": f"{device.kind}{device.index}"}
        clock = device.clocks.clock_mhz if device.clocks else None
        for name, value in (*((name, getattr(device, name)) for name in DEVICE_FIGURES), ("clock_mhz", clock)):
            if value is not None:
                lines.append(sample("switchyard_node_device", {**own, "name": name}, value))
        for name, count in sorted(device.errors.items()):
            lines.append(sample("switchyard_node_device_errors", {**own, "name": name}, count))
    return lines


def _host(labels: Mapping[str, str], report: Report) -> list[str]:
    host = report.telemetry.host
    known = {name: value for name, value in structs.asdict(host).items() if value is not None} if host else {}
    if not known:
        return []
    lines = family("switchyard_node_host", "gauge", "Use of the machine's memory, disks and network, by name.")
    return lines + [
        sample("switchyard_node_host", {**labels, "name": name}, value) for name, value in sorted(known.items())
    ]


def _ingress(labels: Mapping[str, str], report: IngressReport) -> list[str]:
    revision = report.observed.revision
    lines = single("switchyard_ingress_revision", "gauge", "Routing table in force.", labels, revision)
    text = "1 while the ingress reports a problem."
    lines += single("switchyard_ingress_trouble", "gauge", text, labels, int(bool(report.observed.reason)))
    for field, text in CHANGES.items():
        value = getattr(report.changes, field)
        lines += single(f"switchyard_ingress_haproxy_{field}", "counter", text, labels, value)
    lines += family("switchyard_ingress_cell_up", "gauge", "1 while the ingress sends requests to the cell.")
    for cell, view in sorted(report.observed.cells.items()):
        lines.append(sample("switchyard_ingress_cell_up", {**labels, "cell": cell}, int(view == UP)))
    for name, text in CELL_GAUGES.items():
        lines += family(f"switchyard_ingress_cell_{name}", "gauge", text)
        for cell, traffic in sorted(report.cells.items()):
            lines.append(sample(f"switchyard_ingress_cell_{name}", {**labels, "cell": cell}, getattr(traffic, name)))
    for field, text in CELL_COUNTERS.items():
        lines += family(f"switchyard_ingress_cell_{field}", "counter", text)
        for cell, traffic in sorted(report.cells.items()):
            lines.append(sample(f"switchyard_ingress_cell_{field}", {**labels, "cell": cell}, getattr(traffic, field)))
    for field, (kind, text) in POOL_HOLDS.items():
        lines += family(f"switchyard_ingress_pool_{field}", kind, text)
        for pool, counted in sorted(report.telemetry.pools.items()):
            lines.append(sample(f"switchyard_ingress_pool_{field}", {**labels, "pool": pool}, getattr(counted, field)))
    lines += _streams(labels, report.telemetry.streams)
    name = "switchyard_ingress_refused_total"
    lines += family(name, "counter", "Failed requests that no cell counts, by code: 5xx, or stream_cut.")
    refusals = report.telemetry.refusals
    for deployment, codes in sorted(refusals.codes.items() if refusals else ()):
        lines += [sample(name, {**labels, "deployment": deployment, "code": code}, n) for code, n in codes.items()]
    return lines


STREAM_REASONS = {
    "continued_total": "Streams that continued at another cell, by the reason why they left theirs.",
    "cut_total": "Streams that ended early, by the reason why no cell continued them.",
    "unable_total": "Streams that could not have continued at another cell, by reason.",
}


def _streams(labels: Mapping[str, str], totals: StreamTotals | None) -> list[str]:
    if totals is None:
        return []
    pools = sorted(totals.pools.items())
    name = "switchyard_ingress_streams_relayed_total"
    lines = family(name, "counter", "Streams that can continue at another cell, and passed a relay.")
    lines += [sample(name, {**labels, "pool": pool}, counted.relayed_total) for pool, counted in pools]
    for field, text in STREAM_REASONS.items():
        name = f"switchyard_ingress_streams_{field}"
        lines += family(name, "counter", text)
        for pool, counted in pools:
            for reason, count in sorted(getattr(counted, field).items()):
                lines.append(sample(name, {**labels, "pool": pool, "reason": reason}, count))
    name = "switchyard_ingress_answers_repeated_total"
    lines += family(name, "counter", "Answers that were requested again, because their cell failed before any byte.")
    lines += [sample(name, {**labels, "pool": pool}, counted.repeated_total) for pool, counted in pools]
    name = "switchyard_ingress_stream_pause_seconds"
    lines += family(name, "histogram", "Pauses of streams that continued at another cell.")
    for pool, counted in pools:
        own = {**labels, "pool": pool}
        seen = sum(counted.pauses.values())
        edges = [(f"{edge_s:.4g}", count) for edge_s, count in cumulative(counted.pauses)]
        lines += [sample(f"{name}_bucket", {**own, "le": edge}, count) for edge, count in (*edges, ("+Inf", seen))]
        lines.append(sample(f"{name}_count", own, seen))
        lines.append(sample(f"{name}_sum", own, round(sum(midpoint_s(b) * n for b, n in counted.pauses.items()), 6)))
    return lines


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


HOST = "127.0.0.1"
READ_LIMIT_S = 5.0
MAX_HEAD_BYTES = 8 * 1024
TRY_AGAIN_S = 30.0

log = logging.getLogger(__name__)


async def serve_metrics(port: int, exposition: Callable[[], str]) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(READ_LIMIT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(_response(head, exposition))
                await writer.drain()

    while True:
        try:
            async with await asyncio.start_server(
                closing_connections(answer), HOST, port, limit=MAX_HEAD_BYTES
            ) as server:
                await server.serve_forever()
        except OSError as error:
            log.warning("no metrics on %s:%d: %s", HOST, port, error.strerror or error)
            await asyncio.sleep(TRY_AGAIN_S)


def _response(head: bytes, exposition: Callable[[], str]) -> bytes:
    if head.split(b"\r\n", 1)[0].split(b" ")[:2] != [b"GET", b"/metrics"]:
        return _message(b"404 Not Found", b"text/plain", b"only GET /metrics is served\n")
    return _message(b"200 OK", CONTENT_TYPE, exposition().encode())


def _message(status: bytes, content_type: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Type: %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (
        status,
        content_type,
        len(body),
        body,
    )
