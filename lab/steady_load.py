"""A client that sends streaming requests at a steady rate and remembers what became of each."""

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread

import httpx
import psutil

REQUEST_LIMIT_S = 60.0


@dataclass
class Answer:
    """One request as its client saw it, times from `time.monotonic`. `cell` answered, if an answer began."""

    began: float
    first_token: float = 0.0
    ended: float = 0.0
    cell: str = ""
    tokens: int = 0
    error: str = ""
    url: str = ""
    was_refused: bool = False
    """An ingress answered 5xx for want of a cell: none answered, or the one that did had not sent it to its engine."""

    def was_streaming_from(self, cell: str, at: float) -> bool:
        return self.cell == cell and self.began < at < self.ended


async def one_request(client: httpx.AsyncClient, url: str, model: str, max_tokens: int, answers: list[Answer]) -> None:
    """Send one request, read it to its end, and append what became of it."""
    answer = Answer(began=time.monotonic(), url=url)
    answers.append(answer)
    try:
        await _stream(client, url, model, max_tokens, answer)
    except httpx.HTTPError as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.ended = time.monotonic()


async def _stream(client: httpx.AsyncClient, url: str, model: str, max_tokens: int, answer: Answer) -> None:
    message = {"role": "user", "content": "Count to ten."}
    body = {"model": model, "stream": True, "max_tokens": max_tokens, "messages": [message]}
    async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
        answer.cell = response.headers.get("x-switchyard-cell", "")
        if response.status_code != 200:
            answer.error = f"status {response.status_code}: {(await response.aread())[:200]!r}"
            is_handed_back = "x-switchyard-retry" in response.headers
            answer.was_refused = response.status_code >= 500 and (not answer.cell or is_handed_back)
            return
        finished = False
        async for line in response.aiter_lines():
            if line.startswith('data: {"error"'):
                answer.error = line[:200]
            elif line.startswith("data: {"):
                answer.first_token = answer.first_token or time.monotonic()
                answer.tokens += 1
            finished = finished or line == "data: [DONE]"
        if not finished and not answer.error:
            answer.error = "the stream ended without [DONE]"


async def steady_load(
    url: str, model: str, rate: float, stop: asyncio.Event, answers: list[Answer], *, max_tokens: int = 24
) -> None:
    """`rate` requests a second until `stop` is set; returns when the last answer has ended."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
    async with httpx.AsyncClient(timeout=REQUEST_LIMIT_S, limits=limits) as client, asyncio.TaskGroup() as group:
        while not stop.is_set():
            group.create_task(one_request(client, url, model, max_tokens, answers))
            await asyncio.sleep(1 / rate)


@contextmanager
def background_load(urls: Sequence[str], model: str, rate: float, *, max_tokens: int = 24) -> Iterator[list[Answer]]:
    """`rate` requests a second to each address from a thread while the block runs, and what became of them all."""
    answers: list[Answer] = []
    loop, stop = asyncio.new_event_loop(), asyncio.Event()

    async def send() -> None:
        await asyncio.gather(*(steady_load(url, model, rate, stop, answers, max_tokens=max_tokens) for url in urls))

    thread = Thread(target=loop.run_until_complete, args=(send(),), name="load")
    thread.start()
    try:
        yield answers
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def node_processes(node: str, *, home: os.PathLike[str]) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            if (environment.get("SWITCHYARD_NODE_ID"), environment.get("SWITCHYARD_HOME")) == (node, str(home)):
                found.append(process)
        except psutil.Error:
            continue
    return found


def agent_and_engine(node: str, *, home: os.PathLike[str]) -> list[psutil.Process]:
    """A node's agent and engine processes; its cell proxy, if it has one, is left out."""
    return [
        process for process in node_processes(node, home=home) if "engine_agent.cell_proxy" not in process.cmdline()
    ]
