"""A table with 20,000 keys: taken in parts, in force without a reload, and changed while streams go on."""

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest
import pytest_asyncio

from engine_agent.protocol.codec import MessageAssembly, decode_down, frames_of
from engine_agent.protocol.ingress_messages import ApiKey, RoutingTable, TablePart
from tests.engine_agent.fake_control_plane import eventually
from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import RunningIngress, pool
from tests.engine_agent.ingress.keyed import keyed
from tests.engine_agent.ingress.traffic import BODY, SteadyTraffic

pytestmark = pytest.mark.processes

KEYS = 20_000


def many(count: int) -> tuple[ApiKey, ...]:
    digests = (hashlib.sha256(b"%d" % number).hexdigest() for number in range(count))
    return tuple(
        ApiKey(f"{number:08x}", digest, f"tenant-{number % 100}", "realtime", ("demo",), None, 600, 0, 32)
        for number, digest in enumerate(digests)
    )


def sent(table: RoutingTable) -> RoutingTable:
    """A table after its way over the wire."""
    assembly = MessageAssembly()
    frames = [decode_down(frame) for frame in frames_of(table)]
    assert len(frames) > 10
    (whole,) = [whole for part in frames if (whole := assembly.take(cast(TablePart, part))) is not None]
    assert isinstance(whole, RoutingTable)
    return whole


@pytest_asyncio.fixture
async def ingress(tmp_path: Path) -> AsyncIterator[RunningIngress]:
    """The cell shares its loop with the reading of long tables: a check that is late says nothing."""
    async with RunningIngress(tmp_path / "home", check_interval_ms=20_000).running() as running:
        yield running


@pytest.mark.asyncio
async def test_20000_keys_are_in_force_and_one_of_them_goes_without_a_reload(ingress: RunningIngress) -> None:
    key = keyed("ffffffff", requests_per_min=100_000)
    others = many(KEYS)
    async with FakeCell().running() as cell:
        ingress.hop_secrets = ()
        await ingress.route(pool(cell), retry_after_s=5, keys=(keyed("eeeeeeee").entry,))
        await ingress.sees(**{cell.name: "up"})
        worker = ingress.worker_pid
        async with SteadyTraffic(ingress.url, per_s=50).flowing() as traffic:
            for keys, status in (((*others, key.entry), 200), (others, 401)):
                ingress.revision += 1
                table = RoutingTable(ingress.revision, ingress.settings.region, (pool(cell),), keys=keys)
                ingress.ingress.receive(sent(table))
                await eventually(lambda: ingress.revision_in_force == ingress.revision, within_s=60)
                assert (await ingress.post(BODY, **key.headers)).status_code == status
        assert ingress.worker_pid == worker
    assert traffic.failures == []
