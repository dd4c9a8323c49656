"""Response time of all pages and API lists with 2,500 cells on 5,000 nodes.

    .venv/bin/python -m bench dashboard --cells 2500 --nodes 5000 --seconds 90
    .venv/bin/python -m bench dashboard --cells 2500 --nodes 5000 --costs --page /plan/drafts/draft-1/
    .venv/bin/python -m bench dashboard --cells 5000 --nodes 10000 --frames

Brings its own database and web process; needs no fleet. Each of 20 users asks for all pages and lists in an order of
its own and thinks for a second on average between two of them; `--think 0` leaves out the thinking, and then the time
of an answer is mostly that of waiting for others."""

import argparse
import asyncio
import logging
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from bench import ROOT, percentile
from bench.fleet.frames import frames_measure
from bench.fleet.month import month_seed
from bench.fleet.own_control_plane import database
from bench.fleet.page_costs import page_costs_print

PORT = 24180
LIMIT_MS = 300.0
PAINT_LIMIT_MS = 1000.0
SCROLLED = (
    ("Overview", "/"),
    ("Cells", "/cells/"),
    ("Nodes", "/nodes/"),
    ("Region with its tree of nodes", "/regions/region-00/"),
    ("Deployment with 18 charts", "/deployments/deployment-01/"),
)
"""Pages whose frames are measured."""
UP_WITHIN_S = 60.0
WRITES_OR_LEAVES = {"login", "logout", "oidc-begin", "oidc-back", "playground-say"}
"""Pages that are no reading of the fleet."""


def main(parser: argparse.ArgumentParser) -> None:
    from django.conf import settings

    options = _arguments(parser)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with TemporaryDirectory(prefix="switchyard-bench-") as folder, database(Path(folder), PORT):
        logging.getLogger("httpx").setLevel(logging.WARNING)
        started = time.monotonic()
        _seed(options.cells, options.nodes)
        print(f"{options.cells} cells on {options.nodes} nodes seeded in {time.monotonic() - started:.0f} s")
        urls, cookies = options.page or _urls(), [_cookie(number) for number in range(options.users)]
        cookie = (settings.SESSION_COOKIE_NAME, cookies[0])
        if options.costs:
            page_costs_print(urls, cookie, within_s=options.seconds)
            return
        with _web(options.workers):
            asyncio.run(_warm(urls, cookies[0]))
            if options.frames:
                frames_measure(f"http://127.0.0.1:{PORT}", cookie, SCROLLED)
                return
            _paint(cookies[0], ("/", "/cells/", "/deployments/deployment-01/"))
            load_before = os.getloadavg()[0]
            times = asyncio.run(_browse(urls, cookies, options.seconds, options.think))
            _report(times, options, load_before)


def _arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    parser.add_argument("--cells", type=int, default=2500)
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--users", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=90.0, help="length of the measurement after the seeding")
    parser.add_argument("--page", action="append", help="path of a page to measure, instead of all; repeatable")
    parser.add_argument("--think", type=float, default=1.0, help="seconds between two pages of a user, on average")
    parser.add_argument("--costs", action="store_true", help="CPU time of each page instead of answers")
    parser.add_argument("--frames", action="store_true", help="times of frames in a browser instead of answers")
    parser.add_argument("--workers", type=int, default=2, help="web processes")
    return parser.parse_args()


# --- what it runs on -------------------------------------------------------------------------------------------------


def _seed(cells: int, nodes: int) -> None:
    from django.core.management import call_command

    from kernel import clock

    call_command("migrate", verbosity=0)
    call_command("seed_scale", cells=cells, nodes=nodes)
    month_seed(clock.now())


def _cookie(number: int) -> str:
    from django.conf import settings
    from django.contrib.auth.models import User
    from django.test import Client

    client = Client()
    client.force_login(User.objects.create_superuser(f"user-{number}"))
    return str(client.cookies[settings.SESSION_COOKIE_NAME].value)


@contextmanager
def _web(workers: int) -> Iterator[None]:
    command = [sys.executable, "-m", "uvicorn", "--factory", "bench.fleet.dashboard:warm_web", "--port", str(PORT)]
    command += ["--ws", "controlplane.websocket_protocol:WebSocketProtocol", "--log-level", "error"]
    command += ["--no-access-log", "--workers", str(workers)]
    # Users think longer than connections are kept by default, and a client that meets the end of one gives up.
    command += ["--timeout-keep-alive", "120"]
    process = subprocess.Popen(command, cwd=ROOT, env=dict(os.environ))
    try:
        deadline = time.monotonic() + UP_WITHIN_S
        while not _answers():
            if time.monotonic() > deadline or process.poll() is not None:
                raise SystemExit("the web process does not answer")
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait(20)


def warm_web() -> Any:
    """The application of each worker, warm as `controlplane.web` is soon after its start: the requests of `_warm` share
    a connection, so they reach only one of several workers."""
    from controlplane.asgi import application
    from controlplane.dashboard.warm_up import warm_up

    warm_up()
    return application


def _answers() -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{PORT}/login/").status_code == 200
    except httpx.TransportError:
        return False


# --- requested pages -----------------------------------------------------------------------------------------------


def _urls() -> list[str]:
    """Every page without an argument and every list of the API, from the URL configurations; and a page of each kind
    of thing."""
    from controlplane.api.urls import urlpatterns as api
    from controlplane.dashboard.urls import urlpatterns as pages

    plain = [
        f"/{pattern.pattern}"
        for pattern in pages
        if "<" not in str(pattern.pattern) and pattern.name not in WRITES_OR_LEAVES
    ]
    lists = sorted(f"/api/{path}" for path in _lists(api) if "schema" not in path and "docs" not in path)
    return plain + _things() + lists


def _things() -> list[str]:
    """A page of each kind of thing, with a month behind it where it has one, and pages as they were."""
    from fleet.cells.models import CellMember
    from fleet.faults.models import Incident
    from fleet.recorder.models import RecordedRound
    from fleet.rollouts.models import Rollout
    from kernel import clock
    from models_registry.benchmarks.models import Benchmark
    from models_registry.imports.models import ModelImport
    from traffic.batches.models import Batch
    from traffic.keys.models import ApplicationKey

    deployment = "deployment-01"
    member = CellMember.objects.filter(cell__state="ready", cell__deployment=deployment, node__id__endswith="1")[0]
    cell, node, compared = member.cell_id, member.node_id, Benchmark.objects.values_list("pk", flat=True)[:3]
    paused, ended = (Rollout.objects.filter(ended_at__isnull=still)[0].pk for still in (True, False))
    open_one, closed = (Incident.objects.filter(state=state)[0].pk for state in ("open", "closed"))
    things = [
        f"batches/{Batch.objects.all()[0].pk}",
        f"benchmarks/{compared[0]}",
        "builds/build-1",
        f"cells/{cell}",
        f"cells/{cell}/logs",
        *(f"deployments/{deployment}{form}" for form in ("", "/autoscaling", "/scale", "/traffic", "/updates")),
        f"imports/{ModelImport.objects.all()[0].pk}",
        f"incidents/{open_one}",
        f"incidents/{closed}",
        "instance-types/local.cpu",
        "invitations/invited1",
        f"keys/{ApplicationKey.objects.earliest('prefix').prefix}",
        f"machines/{node.replace('n-', 'm-')}",
        *("models/model-00", "models/model-00@1", "models/model-00@1/edit"),
        f"nodes/{node}",
        "plan/drafts/draft-1",
        "regions/region-00",
        *(f"rollouts/{pk}" for pk in (paused, ended)),
        "runbooks/node-lost",
        "traffic/evacuate/region-00",
        *(f"why/{subject}" for subject in (f"cell:{cell}", f"node:{node}", f"deployment:{deployment}")),
    ]
    compared_ids = "&".join(f"id={pk}" for pk in compared)
    between = RecordedRound.objects.filter(inputs__isnull=False)[10].at + timedelta(seconds=1)
    past, calm = (f"at={at:%Y-%m-%dT%H:%M:%SZ}" for at in (between, clock.now() - timedelta(minutes=5)))
    filtered = [
        *(f"?{past}", f"cells/?{past}", f"deployments/?{past}", f"nodes/?{past}", f"?{calm}"),
        *("?map=temperature", "?map=cost", "?map=version"),
        f"benchmarks/compare/?{compared_ids}",
        "cells/?sort=-in-flight&q=region-03",
        f"deployments/{deployment}/?range=24h",
        f"events/?subject={cell}",
        "incidents/?state=all&sort=-opened",
        "models/model-00@1/diff/?against=model-00@2",
        "nodes/?sort=-report&page=9",
        f"rollouts/new/?deployment={deployment}",
        "search/?q=region-03",
        f"traffic/shares/?deployment={deployment}&origin=region-00",
        "usage/costs/?range=30d&group=tenant,class",
        "usage/?range=30d",
        "what-if/?factor=1.5",
    ]
    return [f"/{thing}/" for thing in things] + [f"/{page}" for page in filtered]


def _lists(patterns: Any, prefix: str = "") -> Iterator[str]:
    for pattern in patterns:
        path = prefix + str(pattern.pattern).lstrip("^").rstrip("$")
        if hasattr(pattern, "url_patterns"):
            yield from _lists(pattern.url_patterns, path)
        elif getattr(pattern.callback, "actions", {}).get("get") == "list" and "(" not in path and "<" not in path:
            yield path.replace("\\Z", "")


async def _warm(urls: list[str], cookie: str) -> None:
    """What does not answer 200 is no part of the bench."""
    async with _client(cookie) as client:
        for _ in range(2):
            for url in list(urls):
                answer = await client.get(url)
                if answer.status_code != 200:
                    print(f"left out: {url} answers {answer.status_code}")
                    urls.remove(url)


async def _browse(urls: list[str], cookies: list[str], seconds: float, think_s: float) -> dict[str, list[float]]:
    """URL -> milliseconds of each answer, whole."""
    times: dict[str, list[float]] = defaultdict(list)
    until = time.monotonic() + seconds
    await asyncio.gather(*(_user(n, cookie, urls, until, think_s, times) for n, cookie in enumerate(cookies)))
    return times


async def _user(
    number: int, cookie: str, urls: list[str], until: float, think_s: float, times: dict[str, list[float]]
) -> None:
    draw = random.Random(number)
    async with _client(cookie) as client:
        while time.monotonic() < until:
            for url in draw.sample(urls, len(urls)):
                await asyncio.sleep(think_s * draw.uniform(0.5, 1.5))
                if time.monotonic() >= until:
                    return
                began = time.perf_counter()
                answer = await client.get(url)
                times[url].append((time.perf_counter() - began) * 1000)
                if answer.status_code != 200:
                    raise SystemExit(f"{url} answers {answer.status_code}")


def _client(cookie: str) -> httpx.AsyncClient:
    from django.conf import settings

    cookies = {settings.SESSION_COOKIE_NAME: cookie}
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{PORT}", cookies=cookies, timeout=60)


# --- what came of it -------------------------------------------------------------------------------------------------


def _report(times: dict[str, list[float]], options: argparse.Namespace, load_before: float) -> None:
    everything = [each for one in times.values() for each in one]
    print(
        f"\n{options.users} users, {options.think:g} s between pages, {options.workers} web processes, "
        f"{os.cpu_count()} cores"
    )
    print(f"{len(everything)} answers in {options.seconds:.0f} s; load average before {load_before:.1f}\n")
    print("| page or list | answers | p50 ms | p95 ms |\n| --- | ---: | ---: | ---: |")
    for url, found in sorted(times.items(), key=lambda item: -percentile(item[1], 0.95)):
        mark = " **" if percentile(found, 0.95) > LIMIT_MS else ""
        print(f"| `{url}` | {len(found)} | {statistics.median(found):.0f} | {percentile(found, 0.95):.0f}{mark} |")
    print(f"| all | {len(everything)} | {statistics.median(everything):.0f} | {percentile(everything, 0.95):.0f} |")
    over = [url for url, found in times.items() if percentile(found, 0.95) > LIMIT_MS]
    print(f"\np95 above {LIMIT_MS:.0f} ms: {', '.join(sorted(over)) or 'none'}")


def _watched_page(context: Any, errors: list[str]) -> Any:
    page = context.new_page()
    page.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    return page


def _paint(cookie: str, paths: tuple[str, ...]) -> None:
    """First contentful paint in headless Chromium, of five visits each, and what the page complained about."""
    from django.conf import settings
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        context = browser.new_context()
        context.add_cookies(
            [{"name": settings.SESSION_COOKIE_NAME, "value": cookie, "domain": "127.0.0.1", "path": "/"}]
        )
        for path in paths:
            errors: list[str] = []
            page = _watched_page(context, errors)
            painted: list[float] = []
            for _ in range(5):
                page.goto(f"http://127.0.0.1:{PORT}{path}", wait_until="load")
                page.wait_for_timeout(300)
                painted.append(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
            slow = " **" if statistics.median(painted) > PAINT_LIMIT_MS else ""
            print(f"{path}: painted after {statistics.median(painted):.0f} ms, at worst {max(painted):.0f} ms{slow}")
            for line in dict.fromkeys(errors):
                print(f"  console: {line[:300]}")
        browser.close()
