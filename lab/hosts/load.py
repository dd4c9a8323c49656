"""Greedy streams from applications that know every ingress of a region: each requests one, and the next if that one
does not answer in time, as clients with retries do. It records the outcome of each."""

import asyncio
import itertools
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread

import httpx

ANSWERS_WITHIN_S = 8.0
"""More than the way into the laboratory waits for a host that says nothing (`lab.hosts.forward`)."""
ROUNDS = 3
"""So often each address is asked in turn before a request counts as failed."""
PAUSE_S = 0.5
LONGEST_S = 60.0
MAX_TOKENS = 24
"""Of a stream, unless the trial states more."""


@dataclass
class Stream:
    """One request as its client saw it, times from `time.monotonic`. `cell`, `host`: which cell answered, through which
    ingress. `chosen_by`, `served_in`: the ingress that chose the cell, by its id, and its region; where the request
    crossed regions both are others' than those that were asked. `tries`: how often it was sent. `error`: why it has no
    whole answer; with a `cell` its stream broke off. `longest_pause_s`: between two events of it."""

    region: str
    began: float
    ended: float = 0.0
    cell: str = ""
    host: str = ""
    chosen_by: str = ""
    served_in: str = ""
    tries: int = 0
    error: str = ""
    text: str = ""
    longest_pause_s: float = 0.0


class _NotAnswered(Exception):
    """This ingress did not begin an answer: why."""


class _Application:
    """What asks one region. `urls`: ingress -> where it listens."""

    def __init__(self, region: str, urls: Mapping[str, str], model: str, tokens: int, streams: list[Stream]) -> None:
        self._region, self._urls, self._streams = region, dict(urls), streams
        messages = [{"role": "user", "content": "Count to ten."}]
        greedy = {"temperature": 0, "ignore_eos": True, "max_tokens": tokens}
        self._body = {"model": model, "stream": True, "messages": messages, **greedy}
        self._turn = itertools.cycle(range(len(self._urls)))

    async def send(self, rate: float, stop: asyncio.Event) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
        timeout = httpx.Timeout(ANSWERS_WITHIN_S, read=None, pool=None)
        async with httpx.AsyncClient(timeout=timeout, limits=limits) as client, asyncio.TaskGroup() as group:
            while not stop.is_set():
                group.create_task(self._request(client))
                await asyncio.sleep(1 / rate)

    async def _request(self, client: httpx.AsyncClient) -> None:
        stream = Stream(self._region, began=time.monotonic())
        self._streams.append(stream)
        first = next(self._turn)
        hosts = [*self._urls][first:] + [*self._urls][:first]
        try:
            async with asyncio.timeout(LONGEST_S):
                await self._ask_in_turn(client, hosts * ROUNDS, stream)
        except TimeoutError:
            stream.error = stream.error or f"no whole answer in {LONGEST_S:g} s"
        stream.ended = time.monotonic()

    async def _ask_in_turn(self, client: httpx.AsyncClient, hosts: list[str], stream: Stream) -> None:
        for host in hosts:
            stream.tries, stream.host = stream.tries + 1, host
            try:
                await self._read(client, self._urls[host], stream)
            except _NotAnswered as problem:
                stream.error = f"{host}: {problem}"
                await asyncio.sleep(PAUSE_S)
            except httpx.HTTPError as error:
                stream.error = f"broke off: {error!r}"
                return
            else:
                return

    async def _read(self, client: httpx.AsyncClient, url: str, stream: Stream) -> None:
        request = client.build_request("POST", f"{url}/v1/chat/completions", json=self._body)
        try:
            async with asyncio.timeout(ANSWERS_WITHIN_S):
                answer = await client.send(request, stream=True)
        except (httpx.HTTPError, TimeoutError) as error:
            raise _NotAnswered(repr(error)) from None
        try:
            if answer.status_code != httpx.codes.OK:
                raise _NotAnswered(f"status {answer.status_code}")
            stream.cell, stream.error = answer.headers.get("x-switchyard-cell", ""), ""
            stream.chosen_by = answer.headers.get("x-switchyard-ingress", "")
            stream.served_in = answer.headers.get("x-switchyard-region", "")
            if not await _read_events(answer, stream) and not stream.error:
                stream.error = "the stream ended without [DONE]"
        finally:
            await answer.aclose()


async def _read_events(answer: httpx.Response, stream: Stream) -> bool:
    """Returns whether the stream is complete."""
    last = time.monotonic()
    async for line in answer.aiter_lines():
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            return True
        now = time.monotonic()
        stream.longest_pause_s, last = max(stream.longest_pause_s, now - last), now
        event = json.loads(line[6:])
        if "error" in event:
            stream.error = line[:200]
        stream.text += "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))
    return False


@contextmanager
def streaming(
    regions: Mapping[str, Mapping[str, str]], model: str, rate: float, tokens: int = MAX_TOKENS
) -> Iterator[list[Stream]]:
    """`rate` streams a second in all while the block runs, shared by the regions, and what became of them.

    `regions`: region -> ingress -> URL."""
    streams: list[Stream] = []
    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    applications = [_Application(region, urls, model, tokens, streams) for region, urls in regions.items()]

    async def send() -> None:
        await asyncio.gather(*(each.send(rate / len(applications), stop) for each in applications))

    thread = Thread(target=loop.run_until_complete, args=(send(),), name="streams")
    thread.start()
    try:
        yield streams
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
