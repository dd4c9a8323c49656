"""The client without an event loop: its thread, its streams, and what a fork leaves."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from switchyard_client import BrokenOff, DeadlineExceeded, Switchyard
from tests.client.regions import EAST, WEST, Regions, delta, events, never, said

GONE = httpx.ConnectError("connection refused")


def client(regions: Regions, **options: Any) -> Switchyard:
    return Switchyard([EAST, WEST], transport=regions, **options)


def test_answers_streams_and_models() -> None:
    models = httpx.Response(200, json={"object": "list", "data": [{"id": "m"}]})
    regions = Regions(east=[GONE], west=[said("hello"), events(delta("one "), delta("two"), "[DONE]"), models])
    with client(regions) as asked:
        assert asked.chat("m", "hi").text == "hello"
        with asked.stream_chat("m", "hi") as stream:
            assert "".join(event.text for event in stream) == "one two"
        assert asked.models() == [{"id": "m"}]


def test_a_stream_that_breaks_is_raised_where_it_is_read() -> None:
    texts = list[str]()
    with client(Regions(east=[events(delta("one"), breaks=True)])) as asked, pytest.raises(BrokenOff):
        read(asked, texts)
    assert texts == ["one"]


def read(asked: Switchyard, texts: list[str], **options: Any) -> None:
    with asked.stream_chat("m", "hi", **options) as stream:
        texts.extend(event.text for event in stream)


def test_a_stream_that_is_left_early_is_ended() -> None:
    ended = threading.Event()

    class Endless(httpx.AsyncByteStream):
        async def __aiter__(self) -> Any:
            while True:
                yield b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'

        async def aclose(self) -> None:
            ended.set()

    with client(Regions(east=[httpx.Response(200, stream=Endless())])) as asked:
        with asked.stream_chat("m", "hi") as stream:
            assert next(stream).text == "x"
        assert ended.wait(30)


def test_a_deadline_ends_a_stream_between_two_events() -> None:
    async def stalls(request: httpx.Request) -> httpx.Response:
        async def body() -> Any:
            yield b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
            await never(request)

        return httpx.Response(200, content=body())

    texts = list[str]()
    with client(Regions(east=[stalls])) as asked, pytest.raises(DeadlineExceeded, match=r"not answered within 0\.3 s"):
        read(asked, texts, deadline_s=0.3)
    assert texts == ["x"]


def test_threads_share_a_client() -> None:
    regions = Regions(east=[said("hello")])
    with client(regions) as asked:
        texts = list[str]()
        threads = [threading.Thread(target=lambda: texts.append(asked.chat("m", "hi").text)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert texts == ["hello"] * 8


FORKED = """
import os, sys
import httpx
from switchyard_client import Switchyard

async def answer(request):
    return httpx.Response(200, json={"choices": [{"message": {"content": "hello"}}]})

client = Switchyard("https://east.test/v1", transport=httpx.MockTransport(answer))
assert client.chat("m", "hi").text == "hello"
child = os.fork()
if child == 0:
    os._exit(0 if client.chat("m", "hi").text == "hello" else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_child_after_a_fork_has_a_thread_of_its_own() -> None:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root / "client")}
    done = subprocess.run(
        [sys.executable, "-c", FORKED], env=environment, capture_output=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr.decode()


def test_it_imports_httpx_and_nothing_of_the_server() -> None:
    root = Path(__file__).parents[2]
    code = (
        "import sys, httpx; before = set(sys.modules); import switchyard_client;"
        "print(sorted({name.partition('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(root / "client")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd="/", capture_output=True, timeout=120, check=True
    )
    assert done.stdout.decode().strip() == "['switchyard_client']"
