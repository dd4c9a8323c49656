"""A host switches to a release only if it is still ordered when complete, and removes none meanwhile."""

import asyncio
from pathlib import Path

import pytest

from engine_agent.node.machine import releases
from engine_agent.node.machine.paths import HostPaths
from engine_agent.node.machine.release_change import ReleaseChange
from engine_agent.protocol.machine_messages import Release, ReleaseOrder
from tests.controlplane.embedded.processes import eventually_async
from tests.engine_agent.node.machine.made_releases import NEW, OLD, Server, archive, files, order, put

pytestmark = [pytest.mark.slow, pytest.mark.asyncio]
LOOK_EVERY_S = 0.02


async def followed(change: ReleaseChange, wanted: ReleaseOrder | None, server: Server) -> bool:
    """Follows the order as the agent does in each pass, until no installation is running."""
    while not (ends := await change.follow(wanted, (server.url,), "secret")) and change.is_installing:  # noqa: ASYNC110
        await asyncio.sleep(LOOK_EVERY_S)  # between two looks, as the agent
    return ends


@pytest.fixture
def change(paths: HostPaths) -> ReleaseChange:
    return ReleaseChange(paths, Release(OLD, "0.1.0", 2))


async def half_way(change: ReleaseChange, server: Server) -> ReleaseOrder:
    """Starts to install the new release; the server has sent half of it."""
    server.packed = archive(files(NEW))
    wanted = order(server.packed)
    server.go_on.clear()
    assert not await change.follow(wanted, (server.url,), "secret")
    assert await asyncio.to_thread(server.half_way.wait, 60)
    return wanted


async def test_what_is_ordered_is_switched_to_once_it_is_whole(
    change: ReleaseChange, paths: HostPaths, server: Server
) -> None:
    wanted = await half_way(change, server)
    assert not await change.follow(wanted, (server.url,), "secret")
    server.go_on.set()
    assert await followed(change, wanted, server)
    assert paths.current.resolve() == releases.folder_of(paths, wanted).resolve()
    assert change.on_trial


@pytest.mark.parametrize("instead", [None, ReleaseOrder("2" * 16, "e" * 64, 7)])
async def test_what_nobody_wants_any_more_is_not_switched_to(
    change: ReleaseChange, paths: HostPaths, server: Server, instead: ReleaseOrder | None
) -> None:
    wanted = await half_way(change, server)
    assert not await change.follow(instead, (server.url,), "secret")
    server.go_on.set()
    assert not await followed(change, None, server)
    assert paths.current.resolve().name == "old"
    assert not change.on_trial
    assert change.tried is None, "nothing was in vain"
    assert await followed(change, wanted, server), "it may be ordered again"


async def test_nothing_is_removed_while_a_release_is_installed(
    change: ReleaseChange, paths: HostPaths, server: Server
) -> None:
    put(paths, "older", files(NEW))
    wanted = await half_way(change, server)
    await asyncio.to_thread(change.confirm)
    server.go_on.set()
    whole = releases.folder_of(paths, wanted)
    assert await eventually_async(whole.exists)
    await asyncio.to_thread(change.confirm)
    assert whole.exists()
    assert await followed(change, wanted, server)


async def test_what_a_killed_attempt_left_is_removed(change: ReleaseChange, paths: HostPaths) -> None:
    (paths.releases / ".half.new").mkdir()
    put(paths, "older", files(NEW))
    await asyncio.to_thread(change.confirm)
    assert names(paths.releases) == ["old"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
