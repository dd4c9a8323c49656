"""Floods a running fleet from outside and says whether anybody else noticed: how old reports of nodes and the control
loops' passes became, and how soon requests that have nothing to do with it got their first token, before and during.

    .venv/bin/python bench/floods.py --seconds 60

Needs a fleet of `sim-70b` from `make up ENGINE=sim` (same SWITCHYARD_HOME) that nobody else uses. Each flood is a
process of its own. Exit status 1 if a goal was missed.
"""

import argparse
import asyncio
import multiprocessing
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import psutil
import psycopg
from live_fleet import AGENT_SERVER, HOME, SERVER, Fleet, launched, service, wait_for

from bench.strangers import tls_to
from tests.load import Answer, background_load

DEPLOYMENT = "sim-70b"
OLDEST_REPORT_S, LONGEST_GAP_S, SLOWER_AT_MOST = 3.0, 3.0, 2.0
"""The goals."""
LOOK_EVERY_S = 0.25
SETTLES_S = 5.0
"""Between two floods."""
CONNECTIONS = 32
"""Of a flood at once: a stranger's, who waits for no answer before the next try."""
DEEP_BODY = b'{"a":[' + b"1," * 124_990 + b"1]}"
"""250 kB of valid JSON that names no model."""

AGES = """
SELECT (SELECT coalesce(max(extract(epoch FROM clock_timestamp() - last_seen_at)), 0)::float8
        FROM fleet_nodereport JOIN fleet_node ON fleet_node.id = node_id
        WHERE fleet_node.state IN ('ready', 'suspect')),
       (SELECT extract(epoch FROM clock_timestamp() - passed_at)::float8 FROM kernel_looppass
        WHERE loop = 'fleet.reconcile')
"""
KINDS = {
    "ingress agents": "engine_agent ingress",
    "node agents": "engine_agent node",
    "engines": "engine_agent.engines",
    "cell proxies": "engine_agent.proxy",
}


@dataclass(frozen=True, slots=True)
class Flood:
    """What is sent, how often a second, and to whom."""

    name: str
    per_s: float
    url: str
    attempt: Callable[[str], Awaitable[str]]


async def exchange(url: str, request: bytes) -> str:
    """Send bytes on a connection of their own; the status that came back, or why none did."""
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(30):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port, ssl=tls_to(url))
            try:
                writer.write(request)
                return (await reader.readline()).decode("latin-1")[9:12] or "closed"
            finally:
                writer.transport.abort()
    except (OSError, TimeoutError) as error:
        return type(error).__name__


async def wrong_password(url: str) -> str:
    """A login as the form sends it; its cookie and token of CSRF are any two that agree."""
    token = "c" * 32
    form = f"csrfmiddlewaretoken={token}&username=admin&password=wrong-{time.monotonic_ns()}".encode()
    port = urlsplit(url).port
    head = (
        f"POST /login/ HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\nCookie: csrftoken={token}\r\n"
        f"Content-Type: application/x-www-form-urlencoded\r\nContent-Length: {len(form)}\r\n\r\n"
    )
    return await exchange(url, head.encode() + form)


async def bad_knock(url: str) -> str:
    """A WebSocket as an agent opens it, with a credential of the right form that nobody was given."""
    credential = f"sw_{secrets.token_hex(4)}_{secrets.token_hex(24)}"
    head = (
        "GET /agents/ws HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
        f"Authorization: Bearer {credential}\r\n\r\n"
    )
    return await exchange(url, head.encode())


async def refused_body(url: str) -> str:
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(DEEP_BODY)}\r\n\r\n"
    return await exchange(url, head.encode() + DEEP_BODY)


def send_flood(flood: Flood, seconds: float, results: "multiprocessing.Queue[Counter[str]]") -> None:
    """Runs in a process of its own. At most `CONNECTIONS` x 8 tries are under way: those beyond are not made."""
    answers: Counter[str] = Counter()

    async def one(room: asyncio.Semaphore) -> None:
        try:
            answers[await flood.attempt(flood.url)] += 1
        finally:
            room.release()

    async def run() -> None:
        room, began, made = asyncio.Semaphore(CONNECTIONS * 8), time.monotonic(), 0
        async with asyncio.TaskGroup() as group:
            while (passed := time.monotonic() - began) < seconds:
                while made < passed * flood.per_s:
                    made += 1
                    if room.locked():
                        answers["not sent"] += 1
                        continue
                    await room.acquire()
                    group.create_task(one(room))
                await asyncio.sleep(0.005)

    asyncio.run(run())
    results.put(answers)


class Watch(threading.Thread):
    """How old the oldest report and the last pass became, as the database says it: web may be what is flooded."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.oldest_report_s = 0.0
        self.longest_gap_s = 0.0
        self.ends = threading.Event()

    def run(self) -> None:
        with psycopg.connect(launched()["database_url"], autocommit=True) as database:
            while not self.ends.wait(LOOK_EVERY_S):
                report_s, pass_s = database.execute(AGES).fetchone() or (0.0, 0.0)
                self.oldest_report_s = max(self.oldest_report_s, report_s)
                self.longest_gap_s = max(self.longest_gap_s, pass_s)


def processes() -> dict[str, list[psutil.Process]]:
    """What runs, by what it is: the control plane's by service, the others by their module."""
    found = {name: service(name) for name in launched()["sessions"]}
    known = {process.pid for group in found.values() for process in group}
    for process in psutil.process_iter():
        try:
            if process.environ().get("SWITCHYARD_HOME") == str(HOME) and process.pid not in known:
                found.setdefault(_kind(process.cmdline()), []).append(process)
        except psutil.Error:
            continue
    return found


def _kind(command: list[str]) -> str:
    if command and command[0].endswith("haproxy"):
        return "haproxy"
    words = " ".join(command)
    for name, sign in KINDS.items():
        if sign in words:
            return name
    return "launcher"


def processor_s(groups: dict[str, list[psutil.Process]]) -> dict[str, float]:
    """CPU seconds that each group used so far."""
    used: dict[str, float] = {}
    for name, group in groups.items():
        used[name] = 0.0
        for process in group:
            with suppress(psutil.Error):
                times = process.cpu_times()
                used[name] += times.user + times.system
    return used


@dataclass(frozen=True, slots=True)
class Span:
    """What a time with or without a flood was like. Seconds."""

    oldest_report_s: float
    longest_gap_s: float
    first_tokens_s: list[float]
    failed: int
    used_s: dict[str, float]
    answers: Counter[str]

    def percentile(self, share: float) -> float:
        ordered = sorted(self.first_tokens_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def observe(seconds: float, flood: Flood | None, answers: list[Answer]) -> Span:
    """Watch the fleet for so long while it is flooded, if with anything."""
    groups, watch = processes(), Watch()
    before, first = processor_s(groups), len(answers)
    watch.start()
    sent = flooded(flood, seconds) if flood else Counter[str]()
    if flood is None:
        time.sleep(seconds)
    watch.ends.set()
    watch.join()
    used = {name: now - before[name] for name, now in processor_s(groups).items()}
    time.sleep(SETTLES_S)
    mine = answers[first:]
    return Span(
        watch.oldest_report_s,
        watch.longest_gap_s,
        [answer.first_token - answer.began for answer in mine if answer.first_token],
        sum(bool(answer.error) for answer in mine),
        used,
        sent,
    )


def flooded(flood: Flood, seconds: float) -> Counter[str]:
    results: multiprocessing.Queue[Counter[str]] = multiprocessing.Queue()
    sender = multiprocessing.Process(target=send_flood, args=(flood, seconds, results))
    sender.start()
    answers = results.get()
    sender.join()
    return answers


def misses(span: Span, quiet: Span) -> list[str]:
    """The goals that were missed."""
    slower = span.percentile(0.99) / quiet.percentile(0.99)
    return [
        text
        for is_missed, text in (
            (span.oldest_report_s > OLDEST_REPORT_S, f"a report {span.oldest_report_s:.1f} s old"),
            (span.longest_gap_s > LONGEST_GAP_S, f"{span.longest_gap_s:.1f} s without a pass"),
            (slower > SLOWER_AT_MOST, f"p99 of the first token {slower:.1f} times as late"),
            (span.failed > 0, f"{span.failed} requests failed"),
        )
        if is_missed
    ]


def line(name: str, span: Span) -> str:
    used = ", ".join(
        f"{group} {s:.1f}" for group, s in sorted(span.used_s.items(), key=lambda each: -each[1]) if s > 0.5
    )
    return (
        f"{name}: oldest report {span.oldest_report_s:.1f} s, longest gap {span.longest_gap_s:.1f} s, "
        f"first token p50 {1000 * span.percentile(0.5):.0f} ms, p99 {1000 * span.percentile(0.99):.0f} ms "
        f"of {len(span.first_tokens_s)}, {span.failed} failed\n"
        f"  CPU s: {used}\n  answers: {dict(span.answers.most_common())}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of each flood, and of quiet before")
    parser.add_argument("--rate", type=float, default=10.0, help="streams a second to each ingress")
    parser.add_argument("--only", choices=["logins", "knocks", "bodies"])
    options = parser.parse_args()
    fleet = Fleet()
    wait_for(lambda: fleet.is_whole(DEPLOYMENT), 120, "the fleet is whole before the first flood")
    urls = fleet.ingresses(DEPLOYMENT)
    floods = [
        Flood("logins", 16, SERVER, wrong_password),
        Flood("knocks", 2000, AGENT_SERVER, bad_knock),
        Flood("bodies", 26, urls[0], refused_body),
    ]
    broken: list[str] = []
    with background_load(urls, DEPLOYMENT, options.rate) as answers:
        time.sleep(SETTLES_S)
        quiet = observe(options.seconds, None, answers)
        print(line("quiet", quiet), flush=True)
        for flood in floods:
            if options.only in (None, flood.name):
                span = observe(options.seconds, flood, answers)
                print(line(f"{flood.name} ({flood.per_s:g}/s)", span), flush=True)
                broken += [f"{flood.name}: {text}" for text in misses(span, quiet)]
    print("\n".join(broken) or "Every goal was met.")
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
