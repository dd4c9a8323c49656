"""Whether a node's last report still holds, so that a heartbeat can replace the next one. The control plane then works
in proportion to what changes."""

from msgspec import structs

from engine_agent.protocol.messages import Report
from engine_agent.protocol.states import EngineState

REPORT_AT_LEAST_EVERY_S = 8.0
"""Readers of load and telemetry ignore reports older than 15 s (`fleet.load.planner.FRESH_FOR_S`)."""
CALM = frozenset({EngineState.IDLE, EngineState.READY})
"""States in which nothing is about to happen. In the others each report counts, since times are derived from them."""


def still_holds(sent: Report, now: Report, sent_s_ago: float) -> bool:
    """Whether `sent` describes the node well enough: same state, healthy, same load, and only gauges differ."""
    return (
        sent_s_ago < REPORT_AT_LEAST_EVERY_S
        and now.observed.state in CALM
        and (now.health is None or now.health.ok)
        and _lasting(sent) == _lasting(now)
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
