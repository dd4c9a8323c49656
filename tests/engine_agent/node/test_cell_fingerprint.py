"""Two nodes with different software that must form a cell both fail immediately and name the field and its values
(I2)."""

from pathlib import Path

import pytest

from engine_agent.node.telemetry.fingerprint import OPERATOR_FILE
from engine_agent.protocol.messages import Hello
from tests.engine_agent.fake_control_plane import FakeControlPlane, eventually
from tests.engine_agent.node.agents import running_cell

pytestmark = pytest.mark.processes


@pytest.mark.asyncio
async def test_a_cell_of_different_stacks_does_not_form_and_one_of_equal_stacks_does(tmp_path: Path) -> None:
    plane = FakeControlPlane()
    async with plane.running(), running_cell(plane, tmp_path) as cell:
        for node, image in zip(cell.nodes, ("ami-1", "ami-2"), strict=True):
            (node.home / OPERATOR_FILE).write_text(f'{{"image": "{image}"}}')
        await eventually(lambda: all(plane.by_agent.get(node.id) for node in cell.nodes), 30.0)
        await cell.order(1)
        for node in cell.nodes:
            said = await node.says("failed", 1)
            assert f"rank 1 ({cell.follower.id}) differs from rank 0 ({cell.leader.id})" in said.reason
            assert "image is ami-2 instead of ami-1" in said.reason

        (cell.follower.home / OPERATOR_FILE).write_text('{"image": "ami-1"}')
        await cell.order(2)
        await cell.say("ready", 2)
        hello = plane.by_agent[cell.leader.id][0]
        assert isinstance(hello, Hello)
        assert hello.fingerprint.keys() >= {"agent", "kernel", "sim.engine"}
