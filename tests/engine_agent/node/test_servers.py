"""Several addresses of the control plane: agents find one that answers, and keep the ones that they are told."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from engine_agent.node.connection import AgentConnection, ConnectionSettings
from engine_agent.node.enrolment import Enrolment
from engine_agent.node.servers import MAX_SERVERS, SILENT_HOST_S, Servers, notice_silence
from engine_agent.protocol.messages import PROTOCOL_VERSION, Hello, Trust
from engine_agent.protocol.states import AgentKind
from tests.engine_agent.fake_control_plane import FakeControlPlane, eventually
from tests.ports import free_port

FAST = ConnectionSettings(
    backoff_min_s=0.01, backoff_max_s=0.05, refused_backoff_s=0.2, other_server_s=0.01, other_open_timeout_s=0.1
)
HELLO = Hello(protocol=PROTOCOL_VERSION, kind=AgentKind.INGRESS, id="i-a", boot_id="b", agent_version="0")


@contextlib.contextmanager
def silent_server() -> Iterator[str]:
    """Takes connections and says nothing, as a host does whose processes hang."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextlib.asynccontextmanager
async def agent_of(home: Path, *urls: str) -> AsyncIterator[AgentConnection]:
    enrolment = Enrolment(",".join(urls), AgentKind.INGRESS, "i-a", home)
    connection = AgentConnection(enrolment=enrolment, hello=lambda: HELLO, on_message=print, settings=FAST)
    task = asyncio.create_task(connection.run())
    try:
        yield connection
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def plane_that_knows(credential: str) -> FakeControlPlane:
    plane = FakeControlPlane()
    plane.credentials.add(credential)
    return plane


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "credential").write_text("known")
    return tmp_path


@pytest.mark.asyncio
async def test_an_agent_goes_to_another_server_when_its_own_is_gone_and_back(home: Path) -> None:
    one, other = plane_that_knows("known"), plane_that_knows("known")
    async with agent_of(home, one.url, other.url) as agent:
        async with one.running():
            await eventually(lambda: one.connections == 1)
        async with other.running():
            await eventually(lambda: other.connections == 1 and agent.status.connected)
        async with one.running():
            await eventually(lambda: one.connections == 2)


@pytest.mark.asyncio
async def test_servers_that_say_nothing_or_nobody_knows_do_not_keep_an_agent_from_the_one_that_answers(
    home: Path,
) -> None:
    one = plane_that_knows("known")
    with silent_server() as silent:
        async with agent_of(home, silent, f"http://127.0.0.1:{free_port()}", one.url), one.running():
            await eventually(lambda: one.connections == 1)


@pytest.mark.asyncio
async def test_a_server_that_is_full_sends_an_agent_to_the_next_and_not_to_bed(home: Path) -> None:
    full, other = plane_that_knows("known"), plane_that_knows("known")
    full.come_again = b"120"
    async with full.running(), other.running(), agent_of(home, full.url, other.url):
        await eventually(lambda: other.connections == 1)


@pytest.mark.asyncio
async def test_an_agent_keeps_the_servers_that_it_is_told(home: Path) -> None:
    one, other = plane_that_knows("known"), plane_that_knows("known")
    one.greeting = [Trust("no bundle", "", (one.url, other.url))]
    async with one.running(), agent_of(home, one.url):
        await eventually((home / "servers.json").exists)
    async with other.running(), agent_of(home, one.url):  # its command line is of before
        await eventually(lambda: other.connections == 1)


def test_agents_begin_at_different_servers(tmp_path: Path) -> None:
    urls = [f"https://c{number}:8443" for number in range(3)]
    begun = {Servers(",".join(urls), tmp_path, f"n-{number:08x}").current for number in range(40)}
    assert begun == set(urls)


def test_the_server_in_use_stays_when_others_are_named_unless_it_is_none_of_them(tmp_path: Path) -> None:
    servers = Servers("https://a:1,https://b:1/", tmp_path, "n-1")
    assert servers.are_several
    servers.failed()
    in_use = servers.current
    servers.learn(["https://z:1", in_use, "https://y:1"])
    assert servers.current == in_use
    servers.learn(["https://z:1"])
    assert servers.all == ("https://z:1",)


@pytest.mark.parametrize(
    "urls",
    [[], ["ftp://a"], ["https://"], ["https://a:b"], ["https://a b"], ["https://a/path"], ["https://a?q"], [7],
     ["https://" + "a" * 300], ["https://ä:1"], [f"https://c{number}" for number in range(MAX_SERVERS + 1)]],
)  # fmt: skip
def test_what_is_no_list_of_servers_changes_nothing(tmp_path: Path, urls: list[str]) -> None:
    servers = Servers("https://a:1", tmp_path, "n-1")
    servers.learn(urls)
    assert servers.all == ("https://a:1",)
    assert list(tmp_path.iterdir()) == []
    if urls:
        with pytest.raises(ValueError, match=r"server must be|has 1 to 16 addresses|Port could not be"):
            Servers(",".join(map(str, urls)), tmp_path, "n-1")


def test_servers_that_were_kept_come_before_those_of_the_command_line(tmp_path: Path) -> None:
    Servers("https://old:1", tmp_path, "n-1").learn(["https://a:1"])
    assert Servers("https://moved:1", tmp_path, "n-1").all == ("https://a:1", "https://moved:1")


def test_a_torn_file_of_servers_leaves_those_of_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "servers.json").write_text('["https://')
    assert Servers("https://a:1", tmp_path, "n-1").all == ("https://a:1",)


def test_a_host_that_is_off_is_noticed_by_the_kernel() -> None:
    with socket.socket() as line:
        notice_silence(line)
        idle, interval, count = (
            line.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert line.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert idle + interval * count == SILENT_HOST_S
        assert line.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == SILENT_HOST_S * 1000
