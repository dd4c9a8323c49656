"""An agent on a machine with accelerators: its first word lists them, its reports show their use, its faults arrive."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from engine_agent.node.agent import NodeAgent
from engine_agent.node.enrolment import Enrolment
from engine_agent.node.launch import NodePlace
from engine_agent.node.telemetry.accelerators import AcceleratorMonitor, OnFault, hardware_fault
from engine_agent.node.telemetry.host import read_inventory
from engine_agent.protocol.messages import PROTOCOL_VERSION, Accelerator, Fault, Hello, Report
from engine_agent.protocol.signatures import FaultSignature
from engine_agent.protocol.states import AgentKind
from tests.engine_agent.fake_control_plane import FakeControlPlane, eventually

NODE = "n-0000acce"
PORT_BASE = 24980


class Reader:
    """One device that breaks as soon as it is read."""

    kind = "nvidia"
    trouble = ""

    def __init__(self, on_fault: OnFault) -> None:
        self.devices: tuple[Accelerator, ...] = ()
        self._on_fault = on_fault

    async def prepare(self) -> None:
        self.devices = (Accelerator(0, "nvidia", "H100", memory_total_bytes=80 * 2**30),)

    async def run(self) -> None:
        self._on_fault(hardware_fault(FaultSignature.NVIDIA_XID_FATAL, "XID 79 on nvidia 0", {"xid": 79, "device": 0}))


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
    """The devices of the first report that names any; none yet."""
    reports = (message for message in plane.received if isinstance(message, Report))
    return next((devices for report in reports if (devices := report.telemetry.accelerators)), ())


@pytest.mark.slow
@pytest.mark.asyncio
async def test_inventory_telemetry_and_faults_reach_the_control_plane(tmp_path: Path) -> None:
    plane = FakeControlPlane()
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
    hello = plane.received[0]
    assert isinstance(hello, Hello)
    assert hello.inventory is not None
    assert hello.inventory.accelerators == ("nvidia 0: H100, 80 GiB",)
    assert reported_devices(plane)[0].memory_total_bytes == 80 * 2**30
    fault = next(said for said in plane.received if isinstance(said, Fault))
    assert (fault.signature, fault.evidence) == ("nvidia_xid_fatal", {"xid": 79, "device": 0, "hard": True})
