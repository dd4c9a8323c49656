"""One command, one answer, or the reason why there is none."""

import asyncio
import socket
import tempfile
from pathlib import Path

import pytest

from engine_agent.ingress.command_socket import MAX_PATH_BYTES, CommandRefused, CommandSocket, Unreachable, short_path
from engine_agent.protocol.local_servers import closing_connections


async def answer_with(folder: Path, text: str, after: asyncio.Event | None = None) -> asyncio.Server:
    """A socket that answers every command with `text`, once `after` is set."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        if after is not None:
            await after.wait()
        writer.write(text.encode())

    return await asyncio.start_unix_server(closing_connections(serve), folder / "s")


@pytest.mark.asyncio
async def test_the_whole_answer_is_returned(tmp_path: Path) -> None:
    async with await answer_with(tmp_path, "x" * 300_000):
        assert await CommandSocket(tmp_path, "s").send("show") == "x" * 300_000


@pytest.mark.asyncio
async def test_several_commands_are_asked_at_once_and_each_has_its_answer(tmp_path: Path) -> None:
    async with await answer_with(tmp_path, "2.8\n\none: 2.8\ntwo\n\n2.8\n\n\n2.8\n\n"):
        answers = await CommandSocket(tmp_path, "s").send_all("show info", "show map x")
    assert [answer.split("\n") for answer in answers] == [["one: 2.8", "two", "", ""], [""]]
    async with await answer_with(tmp_path, "2.8\n\none\n\n2.8\n\n"):
        with pytest.raises(Unreachable, match="gave 1 outputs for 2 commands"):
            await CommandSocket(tmp_path, "s").send_all("show info", "show map x")


@pytest.mark.asyncio
async def test_an_order_with_another_answer_was_refused(tmp_path: Path) -> None:
    async with await answer_with(tmp_path, "No such server.\n\n"):
        with pytest.raises(CommandRefused, match=r"del server a/b: No such server\."):
            await CommandSocket(tmp_path, "s").execute("del server a/b")
        await CommandSocket(tmp_path, "s").execute("del server a/b", success="No such server.")


@pytest.mark.asyncio
async def test_silence_and_absence_have_reasons(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match="HAProxy's s: "):
        await CommandSocket(tmp_path, "s").send("show")
    with pytest.raises(Unreachable, match="No such file"):
        await CommandSocket(tmp_path / "nowhere", "s").send("show")
    speak = asyncio.Event()
    async with await answer_with(tmp_path, "late", after=speak):
        with pytest.raises(Unreachable, match=r"did not respond to 'show' within 0\.05 s"):
            await CommandSocket(tmp_path, "s").send("show", timeout_s=0.05)
        speak.set()
        assert await CommandSocket(tmp_path, "s").send("show") == "late"


@pytest.mark.asyncio
async def test_a_folder_deeper_than_a_socket_path_may_be_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.chdir(deep)
    async with await answer_with(Path(), "deep"):
        assert await CommandSocket(deep, "s").send("show") == "deep"


@pytest.mark.parametrize("length", [MAX_PATH_BYTES, MAX_PATH_BYTES + 1, 250])
def test_a_socket_is_bound_by_its_own_path_where_the_kernel_takes_that(length: int) -> None:
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        path = Path(folder) / ("f" * (length - len(folder) - len("//s"))) / "s"
        path.parent.mkdir()
        with short_path(path) as short:
            listener.bind(short)
        assert path.is_socket()
        assert (short == str(path)) == (length == MAX_PATH_BYTES)
