"""A node agent reports its accelerators, restarts engines without contact, and traces accepted orders."""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from engine_agent.cell_proxy.span_export import SpanExporter
from engine_agent.node.agent import NodeAgent, OrderTrace, order_trace
from engine_agent.node.enrolment import Enrolment
from engine_agent.node.http import HttpClient, NoResponse
from engine_agent.node.journal import Journal
from engine_agent.node.launch import NodePlace
from engine_agent.node.node_checks import NodeChecks
from engine_agent.node.record import JOURNAL_FILE, NodeRecord, ProcessRecord
from engine_agent.node.telemetry.accelerators import AcceleratorMonitor, OnFault, hardware_fault
from engine_agent.node.telemetry.host import read_inventory
from engine_agent.protocol.messages import PROTOCOL_VERSION, Cause, Desired, EnginePlan, Fault, Hello, Report
from engine_agent.protocol.ports import PORTS_PER_NODE, PROXY
from engine_agent.protocol.signatures import FaultSignature
from engine_agent.protocol.states import AgentKind
from engine_agent.protocol.telemetry_messages import Accelerator
from engine_agent.protocol.tracing import TraceSettings
from tests.engine_agent.fake_control_plane import FakeControlPlane, eventually
from tests.engine_agent.node.agents import Node
from tests.engine_agent.orders import assignment, order
from tests.ports import free_ports

NODE = "n-0000acce"
PORT_BASE = 24980


class Reader:
    """One device that breaks when it is read."""

    kind = "nvidia"
    trouble = ""

    def __init__(self, on_fault: OnFault) -> None:
        self.devices: tuple[Accelerator, ...] = ()
        self._on_fault = on_fault

    async def prepare(self) -> None:
        self.devices = (Accelerator(0, "nvidia", "H100", memory_total_bytes=80 * 2**30),)

    async def run(self) -> None:
        self._on_fault(hardware_fault(FaultSignature.NVIDIA_XID_FATAL, "XID 79 on nvidia 0", {"xid": 79, "device": 0}))

    async def release(self) -> None: ...

    def resume(self) -> None: ...


def agent(plane: FakeControlPlane, home: Path) -> NodeAgent:
    return NodeAgent(
        place=NodePlace(NODE, home, "127.0.0.1", PORT_BASE, home, home / "fetched", dict),
        enrolment=Enrolment(plane.url, AgentKind.NODE, NODE, home, "join-1"),
        hello=lambda: Hello(
            protocol=PROTOCOL_VERSION,
            kind=AgentKind.NODE,
            id=NODE,
            boot_id="b",
            agent_version="0",
            inventory=read_inventory("p5.48xlarge", "127.0.0.1", PORT_BASE),
        ),
        stack=dict,
        accelerators=lambda on_fault: AcceleratorMonitor([Reader(on_fault)]),
    )


def reported_devices(plane: FakeControlPlane) -> tuple[Accelerator, ...]:
    """The devices of the first report with any, or none."""
    reports = (message for message in plane.received if isinstance(message, Report))
    return next((devices for report in reports if (devices := report.telemetry.accelerators)), ())


@pytest.mark.slow
@pytest.mark.asyncio
async def test_inventory_telemetry_and_faults_reach_the_control_plane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = FakeControlPlane()
    checked: list[tuple[int, bool]] = []

    async def note(_: NodeChecks, accelerators: int) -> None:
        """The checks compute for 3 s."""
        checked.append((accelerators, bool(plane.received)))

    monkeypatch.setattr(NodeChecks, "run_before_joining", note)
    async with plane.running():
        running = asyncio.create_task(agent(plane, tmp_path).run())
        try:
            await eventually(
                lambda: reported_devices(plane) != () and any(isinstance(s, Fault) for s in plane.received)
            )
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
    assert checked == [(1, False)], "checked before it joined"
    hello = plane.received[0]
    assert isinstance(hello, Hello)
    assert hello.inventory is not None
    assert hello.inventory.accelerators == ("nvidia 0: H100, 80 GiB",)
    assert reported_devices(plane)[0].memory_total_bytes == 80 * 2**30
    fault = next(said for said in plane.received if isinstance(said, Fault))
    assert (fault.signature, fault.evidence) == ("nvidia_xid_fatal", {"xid": 79, "device": 0, "hard": True})


HASTY_AGENT = """
import sys
from engine_agent.node.planning.node import ConvergeLimits
from engine_agent.node.main import run
sys.exit(run(sys.argv[1:], ConvergeLimits(contact_grace_s=0.2, backoff_first_s=0.1)))
"""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(FakeControlPlane(port=9), tmp_path, free_ports(PORTS_PER_NODE))
    yield node
    assert node.stop() == 0
    assert node.left() == []


def engine_of(node: Node) -> ProcessRecord:
    record = Journal(node.home / JOURNAL_FILE, NodeRecord).load()
    assert record is not None
    assert record.engine is not None
    return record.engine


async def proxy_says(node: Node, ready: bool) -> None:
    url = f"http://127.0.0.1:{node.port_base + PROXY}/healthz"
    async with asyncio.timeout(60):
        while await is_ready(url) is not ready:  # noqa: ASYNC110 - the other side is another process
            await asyncio.sleep(0.02)


async def is_ready(url: str) -> bool:
    with closing(HttpClient()) as http:
        try:
            return (await http.request("GET", url, timeout_s=1.0)).status == 200
        except NoResponse:
            return False


@pytest.mark.processes
@pytest.mark.asyncio
async def test_it_serves_from_the_journal_and_again_after_its_engine_died(node: Node) -> None:
    plan = EnginePlan("sim", "m", max_concurrency=4, ready_timeout_s=30.0, args=("--load-time-s", "0"))
    last_told = order(7, assignment(generation=3, plan=plan), node=node.id)
    Journal(node.home / JOURNAL_FILE, NodeRecord).save(NodeRecord(node.id, last_told))
    node.start_agent(("-c", HASTY_AGENT))
    await proxy_says(node, ready=True)
    first = engine_of(node)
    os.kill(first.pid, signal.SIGKILL)
    await proxy_says(node, ready=False)
    await proxy_says(node, ready=True)
    second = engine_of(node)
    assert (second.cell, second.generation) == ("c-1", 3)
    assert second.pid != first.pid


TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CAUSE = Cause("r-1", f"00-{TRACE}-{PARENT}-01")


def test_the_log_names_the_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with OrderTrace("n-1", None).taking(Desired("n-1", 4, None, cause=CAUSE)):
        pass
    (line,) = caplog.records
    assert line.getMessage() == "order 4 was caused by request r-1"
    assert (line.__dict__["request_id"], line.__dict__["trace_id"]) == ("r-1", TRACE)


def test_the_span_belongs_to_the_requests_trace() -> None:
    trace = OrderTrace("n-1", None)
    trace.exporter = SpanExporter(TraceSettings("127.0.0.1", 9, "/v1/traces", "s", 1.0), {})
    with trace.taking(Desired("n-1", 4, None, cause=CAUSE)):
        pass
    (span,) = trace.exporter._waiting
    assert (span["traceId"], span["parentSpanId"], span["name"]) == (TRACE, PARENT, "take order")


def test_an_order_of_no_request_is_taken_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with OrderTrace("n-1", None).taking(Desired("n-1", 4, None)):
        pass
    assert caplog.records == []


def test_a_collector_that_cannot_be_used_is_said_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    order_trace("n-1", {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://collector"})
    assert "no traces" in caplog.text
