"""Weights in no bucket come from the control plane, verified. Builds and weights that an order wants in advance come
one after the other, stay while they are wanted, and make room for an engine that waits for a download."""

import asyncio
import contextlib
import json
import os
import stat
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import pytest
import pytest_asyncio
from msgspec import structs

from engine_agent.engines.artifacts import Entry, entry_of, file_sha256
from engine_agent.engines.base import EngineUnavailable
from engine_agent.node import downloads
from engine_agent.node.builds import NodeBuilds
from engine_agent.node.downloads import Downloads
from engine_agent.node.enrolment import Enrolment
from engine_agent.node.page_cache import PageCache, resident_bytes
from engine_agent.node.prefetching import RETRY_S, Prefetching
from engine_agent.node.weights import NodeWeights, local_plan
from engine_agent.protocol.manifest import Manifest, manifest_text
from engine_agent.protocol.messages import Artifact, EnginePlan, PlanAdapter, Prefetch
from engine_agent.protocol.states import AgentKind
from engine_agent.protocol.telemetry_messages import NodeArtifact
from tests.engine_agent.engines.builds.packed import ordered, small_build
from tests.engine_agent.engines.s3_server import empty_bucket, s3_server, upload
from tests.engine_agent.fake_control_plane import FakeControlPlane
from tests.models_registry.rows import artifact

pytestmark = [pytest.mark.processes, pytest.mark.slow]

FILES = {"config.json": b"{}", "a folder/model 1.safetensors": bytes(range(256)) * 4096}


@contextlib.asynccontextmanager
async def plane_with(files: dict[str, bytes], folder: Path) -> AsyncIterator[FakeControlPlane]:
    """A control plane that gives these weights to an agent."""
    plane = FakeControlPlane()
    plane.weights, plane.credentials = folder, {"sw_1_secret"}
    artifact(plane.weights, files)
    async with plane.running():
        yield plane


@pytest_asyncio.fixture
async def plane(tmp_path: Path) -> AsyncIterator[FakeControlPlane]:
    async with plane_with(FILES, tmp_path / "plane") as plane:
        yield plane


class Node:
    """The builds and weights of one node, and the ends of its downloads."""

    def __init__(self, plane: FakeControlPlane, home: Path, name: str = "n-00000001") -> None:
        home.mkdir(exist_ok=True)
        enrolment = Enrolment(plane.url, AgentKind.NODE, name, home)
        enrolment.store_credential("sw_1_secret")
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        self.home, self.now_s = home, 0.0
        self.downloads = Downloads(enrolment, self._wake)
        self.weights = NodeWeights(home / "weights", home / "fetched", self.downloads)
        self.builds = NodeBuilds(home / "builds", self.downloads)
        self.ahead = Prefetching(self.builds, self.weights, self.downloads, lambda: self.now_s)

    def _wake(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)

    async def ended(self) -> None:
        async with asyncio.timeout(60):
            await self._ended.wait()
        self._ended.clear()

    async def obtain(self, plan: EnginePlan) -> Mapping[str, Path]:
        with contextlib.ExitStack() as locks:
            folders = self.weights.obtain(plan, [], locks)
            if folders is None:
                await self.ended()
                folders = self.weights.obtain(plan, [], locks)
            assert folders is not None
            return folders

    async def fetch_ahead(self, wanted: Prefetch) -> None:
        """Until nothing is on its way."""
        self.ahead.advance(wanted)
        while self.downloads.running:
            await self.ended()
            self.ahead.advance(wanted)


def stated(plane: FakeControlPlane, name: str = "smollm2") -> Artifact:
    assert plane.weights is not None
    listed = json.loads((plane.weights / "manifest.json").read_text())
    return Artifact(f"file:///store/{name}", listed["digest"])


def plan(one: Artifact, **fields: object) -> EnginePlan:
    made = EnginePlan(engine="vllm", served_model="m", max_concurrency=1, ready_timeout_s=60.0, artifact=one)
    return structs.replace(made, **fields)


def content(folder: Path) -> dict[str, bytes]:
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if name != "manifest.json"}


@pytest.mark.asyncio
async def test_they_come_once_and_an_engine_can_read_but_not_change_them(
    plane: FakeControlPlane, tmp_path: Path
) -> None:
    node, one = Node(plane, tmp_path / "node"), stated(plane)
    folders = await node.obtain(plan(one))
    assert content(folders[one.digest]) == FILES
    requests = list(plane.build_requests)
    assert await node.obtain(plan(one)) == folders
    assert plane.build_requests == requests
    modes = {stat.S_IMODE(path.stat().st_mode) for path in folders[one.digest].rglob("*")}
    assert modes == {0o644, 0o755}
    whole = sum(path.stat().st_size for path in folders[one.digest].rglob("*") if path.is_file())
    assert node.weights.report() == (NodeArtifact(one.digest, whole, is_offered=True),)
    of_adapter = PlanAdapter("tuned", one)
    local = local_plan(plan(one, draft=one, adapters=(of_adapter, PlanAdapter("empty"))), folders)
    here = Artifact(folders[one.digest].as_uri(), one.digest)
    assert (local.artifact, local.draft) == (here, here)
    assert [each.artifact for each in local.adapters] == [here, None]


@pytest.mark.asyncio
async def test_a_folder_that_the_node_has_is_read_in_place(plane: FakeControlPlane, tmp_path: Path) -> None:
    manifest = artifact(tmp_path / "own")
    own = Artifact((tmp_path / "own").as_uri(), manifest.digest)
    node = Node(plane, tmp_path / "node")
    assert await node.obtain(plan(own, draft=Artifact("s3://models/draft", own.digest))) == {}
    assert plane.build_requests == []


@pytest.mark.asyncio
async def test_an_interrupted_download_continues_and_a_wrong_beginning_costs_one_more(
    plane: FakeControlPlane, tmp_path: Path
) -> None:
    node, one = Node(plane, tmp_path / "node"), stated(plane)
    files = entry_of(one.digest, node.home / "weights").partial / "files"
    (files / "a folder").mkdir(parents=True)
    (files / "config.json.coming").write_bytes(b"[")
    (files / "a folder/model 1.safetensors.coming").write_bytes(FILES["a folder/model 1.safetensors"][:1000])
    assert content((await node.obtain(plan(one)))[one.digest]) == FILES
    assert [first for name, first in plane.build_requests if name == "model 1.safetensors"] == ["bytes=1000-"]
    assert [first for name, first in plane.build_requests if name == "config.json"] == ["bytes=1-", ""]


def tamper(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"[]")


def replace_all(folder: Path) -> None:
    artifact(folder, {"config.json": b"another"})


def add_file(folder: Path) -> None:
    (folder / "evil.py").write_bytes(b"import os")


def leave_folder(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"x")
    listed = Manifest({"../../evil": file_sha256(folder / "config.json")}, {})
    (folder / "manifest.json").write_text(manifest_text(listed))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("change", "wrong", "own_digest"),
    [
        (tamper, "arrives damaged: config.json differs from its manifest", False),
        (replace_all, "has the digest sha256:.*, but the order says sha256:", False),
        (add_file, "other files than its manifest.json lists", False),
        (leave_folder, "lists '../../evil', which is outside of the artifact", True),
    ],
)
async def test_weights_that_are_not_those_of_the_order_never_reach_an_engine(
    plane: FakeControlPlane, tmp_path: Path, change: Callable[[Path], None], wrong: str, own_digest: bool
) -> None:
    node, one = Node(plane, tmp_path / "node"), stated(plane)
    assert plane.weights is not None
    change(plane.weights)
    one = stated(plane) if own_digest else one
    with pytest.raises(EngineUnavailable, match=wrong):
        await node.obtain(plan(one))
    assert not entry_of(one.digest, node.home / "weights").is_complete
    assert "evil" not in {name for _, _, names in os.walk(tmp_path) for name in names}


@pytest.mark.asyncio
async def test_weights_that_no_host_has_are_named(
    plane: FakeControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "FIRST_PAUSE_S", 0.001)
    one, plane.weights = stated(plane), None
    with pytest.raises(EngineUnavailable, match=r"artifact file:///store/smollm2 does not arrive: .* answered 404"):
        await Node(plane, tmp_path / "node").obtain(plan(one))
    with pytest.raises(EngineUnavailable, match=r"cannot be fetched: .*is not the digest of an artifact"):
        await Node(plane, tmp_path / "node").obtain(plan(Artifact("file:///x", "sha256:..")))


def is_locked(entry: Entry) -> bool:
    import fcntl

    with entry.lock.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


@pytest.mark.asyncio
async def test_builds_and_weights_come_in_advance_one_by_one_and_are_kept_while_wanted(
    plane: FakeControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane.builds = small_build(tmp_path / "small")
    node, build, one = Node(plane, tmp_path / "node"), ordered(tmp_path / "small"), stated(plane)
    own = Artifact((tmp_path / "own").as_uri(), artifact(tmp_path / "own").digest)
    with s3_server() as url:
        stored = upload(empty_bucket(url, monkeypatch), tmp_path / "source", {"config.json": b"in s3"})
        wanted = Prefetch((build,), (own, one, stored))
        node.ahead.advance(wanted)
        assert [fetch.digest for fetch in node.downloads.running] == [build.digest]
        await node.fetch_ahead(wanted)
    report = node.ahead.report()
    assert {each.digest for each in report.artifacts} == {own.digest, one.digest, stored.digest}
    assert report.troubles == {}
    assert content(entry_of(stored.digest, node.home / "weights").folder) == {"config.json": b"in s3"}
    held = [entry_of(build.digest, node.home / "builds"), entry_of(one.digest, node.home / "weights")]
    assert all(is_locked(entry) for entry in held)
    node.ahead.release()
    assert not any(is_locked(entry) for entry in held)
    node.ahead.advance(wanted)
    assert all(is_locked(entry) for entry in held)
    node.ahead.advance(None)
    assert not any(is_locked(entry) for entry in held)
    with contextlib.ExitStack() as locks:
        assert set(node.weights.obtain(plan(one, draft=stored), [], locks) or ()) == {one.digest, stored.digest}


@pytest.mark.asyncio
async def test_what_cannot_be_fetched_is_reported_delays_nothing_else_and_is_tried_again(
    plane: FakeControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "FIRST_PAUSE_S", 0.001)
    plane.builds = small_build(tmp_path / "small")
    node, build, one = Node(plane, tmp_path / "node"), ordered(tmp_path / "small"), stated(plane)
    assert build.facts is not None
    newer = structs.replace(build, digest="sha256:" + "0" * 64, facts=structs.replace(build.facts, least_glibc="9.9"))
    missing = Artifact("file:///store/gone", "sha256:" + "1" * 64)
    wanted = Prefetch((newer, build), (missing, one))
    await node.fetch_ahead(wanted)
    report = node.ahead.report()
    assert [each.digest for each in report.artifacts] == [one.digest]
    assert set(report.troubles) == {newer.digest, missing.digest}
    assert "it needs glibc 9.9 or newer" in report.troubles[newer.digest]
    requests = len(plane.build_requests)
    node.ahead.advance(wanted)
    assert node.downloads.running == ()
    assert len(plane.build_requests) == requests
    node.now_s = RETRY_S
    await node.fetch_ahead(Prefetch((), (missing,)))
    assert len(plane.build_requests) > requests
    os.close(held.lock if (held := node.builds.obtain(build)) is not None else -1)


@pytest.mark.asyncio
async def test_a_spare_keeps_its_weights_in_memory_and_says_how_much(plane: FakeControlPlane, tmp_path: Path) -> None:
    node, one = Node(plane, tmp_path / "node"), stated(plane)
    await node.fetch_ahead(Prefetch((), (one,)))
    [held] = node.ahead.report().artifacts
    assert (held.stored_bytes > 0, held.memory_bytes) == (True, 0)  # not a spare
    node.ahead.advance(Prefetch((), (one,)), is_spare=True)
    node.ahead.page_cache.wait()
    assert node.ahead.report().artifacts == (structs.replace(held, memory_bytes=held.stored_bytes),)
    node.ahead.advance(Prefetch((), (one,)))
    assert node.ahead.report().artifacts == (held,)


def test_weights_are_read_into_memory_in_order_as_far_as_half_of_it_reaches(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("large", "first", "second")}
    for name, folder in folders.items():
        folder.mkdir()
        (folder / "weights").write_bytes(os.urandom(1 << (21 if name == "large" else 20)))
        (folder / "link").symlink_to("/proc/kcore")
        dropped_from_memory(folder / "weights")
    before = {name: resident_bytes(folder / "weights", 1 << 20) for name, folder in folders.items()}
    cache = PageCache(available=lambda: 3 << 20)
    cache.keep(folders)
    cache.wait()
    held = {name: cache.bytes_in_memory(name) for name in folders}
    assert held["first"] == 1 << 20
    assert held["second"] == before["second"]
    assert before["large"] == 1 << 20 or held["large"] < 1 << 21


def dropped_from_memory(path: Path) -> None:
    """On a disk; a file system in memory keeps it."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
