"""Acceptance and completion time of near-real-time requests, also while the sender is killed.

It also checks that each request has one outcome and keeps it, and measures the CPU time of the sender.

    .venv/bin/python -m bench near_real_time --requests 400 --rate 10 --kills 3

Needs a fleet from `make up ENGINE=sim` (same SWITCHYARD_HOME) that nobody else uses: it kills the sender.
"""

import argparse
import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
import psutil

from bench.figures import percentile
from bench.fleet.live_fleet import HOME

INGRESS = f"http://127.0.0.1:{os.environ.get('SWITCHYARD_INGRESS_PORT', '8080')}"
POLL_S = 0.2
OUTCOME_LIMIT_S = 180.0
BACK_LIMIT_S = 60.0
DEADLINE_MS = "120000"
ENDED = {"done", "failed", "expired", "cancelled"}


@dataclass
class Request:
    """One request: seconds until 202, seconds from then to its outcome as its application sees it, and every state in
    which it was seen."""

    id: str = ""
    accepted_s: float = 0.0
    outcome_s: float = 0.0
    states: tuple[str, ...] = ()
    error: str = ""


async def follow(client: httpx.AsyncClient, model: str, max_tokens: int, request: Request) -> None:
    """Send it, and ask for it until it has ended."""
    body = {"model": model, "max_tokens": max_tokens, "messages": [{"role": "user", "content": "Count to ten."}]}
    began = time.monotonic()
    answer = await client.post(
        "/v1/async/chat/completions", json=body, headers={"X-Switchyard-Deadline-Ms": DEADLINE_MS}
    )
    request.accepted_s = time.monotonic() - began
    if answer.status_code != 202:
        request.error = f"{answer.status_code} {answer.text[:200]}"
        return
    request.id, accepted = answer.json()["id"], time.monotonic()
    while time.monotonic() < accepted + OUTCOME_LIMIT_S:
        response = await client.get(f"/v1/async/{request.id}")
        state = response.json().get("status", f"status {response.status_code}")
        if state not in request.states[-1:]:
            request.states += (state,)
        if state in ENDED:
            request.outcome_s = time.monotonic() - accepted
            return
        await asyncio.sleep(POLL_S)
    request.error = f"no outcome within {OUTCOME_LIMIT_S:.0f} s"


def senders() -> list[psutil.Process]:
    """The fleet's processes that send."""
    found = []
    for process in psutil.process_iter():
        try:
            is_sender = "sender" in process.cmdline()[-2:] and process.environ().get("SWITCHYARD_HOME") == str(HOME)
        except psutil.Error:
            continue
        if is_sender:
            found.append(process)
    return found


async def next_senders() -> list[psutil.Process]:
    """Those that run, or that the launcher starts again."""
    for _ in range(int(BACK_LIMIT_S / POLL_S)):
        if found := senders():
            return found
        await asyncio.sleep(POLL_S)
    raise SystemExit(f"no sender came back within {BACK_LIMIT_S:.0f} s")


async def kill_now_and_then(times: int, over_s: float) -> list[int]:
    """Kill the sender with SIGKILL at random moments of this span, or as soon as there is one again; whom."""
    killed = []
    moments = sorted(random.Random(7).uniform(0, over_s) for _ in range(times))
    began = time.monotonic()
    for moment in moments:
        await asyncio.sleep(max(0.0, began + moment - time.monotonic()))
        for process in await next_senders():
            killed.append(process.pid)
            process.kill()
    return killed


async def still_as_they_were(client: httpx.AsyncClient, requests: Sequence[Request]) -> int:
    """How many show another outcome when read again."""
    changed = 0
    for request in requests:
        status = (await client.get(f"/v1/async/{request.id}")).json()["status"]
        changed += status != request.states[-1]
    return changed


def spread(values: Sequence[float], unit: float = 1.0) -> str:
    p50, p99 = (unit * percentile(values, share) for share in (0.5, 0.99))
    return f"p50 {p50:.1f}, p99 {p99:.1f}, longest {unit * max(values):.1f}"


async def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="sim-70b")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rate", type=float, default=10.0, help="requests accepted a second")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--kills", type=int, default=0, help="times that the sender is killed while requests come")
    options = parser.parse_args()
    requests = [Request() for _ in range(options.requests)]
    before = {process.pid: sum(process.cpu_times()[:2]) for process in senders()}
    if not before:
        raise SystemExit(f"no sender runs in {HOME}: `make up` starts one")
    async with httpx.AsyncClient(base_url=INGRESS, timeout=30) as client, asyncio.TaskGroup() as group:
        killing = group.create_task(kill_now_and_then(options.kills, options.requests / options.rate))
        for request in requests:
            group.create_task(follow(client, options.model, options.max_tokens, request))
            await asyncio.sleep(1 / options.rate)
    ended = [request for request in requests if not request.error]
    async with httpx.AsyncClient(base_url=INGRESS, timeout=30) as client:
        changed = await still_as_they_were(client, ended)
    print(f"{len(requests)} requests at {options.rate:g}/s, sender killed {len(killing.result())} times")
    print(f"accepted after, ms: {spread([request.accepted_s for request in requests], 1000)}")
    print(f"outcome after, s: {spread([request.outcome_s for request in ended])} (polled every {POLL_S:g} s)")
    print(f"outcomes: {dict(Counter(request.states[-1] for request in ended))}; changed afterwards: {changed}")
    for sender in senders():
        cpu_s = sum(sender.cpu_times()[:2]) - before[sender.pid] if sender.pid in before else None
        cost = "" if cpu_s is None else f", {1000 * cpu_s / len(requests):.1f} ms of processor time a request"
        print(f"sender: {sender.memory_info().rss / 2**20:.0f} MiB{cost}")
    for error, times in Counter(request.error for request in requests if request.error).items():
        print(f"{times} times: {error}")
