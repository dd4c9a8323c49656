"""Near-real-time requests accepted and finished a second, and their CPU time by process.

It fills the queue first, then starts process `jobs` and measures until every request has ended. `--through wire` has a
stub in place of the ingress, so that only the control plane counts; `sim` has an ingress, a cell proxy and a simulated
engine. Other work on the machine changes the rates, but hardly the CPU seconds."""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from bench import CACHE, cpu_s, family, note
from bench.fleet.own_control_plane import database
from bench.traffic import contenders
from bench.traffic.proxies import wire_build, wire_cells
from bench.traffic.sim_cells import sim_cells
from engine_agent.engines.sim.batching import ModelParameters

BASE_PORT = 23800
BODY = b'{"model":"tiny","messages":[{"role":"user","content":"%d: why is the sky blue?"}],"max_tokens":4}'
LIMIT_S = 240.0
FAST = ModelParameters(decode_step_ms=1.0, decode_step_per_seq_ms=0.0, prefill_tokens_per_s=1e6, max_num_seqs=256)


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--through", choices=("wire", "sim"), default="wire")
    options = parser.parse_args()
    with TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        stack.enter_context(database(folder, BASE_PORT + 90))
        paths = stack.enter_context(_path(folder, options.through))
        _prepare()
        for turn in range(options.rounds):
            row: dict[str, object] = {"through": options.through, "requests": options.requests, "round": turn}
            row |= {f"accept_{name}": value for name, value in _accept(options.requests).items()}
            row |= _finish(folder, options.requests, paths)
            note("near_realtime", row)


@contextmanager
def _path(folder: Path, through: str) -> Iterator[Mapping[str, psutil.Process]]:
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


def _prepare() -> None:
    import msgspec
    from django.core.management import call_command

    from engine_agent.protocol.ingress_messages import Pool, RoutingTable
    from fleet.regions.models import Region
    from kernel import clock
    from traffic.routing import models
    from traffic.routing.services.ingresses import ingress_create

    call_command("migrate", verbosity=0)
    region = Region.objects.create(name=contenders.REGION)
    ingress_create(region=region, address="127.0.0.1", port=BASE_PORT, now=clock.now())
    pool = Pool(contenders.MODEL, (contenders.MODEL,), "realtime", (), (), {contenders.REGION: 1.0})
    body = msgspec.to_builtins(RoutingTable(1, contenders.REGION, (pool,)))
    models.RoutingTable.objects.create(region=region, revision=1, body=body, reason="bench", created_at=clock.now())


def _accept(count: int) -> dict[str, float]:
    from kernel import clock
    from traffic.async_requests.planner import AsyncSettings
    from traffic.async_requests.services.intake import AsyncSubmission, async_request_accept
    from traffic.tenants.selectors import Application

    settings = AsyncSettings(max_open_per_tenant=10**9)
    began_s, before_s = time.monotonic(), _cpu({"self": psutil.Process()})
    for number in range(count):
        submission = AsyncSubmission("/v1/chat/completions", BODY % number, idempotency_key=f"{time.time()}-{number}")
        async_request_accept(
            application=Application(tenant=f"t-{number % 4}"), submission=submission, now=clock.now(), settings=settings
        )
    return _rates(count, began_s, before_s, _cpu({"self": psutil.Process()}))


def _finish(folder: Path, count: int, paths: Mapping[str, psutil.Process]) -> dict[str, float]:
    from kernel import clock
    from traffic.async_requests.models import AsyncRequest

    words = (sys.executable, "manage.py", "jobs")
    with contenders.spawned(words, folder / "jobs.log", {"SWITCHYARD_PLAIN_LINKS": "1"}) as jobs:
        while not AsyncRequest.objects.exclude(state="queued").exists():
            time.sleep(0.02)
        began_s, before_s = time.monotonic(), _cpu({"jobs": jobs, **paths})
        while AsyncRequest.objects.filter(ended_at=None).exists():
            if time.monotonic() - began_s > LIMIT_S:
                raise SystemExit(f"not all ended within {LIMIT_S:g} s; {folder}/jobs.log")
            time.sleep(0.1)
        figures = _rates(count, began_s, before_s, _cpu({"jobs": jobs, **paths}))
    bad = AsyncRequest.objects.exclude(state="done")
    figures["not_done"] = bad.count()
    if bad.exists():
        print((bad.first() or bad).__dict__, (folder / "jobs.log").read_text()[-2000:])
    AsyncRequest.objects.filter(created_at__lt=clock.now() + timedelta(days=1)).delete()
    return figures


def _cpu(processes: Mapping[str, psutil.Process]) -> dict[str, float]:
    """CPU seconds of each process with its children; PostgreSQL's by its name, because backends come and go."""
    used = {name: cpu_s([each] if name == "self" else family(each.pid)) for name, each in processes.items()}
    backends = [each for each in psutil.process_iter(["name"]) if each.info["name"] == "postgres" and _is_ours(each)]
    return {**used, "postgres": sum(cpu_s([each]) for each in backends)}


def _is_ours(process: psutil.Process) -> bool:
    return any(each.pid == os.getpid() for each in process.parents())


def _rates(count: int, began_s: float, before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    per_s = count / (time.monotonic() - began_s)
    each_us = {f"{name}_us": round(1e6 * (after[name] - before[name]) / count) for name in after}
    return {"per_s": round(per_s, 1), **each_us, "sum_us": sum(each_us.values())}
