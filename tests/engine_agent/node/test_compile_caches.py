"""A node's compile cache: fetched before a start, uploaded after it, and never the reason for a start that fails."""

import asyncio
import fcntl
import hashlib
import json
import os
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import pytest_asyncio
from msgspec import structs

from engine_agent.engines.base import CompileFolders
from engine_agent.engines.compile_cache import pack
from engine_agent.node import compile_caches
from engine_agent.node.accounts import Service, service_account
from engine_agent.node.compile_caches import HeldCache, NodeCaches
from engine_agent.node.downloads import Downloads
from engine_agent.node.enrolment import Enrolment
from engine_agent.node.launch import NodePlace
from engine_agent.node.node import LocalNode
from engine_agent.node.planning.node import StartEngine, StopEngine
from engine_agent.protocol.compile_caches import parse_range, parse_unpacked
from engine_agent.protocol.messages import Artifact, EnginePlan
from engine_agent.protocol.states import AgentKind
from tests.engine_agent.fake_control_plane import eventually
from tests.engine_agent.orders import assignment

KEY = hashlib.sha256(b"key").hexdigest()
FOLDERS = CompileFolders({"CACHE": "triton"}, ("triton",))


class Fleet:
    """The control plane's caches over HTTP. `cache`: digest, unpacked bytes and archive. `refusal`: the status of every
    answer. `parts`: what was uploaded."""

    def __init__(self) -> None:
        self.cache: tuple[str, int, bytes] | None = None
        self.refusal = 0
        self.early = 0
        self.parts: list[bytes] = []
        self.requests: list[str] = []
        fleet = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                is_archive = self.path.endswith("/archive")
                fleet.requests.append("archive" if is_archive else "facts")
                if fleet.refusal or fleet.cache is None:
                    self._answer(fleet.refusal or 404)
                    return
                digest, unpacked, content = fleet.cache
                facts = {"digest": digest, "packed_bytes": len(content), "unpacked_bytes": unpacked}
                self._answer(200, content if is_archive else json.dumps(facts).encode())

            def do_PUT(self) -> None:
                fleet.requests.append("PUT")
                part = self.rfile.read(int(self.headers["Content-Length"]))
                if fleet.refusal or (fleet.early and part):
                    fleet.early -= 1
                    self._answer(fleet.refusal or 425, b'{"error": "the fleet has one"}')
                    return
                if part:
                    fleet.parts.append(part)
                self._answer(200, json.dumps({"next": sum(map(len, fleet.parts))}).encode())

            def _answer(self, status: int, body: bytes = b"{}") -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    fleet = Fleet()
    yield fleet
    fleet.close()


class Caches:
    """The caches of one node whose machine has this folder."""

    def __init__(self, url: str, home: Path, node: str = "n-1") -> None:
        (home / node).mkdir(parents=True, exist_ok=True)
        self.enrolment = Enrolment(url, AgentKind.NODE, node, home / node)
        self.enrolment.store_credential("sw_1_secret")
        self._changed = threading.Event()
        downloads = Downloads(self.enrolment, self._changed.set)
        self.caches = NodeCaches(home / "compiled", node, downloads, self._changed.set)

    def start(self, folders: CompileFolders = FOLDERS) -> HeldCache:
        """The cache of a start of an engine; the engine's lock is closed when it ends."""
        while not self.caches.prepare(KEY, folders):
            self.wait()
        return self.caches.obtain()

    def become_ready(self) -> None:
        """As the engine does, and waits until its cache was offered."""
        self._changed.clear()
        self.caches.is_good()
        self.caches.offer()
        self.wait()

    def wait(self) -> None:
        assert self._changed.wait(30)
        self._changed.clear()

    @property
    def state(self) -> str:
        [report] = self.caches.report()
        return report.state


def compile_into(held: HeldCache, text: bytes = b"machine code") -> None:
    (held.folder / "triton").mkdir(exist_ok=True)
    (held.folder / "triton" / "kernel").write_bytes(text)


def stored(fleet: Fleet, tmp_path: Path, text: bytes = b"machine code") -> None:
    """Puts a cache into the fleet."""
    made = tmp_path / "made"
    (made / "triton").mkdir(parents=True)
    (made / "triton" / "kernel").write_bytes(text)
    packed = pack(made, ("triton",), tmp_path / "archive", 2**20)
    assert packed is not None
    fleet.cache = (packed.digest, packed.unpacked_bytes, (tmp_path / "archive").read_bytes())


def test_the_first_engine_compiles_and_uploads_and_the_next_node_starts_with_it(fleet: Fleet, tmp_path: Path) -> None:
    first = Caches(fleet.url, tmp_path / "one")
    held = first.start()
    assert (list(held.folder.iterdir()), first.state) == ([], "compiles: the fleet has no cache for it yet")
    compile_into(held)
    first.become_ready()
    os.close(held.lock)
    assert first.state == "uploaded to the fleet"
    [report] = first.caches.report()
    assert first.caches.offered() == (report.digest,)
    content = b"".join(fleet.parts)
    assert (hashlib.sha256(content).hexdigest(), len(content)) == (report.digest, report.packed_bytes)
    fleet.cache = (report.digest, 1000, content)
    second = Caches(fleet.url, tmp_path / "two")
    there = second.start()
    assert (there.folder / "triton" / "kernel").read_bytes() == b"machine code"
    assert second.state == "fetched from the fleet"
    requests = len(fleet.requests)
    second.caches.offer()
    os.close(there.lock)
    assert len(fleet.requests) == requests


@pytest.mark.parametrize("damage", ["digest", "content", "size", "facts", "status", "unreachable"])
def test_a_bad_or_missing_cache_only_means_a_start_without_it(damage: str, fleet: Fleet, tmp_path: Path) -> None:
    stored(fleet, tmp_path)
    assert fleet.cache is not None
    digest, size, content = fleet.cache
    match damage:
        case "digest":
            fleet.cache = ("0" * 64, size, content)
        case "content":
            wrong = bytes(30) + content[30:]
            fleet.cache = (hashlib.sha256(wrong).hexdigest(), size, wrong)
        case "size":
            fleet.cache = (digest, 3, content)
        case "facts":
            fleet.cache = ("../../etc/passwd", size, content)
        case "status":
            fleet.refusal = 503
    url = "http://127.0.0.1:9" if damage == "unreachable" else fleet.url
    node = Caches(url, tmp_path)
    held = node.start()
    assert list(held.folder.iterdir()) == []
    is_archive = damage in ("content", "size", "facts")
    reason = {"digest": "arrives damaged: "}.get(damage, f"does not arrive: {url}: ")
    reason = "of the fleet is damaged: " if is_archive else reason
    assert node.state.startswith(f"compiles: the compile cache {reason}")
    os.close(held.lock)


def test_an_engine_that_did_not_become_ready_starts_without_that_cache(fleet: Fleet, tmp_path: Path) -> None:
    stored(fleet, tmp_path, b"poison")
    node = Caches(fleet.url, tmp_path)
    os.close(node.start().lock)
    held = node.start()
    assert (list(held.folder.iterdir()), fleet.requests) == ([], ["facts", "archive"])
    assert "the last engine with this cache did not become ready" in node.state
    compile_into(held)
    node.caches.is_good()
    os.close(held.lock)
    again = node.start()
    assert node.state == "kept from an earlier start"
    assert (again.folder / "triton" / "kernel").read_bytes() == b"machine code"
    os.close(again.lock)


def test_engines_of_a_machine_share_a_folder_unless_their_compiler_cannot(fleet: Fleet, tmp_path: Path) -> None:
    one, two = Caches(fleet.url, tmp_path, "n-1"), Caches(fleet.url, tmp_path, "n-2")
    first, second = one.start(), two.start()
    assert first.folder == second.folder
    assert two.state == "shared with another engine of this machine"
    alone = CompileFolders({}, (), is_one_engines=True)
    own = [each.start(alone).folder for each in (Caches(fleet.url, tmp_path, name) for name in ("n-1", "n-2"))]
    assert len({first.folder, *own}) == 3
    os.close(first.lock)
    os.close(second.lock)


def test_a_cell_that_does_not_serve_yet_uploads_later(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_caches, "OFFER_EVERY_S", 0.001)
    fleet.early = 3
    node = Caches(fleet.url, tmp_path)
    held = node.start()
    compile_into(held)
    node.become_ready()
    assert (node.state, len(fleet.parts)) == ("uploaded to the fleet", 1)
    assert sorted(path.name for path in held.folder.parent.iterdir()) == [KEY, f"{KEY}.lock", "room.lock"]
    os.close(held.lock)


def test_a_refused_upload_says_why(fleet: Fleet, tmp_path: Path) -> None:
    node = Caches(fleet.url, tmp_path)
    held = node.start()
    compile_into(held)
    fleet.refusal = 409
    node.become_ready()
    assert node.state == "not uploaded: the fleet has one"
    os.close(held.lock)


def test_what_an_earlier_engine_may_have_changed_is_not_uploaded(fleet: Fleet, tmp_path: Path) -> None:
    node = Caches(fleet.url, tmp_path)
    fleet.refusal = 500
    held = node.start()
    compile_into(held)
    node.caches.is_good()
    os.close(held.lock)
    fleet.refusal = 0
    held = node.start()
    requests = list(fleet.requests)
    node.caches.offer()
    os.close(held.lock)
    assert (node.state, fleet.requests) == ("kept from an earlier start", requests)


def test_a_full_or_forbidden_disk_is_an_engine_without_cache(fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "compiled").write_text("a file in the way")
    node = Caches(fleet.url, tmp_path)
    with pytest.raises(OSError, match="compiled"):
        node.start()
    assert node.state.startswith("none: ")


class Rig:
    """A node whose vLLM is a script that writes its environment to a file."""

    def __init__(self, url: str, home: Path) -> None:
        self.home, self.changed = home, asyncio.Event()
        program = home / "vllm" / "bin" / "python"
        program.parent.mkdir(parents=True)
        program.write_text(f"#!/bin/sh\ncd {home}/engine || cd {home}\nenv > part\nmv part seen\nexec sleep 60\n")
        program.chmod(0o755)
        self.weights = Artifact((home / "m").as_uri(), "sha256:12")
        (home / "m").mkdir()
        (home / "m/manifest.json").touch()
        enrolment = Enrolment(url, AgentKind.NODE, "n-1", home)
        enrolment.store_credential("sw_1_secret")
        loop = asyncio.get_running_loop()

        def wake() -> None:
            loop.call_soon_threadsafe(self.changed.set)

        downloads = Downloads(enrolment, wake)
        self.node = LocalNode(
            NodePlace("n-1", home, "127.0.0.1", 19980, home, home / "fetched", lambda: {"vllm": program}),
            stack=lambda: {"kernel": "6"},
            on_change=self.changed.set,
            on_fault=lambda _: None,
            downloads=downloads,
            caches=NodeCaches(home / "compiled", "n-1", downloads, wake),
        )

    async def start(self, plan: EnginePlan) -> dict[str, str]:
        """Starts the engine and returns its environment."""
        step = StartEngine(assignment(plan=structs.replace(plan, artifact=self.weights)), "a test")
        self.node.apply(step)
        if not self.node.is_serving:
            async with asyncio.timeout(30):
                await self.changed.wait()
            self.node.apply(step)
        assert self.node.is_serving
        home = self.home / "engine" if service_account(Service.ENGINE) else self.home
        await eventually((home / "seen").exists)
        return dict(line.partition("=")[::2] for line in (home / "seen").read_text().splitlines())


@pytest_asyncio.fixture
async def rig(fleet: Fleet, tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(fleet.url, tmp_path)
    rig.node.resume()
    yield rig
    rig.node.caches.close()
    rig.node.apply(StopEngine(0.0, "the test is over"))
    await eventually(lambda: not rig.node.is_serving)
    rig.node.close()


PLAN = EnginePlan("vllm", "m", 1, 60.0)


@pytest.mark.processes
@pytest.mark.asyncio
async def test_an_engine_starts_in_its_cache_and_keeps_it_locked(rig: Rig) -> None:
    env = await rig.start(PLAN)
    [folder] = (path for path in (rig.home / "compiled").iterdir() if path.is_dir())
    assert env["VLLM_CACHE_ROOT"] == str(folder / "vllm")
    if account := service_account(Service.ENGINE):
        assert folder.stat().st_uid == account.uid
    with (rig.home / "compiled" / f"{folder.name}.lock").open() as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.processes
@pytest.mark.asyncio
async def test_an_eager_engine_starts_without_asking(rig: Rig, fleet: Fleet) -> None:
    env = await rig.start(EnginePlan("vllm", "m", 1, 60.0, artifact=PLAN.artifact, args=("--enforce-eager",)))
    assert "VLLM_CACHE_ROOT" not in env
    assert (fleet.requests, rig.node.caches.report()) == ([], ())


@pytest.mark.parametrize("text", ["bytes 0-0/1", "bytes 4-9/10", "bytes 0-4194303/5000000"])
def test_the_range_of_a_part(text: str) -> None:
    part = parse_range(text)
    assert part is not None
    assert f"bytes {part.first}-{part.last}/{part.total}" == text


@pytest.mark.parametrize("text", ["", "bytes 1-0/2", "bytes 0-2/2", "bytes 0-4194304/5000000", "bytes 0-1/" + "9" * 40])
def test_what_is_no_range_of_a_part(text: str) -> None:
    assert parse_range(text) is None
    assert parse_unpacked(text) is None
