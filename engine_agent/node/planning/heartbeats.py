"""Whether a node's last report still holds, so that a heartbeat can replace the next one. The control plane then works
in proportion to what changes."""

from collections.abc import Iterator

from msgspec import structs

from engine_agent.protocol.messages import Report
from engine_agent.protocol.states import EngineState
from engine_agent.protocol.telemetry_messages import Accelerator, HostUse, NodeTelemetry

REPORT_AT_LEAST_EVERY_S = 60.0
"""Readers of load and telemetry use a report for as long as heartbeats follow it (`fleet.nodes.models.holds_since`).
The node's charts have a point a minute."""
GAUGES_EVERY_S = 8.0
"""A gauge that has moved by its step is reported after so long."""
CALM = frozenset({EngineState.IDLE, EngineState.READY})
"""States in which nothing is about to happen. In the others each report counts, since times are derived from them."""
MIB = 2**20
PERCENT, DEGREES, WATTS, MHZ = 10.0, 5.0, 25.0, 100.0
"""Steps of gauges."""


def still_holds(sent: Report, now: Report, sent_s_ago: float) -> bool:
    """Whether `sent` describes the node well enough: same state, healthy, same load, and gauges differ by less than
    their steps, or `sent` is younger than `GAUGES_EVERY_S`."""
    return (
        sent_s_ago < REPORT_AT_LEAST_EVERY_S
        and now.observed.state in CALM
        and (now.health is None or now.health.ok)
        and _lasting(sent) == _lasting(now)
        and (sent_s_ago < GAUGES_EVERY_S or not _has_moved(sent.telemetry, now.telemetry))
    )


def _lasting(report: Report) -> tuple[object, ...]:
    """The report without gauges, which differ each time: use of the host and its devices, energy, the age and duration
    of the last probe."""
    health, devices = report.health, report.telemetry.accelerators
    return (
        *(report.observed, report.load, report.steps),
        health and (health.ok, health.reason, health.wrong),
        tuple((device.index, device.uuid, device.name, device.errors) for device in devices),
        structs.replace(
            report.telemetry,
            host_cpu_percent=None,
            host_memory_used_bytes=None,
            agent_rss_bytes=None,
            engine_rss_bytes=None,
            accelerators=(),
            energy=(),
            host=None,
        ),
    )


def _has_moved(sent: NodeTelemetry, now: NodeTelemetry) -> bool:
    return any(
        before is not after and (before is None or after is None or abs(after - before) >= step)
        for (before, step), (after, _) in zip(_gauges(sent), _gauges(now), strict=True)
    )


def _gauges(telemetry: NodeTelemetry) -> Iterator[tuple[float | None, float]]:
    """Every gauge with its step. Two reports with the same lasting part have the same gauges. Energy is left out: it is
    a sum that loses nothing by arriving later."""
    yield telemetry.host_cpu_percent, PERCENT
    yield telemetry.host_memory_used_bytes, 512 * MIB
    yield telemetry.agent_rss_bytes, 128 * MIB
    yield telemetry.engine_rss_bytes, 512 * MIB
    for device in telemetry.accelerators:
        yield from _device_gauges(device)
    host = telemetry.host or HostUse()
    yield host.filesystem_used_bytes, 1024 * MIB
    for total in (host.disk_read_bytes, host.disk_written_bytes):
        yield total, 256 * MIB
    for total in (host.network_received_bytes, host.network_sent_bytes):
        yield total, 256 * MIB


def _device_gauges(device: Accelerator) -> Iterator[tuple[float | None, float]]:
    yield device.utilisation_percent, PERCENT
    yield device.memory_used_bytes, 512 * MIB
    yield device.temperature_c, DEGREES
    yield device.power_watts, WATTS
    clocks = device.clocks
    yield None if clocks is None else clocks.clock_mhz, MHZ
    yield None if clocks is None else len(clocks.reasons), 1.0
