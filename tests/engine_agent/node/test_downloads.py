"""Nodes give each other weights, builds and compile caches before the control plane or a bucket does. A node that lies,
is slow, hangs or is revoked costs a little time and nothing else; only nodes of the fleet get anything."""

import asyncio
import contextlib
import json
import os
import shutil
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from msgspec import structs

from engine_agent.engines import s3_artifact
from engine_agent.engines.artifacts import entry_of
from engine_agent.engines.builds.store import parts_folder
from engine_agent.engines.compile_cache import pack
from engine_agent.node import compile_caches, downloads, peers
from engine_agent.node.compile_caches import COMPILED, NodeCaches
from engine_agent.node.identity import Identity
from engine_agent.node.peers import PeerServer
from engine_agent.protocol.compile_caches import ARCHIVE_NAME
from engine_agent.protocol.identity import IdentityKind
from engine_agent.protocol.messages import Holder, Prefetch
from engine_agent.protocol.ports import ARTIFACTS
from tests.engine_agent.authority import FleetOfTests
from tests.engine_agent.engines.builds.packed import ordered, small_build
from tests.engine_agent.engines.s3_server import BUCKET, empty_bucket, s3_server, upload
from tests.engine_agent.fake_control_plane import FakeControlPlane
from tests.engine_agent.node.test_compile_caches import FOLDERS, KEY, compile_into
from tests.engine_agent.node.test_peers import answered
from tests.engine_agent.node.test_weights import Node, content, plan, plane_with, stated
from tests.ports import free_port

pytestmark = [pytest.mark.processes, pytest.mark.slow]

FILES = {f"part {number}/model.safetensors": os.urandom(100_000 + number) for number in range(4)}
SIZE = sum(map(len, FILES.values()))


@pytest_asyncio.fixture
async def plane(tmp_path: Path) -> AsyncIterator[FakeControlPlane]:
    async with plane_with(FILES, tmp_path / "plane") as plane:
        yield plane


class Fleet:
    """Nodes with certificates. `serve` makes one a holder."""

    def __init__(self, plane: FakeControlPlane, authority: FleetOfTests, home: Path) -> None:
        self.plane, self.authority, self.home = plane, authority, home
        self.identities: dict[str, Identity] = {}
        self.open = contextlib.ExitStack()

    def node(self, name: str) -> Node:
        node = Node(self.plane, self.home / name, name)
        self.identities[name] = self.authority.certify(node.home, IdentityKind.NODE, name)
        return node

    def serve(self, name: str) -> Holder:
        port, home = free_port(), self.home / name
        server = PeerServer("127.0.0.1", port, self.identities[name], home)
        self.open.callback(server.close)
        return self.named(name, port)

    def named(self, name: str, port: int) -> Holder:
        holder = Holder(name, "127.0.0.1", port - ARTIFACTS)
        self.plane.holders.append(holder)
        return holder


@pytest.fixture
def fleet(plane: FakeControlPlane, authority: FleetOfTests, tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(plane, authority, tmp_path)
    with fleet.open:
        yield fleet


def lists(plane: FakeControlPlane) -> int:
    """Bytes of the manifest and the sizes, which always come from the control plane."""
    assert plane.weights is not None
    sizes = json.dumps({name: len(text) for name, text in FILES.items()})
    return (plane.weights / "manifest.json").stat().st_size + len(sizes)


async def fetched(fleet: Fleet, name: str) -> Node:
    node, one = fleet.node(name), stated(fleet.plane)
    assert content((await node.obtain(plan(one)))[one.digest]) == FILES
    return node


@pytest.mark.asyncio
async def test_three_nodes_of_a_cell_cost_the_control_plane_one_copy(fleet: Fleet) -> None:
    names, apart, together = ("n-1", "n-2", "n-3"), 0, 0
    for name in names:
        await fetched(fleet, name)
    apart, fleet.plane.sent_bytes = fleet.plane.sent_bytes, 0
    fleet.home = fleet.home / "with peers"
    fleet.home.mkdir()
    for name in names:
        node = await fetched(fleet, name)
        [report] = node.weights.report()
        assert report.peer_bytes == (SIZE if name != "n-1" else 0)
        fleet.serve(name)
    together = fleet.plane.sent_bytes
    assert (apart, together) == (3 * SIZE + 3 * lists(fleet.plane), SIZE + 3 * lists(fleet.plane))


@pytest.mark.asyncio
async def test_nodes_that_fetch_at_the_same_time_give_each_other_what_has_arrived(fleet: Fleet) -> None:
    nodes = [fleet.node(name) for name in ("n-1", "n-2", "n-3")]
    for name in ("n-1", "n-2", "n-3"):
        fleet.serve(name)
    one = stated(fleet.plane)
    for folders in await asyncio.gather(*(node.obtain(plan(one)) for node in nodes)):
        assert content(folders[one.digest]) == FILES
    given = sum(node.downloads.peer_bytes(one.digest) for node in nodes)
    assert given > 0  # the last of them finds everything with the others
    assert SIZE <= fleet.plane.sent_bytes - 3 * lists(fleet.plane) == 3 * SIZE - given


@pytest.mark.asyncio
async def test_a_build_comes_from_a_node_that_unpacked_it(fleet: Fleet, tmp_path: Path) -> None:
    fleet.plane.builds = small_build(tmp_path / "small")
    build = ordered(fleet.plane.builds)
    first, second = fleet.node("n-1"), fleet.node("n-2")
    for node in (first, second):
        await node.fetch_ahead(Prefetch((build,)))
        fleet.serve(node.home.name)
        held = node.builds.obtain(build)
        assert held is not None
        os.close(held.lock)
    [report] = second.builds.report()
    sent = sum(path.stat().st_size for path in parts_folder(entry_of(build.digest, second.home / "builds")).iterdir())
    assert report.peer_bytes == sent - (fleet.plane.builds / "manifest.json").stat().st_size


class CachedStart:
    """A node's start of an engine that compiles."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.caches = NodeCaches(node.home / COMPILED, node.home.name, node.downloads, node._wake)

    async def prepared(self) -> bytes:
        """What another engine compiled; empty if this one must compile."""
        self.caches.prepare(KEY, FOLDERS)
        await self._node.ended()
        held = self.caches.obtain()
        os.close(held.lock)
        compiled = held.folder / "triton" / "kernel"
        return compiled.read_bytes() if compiled.exists() else b""

    async def compile(self) -> None:
        assert await self.prepared() == b""
        held = self.caches.obtain()
        compile_into(held, MACHINE_CODE)
        os.close(held.lock)
        self.caches.is_good()
        self.caches.offer()
        await self._node.ended()

    @property
    def peer_bytes(self) -> int:
        [report] = self.caches.report()
        return report.peer_bytes


MACHINE_CODE = os.urandom(100_000)


@pytest.mark.asyncio
async def test_a_compile_cache_comes_from_a_node_once_the_control_plane_has_it(fleet: Fleet) -> None:
    fleet.plane.caches = {}
    first, second, third = (CachedStart(fleet.node(name)) for name in ("n-1", "n-2", "n-3"))
    assert (await second.prepared(), second.caches.offered()) == (b"", ())
    await first.compile()
    [(digest, _, content)] = fleet.plane.caches.values()
    assert first.caches.offered() == (digest,)
    fleet.serve("n-1")
    assert await third.prepared() == MACHINE_CODE
    assert (third.peer_bytes, fleet.plane.sent_bytes) == (len(content), 0)
    assert third.caches.offered() == (digest,)
    fleet.plane.caches.clear()  # an admin deleted it: its digest is unknown, and no node is asked
    fourth = CachedStart(fleet.node("n-4"))
    assert await fourth.prepared() == b""


@pytest.mark.asyncio
async def test_the_archive_of_a_machine_is_checked_again_and_fetched_once(fleet: Fleet, tmp_path: Path) -> None:
    fleet.plane.caches = {}
    await CachedStart(fleet.node("n-1")).compile()
    [(digest, _, content)] = fleet.plane.caches.values()
    node = fleet.node("n-2")
    assert await CachedStart(node).prepared() == MACHINE_CODE
    shutil.rmtree(node.home / COMPILED)
    assert await CachedStart(node).prepared() == MACHINE_CODE
    assert fleet.plane.sent_bytes == len(content)
    shutil.rmtree(node.home / COMPILED)
    (node.home / compile_caches.ARCHIVES / digest / ARCHIVE_NAME).write_bytes(b"other code")
    damaged = CachedStart(node)
    assert (await damaged.prepared(), damaged.caches.offered()) == (b"", ())
    shutil.rmtree(node.home / COMPILED)
    assert await CachedStart(node).prepared() == MACHINE_CODE


@pytest.mark.asyncio
async def test_code_of_a_compromised_node_never_reaches_an_engine(fleet: Fleet) -> None:
    fleet.plane.caches = {}
    first = CachedStart(fleet.node("n-1"))
    await first.compile()
    fleet.serve("n-1")
    [offered] = (fleet.home / "n-1" / compile_caches.ARCHIVES).glob("*/" + ARCHIVE_NAME)
    poison = pack(poisoned(fleet.home / "made"), ("triton",), offered, 2**20)
    assert poison is not None
    second = CachedStart(fleet.node("n-2"))
    assert await second.prepared() == MACHINE_CODE
    [(digest, _, content)] = fleet.plane.caches.values()
    assert (second.peer_bytes, fleet.plane.sent_bytes) == (0, len(content))
    assert second.caches.offered() == (digest,)


def poisoned(folder: Path) -> Path:
    (folder / "triton").mkdir(parents=True)
    (folder / "triton" / "kernel").write_bytes(b"poison")
    return folder


@pytest.mark.asyncio
async def test_nodes_that_send_a_cache_slowly_leave_time_for_the_control_plane(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_caches, "PEERS_LIMIT_S", 0.2)
    fleet.plane.caches = {}
    await CachedStart(fleet.node("n-1")).compile()
    fleet.node("n-8")
    slow = BadPeer(fleet.identities["n-8"], drip)
    fleet.open.callback(slow.listener.close)
    fleet.named("n-8", slow.port)
    second = CachedStart(fleet.node("n-2"))
    assert (await second.prepared(), second.peer_bytes, slow.requests) == (MACHINE_CODE, 0, 1)


@pytest.mark.long
@pytest.mark.asyncio
async def test_what_nodes_hold_does_not_come_from_the_bucket(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_server() as url:
        client = empty_bucket(url, monkeypatch)
        stored = upload(client, tmp_path / "source", FILES)
        first, second = fleet.node("n-1"), fleet.node("n-2")
        for node in (first, second):
            await node.fetch_ahead(Prefetch((), (stored,)))
            assert content(entry_of(stored.digest, node.home / "weights").folder) == FILES
            fleet.serve(node.home.name)
            name = next(iter(FILES))
            client.put_object(Bucket=BUCKET, Key=f"llama/3/{name}", Body=bytes(len(FILES[name])))
        [report] = second.weights.report()
        assert report.peer_bytes == SIZE
        third = fleet.node("n-3")
        fleet.plane.holders.clear()
        await third.fetch_ahead(Prefetch((), (stored,)))
        assert "upload the artifact again" in third.ahead.report().troubles[stored.digest]


@pytest.mark.long
@pytest.mark.asyncio
async def test_a_start_takes_weights_in_s3_from_nodes_that_hold_them_or_leaves_them_to_its_launcher(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_server() as url:
        stored = upload(empty_bucket(url, monkeypatch), tmp_path / "source", FILES)
        first, second = fleet.node("n-1"), fleet.node("n-2")
        assert await first.obtain(plan(stored)) == {}
        assert not (first.home / "weights").exists()
        await first.fetch_ahead(Prefetch((), (stored,)))
        fleet.serve("n-1")
        assert content((await second.obtain(plan(stored)))[stored.digest]) == FILES
        assert second.downloads.peer_bytes(stored.digest) == SIZE
    third = fleet.node("n-3")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(s3_artifact, "ATTEMPTS", 1)
    assert await third.obtain(plan(stored)) == {}


class BadPeer:
    """A node of the fleet that answers each request for a file by `answer`."""

    def __init__(self, identity: Identity, answer: Callable[[ssl.SSLSocket], None]) -> None:
        self._context, self._answer = identity.server_context(), answer
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.requests = 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                with contextlib.suppress(OSError), self._context.wrap_socket(connection, server_side=True) as link:
                    link.recv(8192)
                    self.requests += 1
                    self._answer(link)


def lie(link: ssl.SSLSocket) -> None:
    link.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + bytes(100_000))


def send_without_end(link: ssl.SSLSocket) -> None:
    link.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n" + bytes(100_000))


def hang(link: ssl.SSLSocket) -> None:
    link.recv(1)


def drip(link: ssl.SSLSocket) -> None:
    link.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while True:
        link.sendall(b"x")
        threading.Event().wait(0.02)


def break_off(link: ssl.SSLSocket) -> None:
    link.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\nbeginning")


def redirect(link: ssl.SSLSocket) -> None:
    link.sendall(b"HTTP/1.1 302 Found\r\nLocation: https://elsewhere/\r\nContent-Length: 0\r\n\r\n")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "answer",
    [lie, hang, *(pytest.param(one, marks=pytest.mark.long) for one in (send_without_end, drip, break_off, redirect))],
)
async def test_a_bad_peer_costs_one_request_and_the_rest_comes_from_elsewhere(
    answer: Callable[[ssl.SSLSocket], None], fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    if answer in (hang, drip):
        monkeypatch.setattr(downloads, "PEER_LIMIT_S", 0.5)
    fleet.node("n-8")
    bad = BadPeer(fleet.identities["n-8"], answer)
    fleet.open.callback(bad.listener.close)
    fleet.named("n-8", bad.port)
    node = await fetched(fleet, "n-1")
    [fetch] = node.downloads._fetches.values()
    assert (fetch.bad_peers, bad.requests <= 1) == ({"n-8"}, True)
    assert node.weights.report()[0].peer_bytes == 0
    assert [path for path in (node.home / "weights").rglob("*") if path.suffix in (".peer", ".coming")] == []


@pytest.mark.asyncio
async def test_only_the_named_node_with_a_valid_certificate_is_asked(fleet: Fleet) -> None:
    await fetched(fleet, "n-1")
    gone, expected = fleet.node("n-2"), fleet.plane.sent_bytes
    serial = fleet.authority.renew(fleet.identities["n-1"], IdentityKind.NODE, "n-1")
    other = fleet.serve("n-1")
    fleet.plane.holders = [structs.replace(other, node="n-9"), other, Holder("n-7", "127.0.0.1", 1)]
    fleet.authority.revoke(serial, fleet.identities["n-2"])
    await gone.obtain(plan(stated(fleet.plane)))
    assert fleet.plane.sent_bytes == 2 * expected
    assert gone.downloads.peer_bytes(stated(fleet.plane).digest) == 0


@pytest.mark.asyncio
async def test_nodes_that_are_busy_or_lack_a_file_are_asked_again(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await fetched(fleet, "n-1")
    one = stated(fleet.plane)
    weights = entry_of(one.digest, first.home / "weights")
    lacking, *_ = sorted(FILES)
    weights.folder.rename(weights.partial)
    (weights.partial / "files").mkdir()
    for name in sorted(FILES)[1:]:
        (weights.partial / "files" / name).parent.mkdir()
        (weights.partial / name).rename(weights.partial / "files" / name)
    fleet.serve("n-1")
    second = await fetched(fleet, "n-2")
    assert second.downloads.peer_bytes(one.digest) == SIZE - len(FILES[lacking])
    monkeypatch.setattr(peers, "UPLOADS_AT_ONCE", 0)
    fleet.plane.holders.clear()
    fleet.serve("n-2")
    third = await fetched(fleet, "n-3")
    [fetch] = third.downloads._fetches.values()
    assert (fetch.peer_bytes, fetch.bad_peers) == (0, set())


@pytest.mark.asyncio
async def test_only_nodes_of_the_fleet_get_artifacts(fleet: Fleet, tmp_path: Path) -> None:
    await fetched(fleet, "n-1")
    holder, url = fleet.serve("n-1"), f"/{stated(fleet.plane).digest[7:]}/manifest.json"
    node = fleet.authority.certify(tmp_path / "a", IdentityKind.NODE, "n-2")
    assert answered(node, holder, url) == 200
    for number, kind in enumerate((IdentityKind.INGRESS, IdentityKind.MACHINE, IdentityKind.CONTROL)):
        assert answered(fleet.authority.certify(tmp_path / f"{number}", kind, "other"), holder, url) == 403
    without = Identity(tmp_path / "without")
    without.store_trust(bundle=fleet.authority.bundle, revoked=fleet.authority.revoked)
    another = FleetOfTests().certify(tmp_path / "another", IdentityKind.NODE, "n-2")
    another.store_trust(bundle=fleet.authority.bundle, revoked=fleet.authority.revoked)
    fleet.authority.revoke(fleet.authority.renew(node, IdentityKind.NODE, "n-2"), fleet.identities["n-1"])
    for identity in (without, another, node):
        with pytest.raises(OSError, match=r"(?i)alert|reset|closed|eof|pipe"):
            answered(identity, holder, url)
