"""Cells that run more requests at once get more of them, with HAProxy itself."""

import asyncio
import contextlib
import json

import pytest

from engine_agent.protocol.ingress_messages import Affinity
from tests.engine_agent.fake_control_plane import eventually
from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import RunningIngress, pool

pytestmark = pytest.mark.processes


async def in_flight(ingress: RunningIngress, limits: list[int], requests: int, affinity: Affinity | None) -> list[int]:
    """Of cells with these limits, once so many requests that do not end are on them; of one key where keys count."""
    async with contextlib.AsyncExitStack() as stack:
        cells = [
            await stack.enter_async_context(FakeCell(f"c-{at}", max_connections=most).running())
            for at, most in enumerate(limits)
        ]
        for cell in cells:
            cell.release.clear()
        await ingress.route(pool(*cells, affinity=affinity))
        await ingress.sees(**{cell.name: "up" for cell in cells})
        body = json.dumps({"model": "demo", "prompt_cache_key": "one"}).encode()
        async with asyncio.TaskGroup() as group:
            for number in range(requests):
                group.create_task(ingress.post(body))
                await eventually(lambda number=number: sum(cell.in_flight for cell in cells) == number + 1)  # type: ignore[misc]
            found = [cell.in_flight for cell in cells]
            for cell in cells:
                cell.release.set()
        return found


@pytest.mark.asyncio
async def test_what_is_outstanding_is_divided_by_what_cells_run_at_once(ingress: RunningIngress) -> None:
    assert await in_flight(ingress, [32, 16, 8], 28, None) == [16, 8, 4]


@pytest.mark.asyncio
async def test_a_large_cell_keeps_a_key_up_to_its_part_of_what_there_is(ingress: RunningIngress) -> None:
    """Beyond the bound of 1.25 times its part, which is 3.2 times a small one's, requests of its key go elsewhere."""
    found = await in_flight(ingress, [32, 10], 20, Affinity())
    assert sum(found) == 20
    assert found[0] >= 15, "by the mean of both it would have lost the key at 13"
