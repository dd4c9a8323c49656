"""What a node offers to others: artifacts only, within limits, from its first certificate until its agent stops."""

import asyncio
import contextlib
import os
import socket
import ssl
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from engine_agent.node import peers
from engine_agent.node.compile_caches import COMPILED
from engine_agent.node.enrolment import node_connection
from engine_agent.node.identity import Identity
from engine_agent.node.peers import PeerServer, offered_file, serve_peers
from engine_agent.protocol.compile_caches import ARCHIVE_NAME
from engine_agent.protocol.identity import IdentityKind
from engine_agent.protocol.messages import Holder
from engine_agent.protocol.ports import ARTIFACTS
from tests.engine_agent.authority import FleetOfTests
from tests.models_registry.rows import artifact
from tests.ports import free_port

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def answered(identity: Identity, holder: Holder, url: str) -> int:
    connection = node_connection(holder.node, holder.address, holder.port_base + ARTIFACTS, identity, 10.0)
    try:
        connection.request("GET", url)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.fixture
def folders(tmp_path: Path) -> tuple[str, Path]:
    """A digest, and a machine's cache with its weights."""
    folder = tmp_path / "weights" / ("a" * 64)
    artifact(folder, {"sub/model": b"here"})
    (tmp_path / "key.pem").write_bytes(b"secret")
    (folder / "link").symlink_to(tmp_path / "key.pem")
    (folder / "above").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe")
    return "a" * 64, tmp_path


@pytest.mark.parametrize(
    "name",
    [
        "", "/", "sub", "sub/", "../key.pem", "..%2f..%2fkey.pem", "sub/../sub/model", "./sub/model", "sub//model",
        "%2fetc%2fpasswd", "link", "above/key.pem", "pipe", "sub%2fmodel%00", "sub\\model", "x" * 5000, "%ff", "gone",
    ],
)  # fmt: skip
def test_no_other_file_is_offered(name: str, folders: tuple[str, Path]) -> None:
    digest, cache = folders
    assert offered_file(f"/{digest}/{name}", cache) is None


def test_folders_that_engines_can_change_are_not_offered(tmp_path: Path) -> None:
    for folder in (COMPILED, "fetched", "kv"):
        (tmp_path / folder / ("a" * 64)).mkdir(parents=True)
        (tmp_path / folder / ("a" * 64) / ARCHIVE_NAME).write_bytes(b"code")
    assert offered_file(f"/{'a' * 64}/{ARCHIVE_NAME}", tmp_path) is None


def test_only_digests_are_folders(folders: tuple[str, Path]) -> None:
    digest, cache = folders
    (cache / "weights/other").mkdir()
    (cache / "weights/other/model").write_bytes(b"other")
    for url in ("/other/model", "other/model", "/../key.pem", f"/{digest.upper()}/sub/model", "/", "", "//"):
        assert offered_file(url, cache) is None, url
    for name, text in (("sub/model", b"here"), ("sub%2Fmodel", b"here"), ("manifest.json", None)):
        file = offered_file(f"/{digest}/{name}", cache)
        assert file is not None
        with file:
            assert text in (None, file.read())


def test_uploads_and_connections_are_limited(
    authority: FleetOfTests, folders: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest, cache = folders
    (cache / "weights" / digest / "large").write_bytes(bytes(64 * 2**20))
    own, node = (authority.certify(tmp_path / name, IdentityKind.NODE, name) for name in ("n-1", "n-2"))
    port, url = free_port(), f"/{digest}/large"
    holder = Holder("n-1", "127.0.0.1", port - ARTIFACTS)
    monkeypatch.setattr(peers, "UPLOADS_AT_ONCE", 1)
    with (
        contextlib.closing(PeerServer("127.0.0.1", port, own, cache)),
        contextlib.closing(node_connection("n-1", "127.0.0.1", port, node, 10.0)) as slow,
    ):
        slow.request("GET", url)
        answer = slow.getresponse()  # unread, it keeps the upload
        assert answer.status == 200
        assert answered(node, holder, url) == 503
    monkeypatch.setattr(peers, "CONNECTIONS_AT_ONCE", 1)
    with (
        contextlib.closing(PeerServer("127.0.0.1", port, own, cache)),
        socket.create_connection(("127.0.0.1", port)),
        pytest.raises(OSError, match=r"(?i)reset|closed|eof|pipe"),
    ):
        answered(node, holder, url)


@pytest.mark.parametrize(("bytes_per_s", "is_whole"), [(6_000_000, True), (4_000_000, False)])
def test_a_node_that_reads_slowly_loses_its_upload(bytes_per_s: int, is_whole: bool, tmp_path: Path) -> None:
    sent = list[bytes]()
    (tmp_path / "large").write_bytes(bytes(120_000_000))
    with (tmp_path / "large").open("rb") as file:
        link = cast(ssl.SSLSocket, SimpleNamespace(sendall=sent.append))
        upload = partial(peers._send, link, file, lambda: sum(map(len, sent)) / bytes_per_s)
        if is_whole:
            upload()
        else:
            with pytest.raises(ValueError, match="it read 10"):
                upload()
    assert (sum(map(len, sent[1:])) == 120_000_000) is is_whole


@pytest.mark.asyncio
async def test_a_node_serves_from_its_first_certificate_until_its_agent_stops(
    authority: FleetOfTests, folders: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "NO_CERTIFICATE_S", 0.01)
    digest, cache = folders
    own, node = Identity(tmp_path / "n-1"), authority.certify(tmp_path / "n-2", IdentityKind.NODE, "n-2")
    port = free_port()
    holder = Holder("n-1", "127.0.0.1", port - ARTIFACTS)
    serving = asyncio.create_task(serve_peers("127.0.0.1", port, own, cache))

    async def status() -> int:
        with contextlib.suppress(ConnectionRefusedError):
            return await asyncio.to_thread(answered, node, holder, f"/{digest}/sub/model")
        return 0

    assert await status() == 0
    authority.renew(own, IdentityKind.NODE, "n-1")
    while await status() != 200:
        pass
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert await status() == 0
