"""Prometheus can parse the metrics of agents."""

import asyncio

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from engine_agent.node.telemetry.exposition import HOST, agent_exposition, serve_metrics
from engine_agent.protocol.ingress_messages import (
    CellTraffic,
    IngressObserved,
    IngressReport,
    IngressTelemetry,
    PoolTraffic,
    Refusals,
)
from engine_agent.protocol.messages import Health, Observed, Report
from engine_agent.protocol.states import EngineState
from engine_agent.protocol.stream_counts import PoolStreams, StreamTotals
from engine_agent.protocol.telemetry_messages import Accelerator, DeviceClocks, HostUse, NodeTelemetry
from tests.ports import free_port

REPORT = Report(
    seq=1,
    observed=Observed(EngineState.READY, cell="c-1", generation=3),
    health=Health(ok=True),
    telemetry=NodeTelemetry(host_cpu_percent=12.5, refused_order='a "reason"', accelerator_trouble={"neuron": "old"}),
)
INGRESS_REPORT = IngressReport(
    seq=1,
    observed=IngressObserved(revision=9, reason="a table was refused", cells={"c-1": "up", "c-2": "drain"}),
    cells={"c-1": CellTraffic(in_flight=2, requests_total=7)},
    telemetry=IngressTelemetry(
        pools={"chat": PoolTraffic(held=3, held_total=5, released_total=1, turned_away_total=1)},
        refusals=Refusals("a", {"chat": {"no_ready_cell": 4, "queue_full": 2}}),
        streams=StreamTotals("b", {"chat": PoolStreams(9, {"leaving": 2}, {"no_cell": 1}, pauses={80: 2})}),
    ),
)


def values(text: str) -> dict[tuple[str, str], float]:
    """(name, last label) -> value."""
    families = text_string_to_metric_families(text)
    return {(each.name, [*each.labels.values()][-1]): each.value for family in families for each in family.samples}


def test_an_agent_that_said_nothing_yet_tells_of_its_line() -> None:
    assert values(agent_exposition("n-1", False, None)) == {("switchyard_agent_connected", "n-1"): 0}


def test_a_node_tells_its_engines_state_and_its_numbers() -> None:
    told = values(agent_exposition("n-1", True, REPORT))
    assert told["switchyard_agent_connected", "n-1"] == 1
    assert told["switchyard_node_engine_state", "ready"] == 1
    assert sum(value for (name, _), value in told.items() if name == "switchyard_node_engine_state") == 1
    assert told["switchyard_node_generation", "n-1"] == 3
    assert told["switchyard_node_telemetry", "host_cpu_percent"] == 12.5
    assert ("switchyard_node_telemetry", "accelerator_trouble") not in told
    assert ("switchyard_node_telemetry", "engine_rss_bytes") not in told


def test_a_node_tells_the_use_of_its_devices_and_of_its_machine() -> None:
    device = Accelerator(
        3, "nvidia", "H100", utilisation_percent=42.0, temperature_c=61.0, errors={"nvlink_replay": 7},
        clocks=DeviceClocks(1005, 1980),
    )  # fmt: skip
    host = HostUse(memory_bytes=2**34, network_sent_bytes=5)
    report = replace(REPORT, telemetry=NodeTelemetry(accelerators=(device,), host=host))
    told = values(agent_exposition("n-1", True, report))
    figures = {name: value for (family, name), value in told.items() if family == "switchyard_node_device"}
    assert figures == {"utilisation_percent": 42.0, "temperature_c": 61.0, "clock_mhz": 1005}
    assert told["switchyard_node_device_errors", "nvlink_replay"] == 7
    assert told["switchyard_node_host", "network_sent_bytes"] == 5


def test_an_ingress_tells_its_cells() -> None:
    told = values(agent_exposition("i-eu", True, INGRESS_REPORT))
    assert told["switchyard_ingress_revision", "i-eu"] == 9
    assert told["switchyard_ingress_trouble", "i-eu"] == 1
    assert (told["switchyard_ingress_cell_up", "c-1"], told["switchyard_ingress_cell_up", "c-2"]) == (1, 0)
    assert told["switchyard_ingress_cell_requests_total", "c-1"] == 7
    assert [told[f"switchyard_ingress_pool_{name}", "chat"] for name in ("held", "held_total", "released_total")] == [
        3,
        5,
        1,
    ]


def test_an_ingress_reports_streams_that_continue() -> None:
    told = values(agent_exposition("i-eu", True, INGRESS_REPORT))
    assert told["switchyard_ingress_streams_relayed_total", "chat"] == 9
    assert told["switchyard_ingress_streams_continued_total", "leaving"] == 2
    assert told["switchyard_ingress_streams_cut_total", "no_cell"] == 1
    assert told["switchyard_ingress_stream_pause_seconds_count", "chat"] == 2
    assert told["switchyard_ingress_stream_pause_seconds_bucket", "0.0001"] == 0
    assert told["switchyard_ingress_stream_pause_seconds_bucket", "+Inf"] == 2
    assert told["switchyard_ingress_stream_pause_seconds_sum", "chat"] == pytest.approx(2 * 0.098, abs=0.01)


async def opened(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    while True:
        try:
            return await asyncio.open_connection(HOST, port)
        except ConnectionRefusedError:
            await asyncio.sleep(0.01)


async def ask(port: int, request: bytes) -> bytes:
    async with asyncio.timeout(60):
        reader, writer = await opened(port)
        writer.write(request)
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        return answer


@pytest.mark.asyncio
async def test_the_port_answers_metrics_and_nothing_else() -> None:
    port = free_port()
    serving = asyncio.create_task(serve_metrics(port, lambda: "x 1\n"))
    try:
        told = await ask(port, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert told.startswith(b"HTTP/1.1 200 OK\r\n")
        assert told.endswith(b"\r\n\r\nx 1\n")
        assert (await ask(port, b"POST /phase HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 404 ")
        assert await ask(port, 9000 * b"x" + b"\r\n\r\n") == b""
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


def test_an_ingress_tells_what_no_cell_answered_by_deployment_and_code() -> None:
    told = values(agent_exposition("i-1", True, INGRESS_REPORT))
    assert told["switchyard_ingress_refused_total", "no_ready_cell"] == 4
    assert told["switchyard_ingress_refused_total", "queue_full"] == 2
