"""A node without network to an index: it refuses builds that it cannot run before any request, fetches others from the
control plane in parts, continues interrupted ones, and serves from what it unpacked."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from msgspec import structs

from engine_agent.engines.artifacts import entry_of
from engine_agent.engines.base import EngineUnavailable
from engine_agent.engines.builds.store import host_facts, parts_entry
from engine_agent.node import downloads
from engine_agent.node.builds import HeldBuild, NodeBuilds
from engine_agent.node.downloads import Downloads
from engine_agent.node.enrolment import Enrolment
from engine_agent.protocol.engine_builds import BUILD_FILE, EngineBuild
from engine_agent.protocol.messages import Artifact, EnginePlan, Prefetch, Report
from engine_agent.protocol.ports import PORTS_PER_NODE, PROXY
from engine_agent.protocol.states import AgentKind
from tests.asking import CLIENT
from tests.engine_agent.engines.builds.packed import copied, ordered, small_build, tiny_build
from tests.engine_agent.engines.s3_server import empty_bucket, s3_server, upload
from tests.engine_agent.fake_control_plane import FakeControlPlane
from tests.engine_agent.node.agents import Node
from tests.engine_agent.orders import assignment, order
from tests.models_registry.rows import artifact
from tests.ports import free_ports

pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest_asyncio.fixture
async def plane(tmp_path: Path) -> AsyncIterator[FakeControlPlane]:
    plane = FakeControlPlane()
    plane.builds, plane.credentials = small_build(tmp_path / "small"), {"sw_1_secret"}
    async with plane.running():
        yield plane


class Fetching:
    """The builds of one node, and the end of its fetches."""

    def __init__(self, plane: FakeControlPlane, home: Path) -> None:
        home.mkdir(exist_ok=True)
        enrolment = Enrolment(plane.url, AgentKind.NODE, "n-00000001", home)
        enrolment.store_credential("sw_1_secret")
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        self.cache = home / "builds"
        self.downloads = Downloads(enrolment, self._wake)
        self.builds = NodeBuilds(self.cache, self.downloads)

    def _wake(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)

    async def obtain(self, build: EngineBuild) -> HeldBuild:
        held = self.builds.obtain(build)
        if held is None:
            words = self.downloads.words(build.digest)
            assert words.startswith(f"build {build.name}: ")
            assert [each.fetching for each in self.builds.report()] == [words]
            async with asyncio.timeout(60):
                await self._ended.wait()
            self._ended.clear()
            held = self.builds.obtain(build)
        assert held is not None
        return held


@pytest.mark.asyncio
async def test_it_fetches_once_and_each_use_locks_it(plane: FakeControlPlane, tmp_path: Path) -> None:
    fetching, build = Fetching(plane, tmp_path), ordered(tmp_path / "small")
    first = await fetching.obtain(build)
    requests = list(plane.build_requests)
    second = await fetching.obtain(build)
    assert first.program == second.program == fetching.cache / build.digest[7:] / "tree" / "serve"
    assert first.program.is_file()
    assert plane.build_requests == requests
    names = [name for name, _ in requests]
    assert (names[0], sorted(names[1:])) == ("manifest.json", [BUILD_FILE, *(f"part-{n:04d}" for n in range(4))])
    for held in (first, second):
        os.close(held.lock)
    [report] = fetching.builds.report()
    assert (report.digest, report.serves, report.fetching) == (build.digest, "generic/llama-cpp", "")
    shutil.rmtree(fetching.cache)
    assert fetching.builds.report() == ()


@pytest.mark.asyncio
async def test_an_interrupted_fetch_continues_where_it_stopped(plane: FakeControlPlane, tmp_path: Path) -> None:
    fetching, build = Fetching(plane, tmp_path), ordered(tmp_path / "small")
    parts = parts_entry(entry_of(build.digest, fetching.cache)).folder
    parts.mkdir(parents=True)
    shutil.copy((tmp_path / "small") / "part-0000", parts)
    (parts / "part-0001.coming").write_bytes(((tmp_path / "small") / "part-0001").read_bytes()[:500])
    os.close((await fetching.obtain(build)).lock)
    assert ("part-0001", "bytes=500-") in plane.build_requests
    assert "part-0000" not in [name for name, _ in plane.build_requests]


@pytest.mark.asyncio
async def test_a_wrong_beginning_costs_one_more_attempt(plane: FakeControlPlane, tmp_path: Path) -> None:
    fetching, build = Fetching(plane, tmp_path), ordered(tmp_path / "small")
    parts = parts_entry(entry_of(build.digest, fetching.cache)).folder
    parts.mkdir(parents=True)
    (parts / "part-0001.coming").write_bytes(b"another start")
    os.close((await fetching.obtain(build)).lock)
    assert [first for name, first in plane.build_requests if name == "part-0001"] == ["bytes=13-", ""]


@pytest.mark.asyncio
async def test_parts_that_differ_from_the_manifest_are_never_unpacked(plane: FakeControlPlane, tmp_path: Path) -> None:
    build, plane.builds = ordered(tmp_path / "small"), copied(tmp_path / "small", tmp_path / "tampered")
    (plane.builds / "part-0003").write_bytes(((tmp_path / "small") / "part-0002").read_bytes()[:100])
    fetching = Fetching(plane, tmp_path / "home")
    with pytest.raises(EngineUnavailable, match="arrives damaged: part-0003 differs from its manifest"):
        await fetching.obtain(build)
    assert not entry_of(build.digest, fetching.cache).is_complete


@pytest.mark.asyncio
async def test_a_control_plane_without_the_build_is_named(
    plane: FakeControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "FIRST_PAUSE_S", 0.001)
    plane.builds = None
    with pytest.raises(EngineUnavailable, match=r"build tiny-1 does not arrive: .* it answered 404: .*no such build"):
        await Fetching(plane, tmp_path).obtain(ordered(tmp_path / "small"))


@pytest.mark.asyncio
async def test_a_busy_control_plane_is_waited_for(
    plane: FakeControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "FIRST_PAUSE_S", 0.001)
    plane.busy_answers = 3 * downloads.ATTEMPTS
    os.close((await Fetching(plane, tmp_path).obtain(ordered(tmp_path / "small"))).lock)
    assert plane.busy_answers == 0


@pytest.mark.asyncio
async def test_a_host_below_a_floor_is_refused_before_any_request(plane: FakeControlPlane, tmp_path: Path) -> None:
    build = ordered(tmp_path / "small")
    assert build.facts is not None
    newer = structs.replace(build, facts=structs.replace(build.facts, least_glibc="9.9"))
    with pytest.raises(EngineUnavailable, match=rf"cannot run here: it needs glibc 9\.9 .* has {host_facts().glibc}"):
        Fetching(plane, tmp_path).builds.obtain(newer)
    with pytest.raises(EngineUnavailable, match="without its facts"):
        Fetching(plane, tmp_path).builds.obtain(EngineBuild("gone-1"))
    assert plane.build_requests == []


@pytest.mark.asyncio
async def test_from_a_bucket_it_comes_as_weights_do(
    plane: FakeControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "small"
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}
    with s3_server() as url:
        stored = upload(empty_bucket(url, monkeypatch), tmp_path / "source", files)
        held = await Fetching(plane, tmp_path).obtain(ordered(folder, uri=stored.uri))
    assert held.program.is_file()
    assert plane.build_requests == []
    os.close(held.lock)


@pytest.mark.asyncio
async def test_an_order_with_a_build_fetches_and_serves_with_its_own_python(
    plane: FakeControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("SWITCHYARD_CACHE", str(cache))
    plane.builds, plane.weights = tiny_build(), tmp_path / "weights"
    node, weights = Node(plane, tmp_path, free_ports(PORTS_PER_NODE)), plane.weights
    build = ordered(tiny_build())
    plan = EnginePlan(
        engine="generic",
        served_model="tiny",
        max_concurrency=2,
        ready_timeout_s=60.0,
        artifact=Artifact("file:///srv/models/tiny", artifact(weights).digest),
        args=("--context-length", "512", "--command", "llama-cpp"),
        widened=("--command",),
        build=build,
    )
    try:
        node.start_agent()
        ahead = Prefetch((build,), plan.artifacts)
        await plane.order(structs.replace(order(1, assignment(plan=plan), node=node.id), prefetch=ahead))
        await node.says("ready", 1)
        telemetry = plane.of(Report)[-1].telemetry
        assert [each.digest for each in telemetry.builds] == [build.digest]
        assert telemetry.prefetched is not None
        assert [each.digest for each in telemetry.prefetched.artifacts] == [each.digest for each in plan.artifacts]
        body = {"model": "tiny", "prompt": "one two three", "max_tokens": 1}
        url = f"http://127.0.0.1:{node.port_base + PROXY}/v1/completions"
        answer = await asyncio.to_thread(lambda: CLIENT.post(url, json=body))
        assert answer.json()["choices"][0]["text"] == str(cache / "builds" / build.digest[7:] / "tree")
    finally:
        assert await asyncio.to_thread(node.stop) == 0
    assert node.left() == []
