"""Lines of a batch a second from upload to results, and their CPU time by phase and process.

The phases are validating, sending, finalizing and, with `--sink`, delivering to a Valkey. `--through sim` has an
ingress, a cell proxy and a simulated engine; `wire` has a stub in place of the ingress. Other work on the machine
changes the rates. CPU time that processes use without work counts for few lines a second on a busy machine. So it is
measured first: `net_us` is the sum of all phases without it, and `ours_us` the same without the simulated engine."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from bench import note
from bench.fleet.own_control_plane import database
from bench.traffic import contenders
from bench.traffic.near_realtime import BASE_PORT, Processes, cpu_by_name, idle_shares, request_path, serving_rows

CELLS = 4
"""In the routing table; each adds 48 lines in flight. All are the same simulated engine."""
LIMIT_S = 900.0
SINK_PORT = BASE_PORT + 81
TENANT = "bench"
PHASES = ("validating", "in_progress", "finalizing")


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--through", choices=("wire", "sim"), default="sim")
    parser.add_argument("--sink", action="store_true", help="Also deliver each line to the bench's Valkey.")
    parser.add_argument("--only-validate", action="store_true", help="Cancel the batch once its lines are valid.")
    parser.add_argument("--profile", action="store_true", help="Print where process jobs spends its time.")
    options = parser.parse_args()
    with TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        stack.enter_context(database(folder, BASE_PORT + 90))
        paths = dict(stack.enter_context(request_path(folder, options.through)))
        serving_rows(CELLS)
        if options.sink:
            paths["valkey"] = stack.enter_context(_valkey(folder))
            _create_sink()
        for _ in range(options.rounds):
            row: dict[str, object] = {"through": options.through, "lines": options.lines}
            note("batch_lines", row | _round(folder, options, paths))


@contextmanager
def _valkey(folder: Path) -> Iterator[psutil.Process]:
    from controlplane.embedded.servers import binary

    words = (str(binary()), "--bind", "127.0.0.1", "--port", str(SINK_PORT), "--save", "", "--dir", str(folder))
    with contenders.spawned(words, folder / "valkey.log") as process:
        yield process


def _create_sink() -> None:
    from django.conf import settings

    from kernel import clock
    from traffic.batch_sinks.services.sinks import batch_sink_create

    settings.WEBHOOK_NETWORKS = ["127.0.0.0/8"]
    batch_sink_create(
        name="answers",
        tenant=TENANT,
        kind="valkey",
        url=f"valkey://127.0.0.1:{SINK_PORT}",
        key_template="bench:{batch}:{custom_id}",
        ttl_s=600,
        actor="bench",
        now=clock.now(),
    )


def _create_batch(lines: int, with_sink: bool) -> str:
    from kernel import clock
    from traffic.batches.planning.batch import parse_new_batch
    from traffic.batches.services.batch import batch_create, batch_settings
    from traffic.files.planner import FilePurpose
    from traffic.files.services.files import Upload, file_settings
    from traffic.tenants.selectors import Application

    now, application, upload = clock.now(), Application(tenant=TENANT), Upload(file_settings())
    for first in range(0, lines, 1000):
        upload.write(b"".join(_line(number) for number in range(first, min(first + 1000, lines))))
    expires_at = now.replace(year=now.year + 1)
    file = upload.finish(
        application=application, filename="in.jsonl", purpose=FilePurpose.BATCH, expires_at=expires_at, now=now
    )
    asked = {
        "input_file_id": file.id,
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
        "switchyard": {"sinks": ["answers"] if with_sink else []},
    }
    batch = batch_create(
        application=application, asked=parse_new_batch(asked), region="", now=now, settings=batch_settings()
    )
    return batch.id


def _line(number: int) -> bytes:
    body = {
        "model": contenders.MODEL,
        "messages": [{"role": "user", "content": f"{number}: why is the sky blue?"}],
        "max_tokens": 4,
    }
    line = {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(line).encode() + b"\n"


def _round(folder: Path, options: argparse.Namespace, paths: Processes) -> dict[str, float]:
    first_id = _create_batch(1, with_sink=False)
    profiling = ("-m", "cProfile", "-s", "tottime") if options.profile else ()
    words = (sys.executable, *profiling, "manage.py", "jobs")
    surroundings = {"SWITCHYARD_PLAIN_LINKS": "1", "SWITCHYARD_WEBHOOK_NETWORKS": "127.0.0.0/8"}
    figures: dict[str, float] = {}
    with contenders.spawned(words, folder / "jobs.log", surroundings) as jobs:
        named, peak = {"jobs": jobs, **paths}, _Peak(jobs)
        _wait(lambda: _state(first_id) == "completed", peak, folder)
        idle = idle_shares(named)
        batch_id = _create_batch(options.lines, options.sink)
        lines_began_s, lines_before = time.monotonic(), cpu_by_name(named)
        _wait(lambda: _fence(batch_id) > 0, peak, folder)
        for phase in PHASES:
            began_s, before = time.monotonic(), cpu_by_name(named)
            _wait(lambda phase=phase: _state(batch_id) != phase, peak, folder)  # type: ignore[misc]
            figures |= _phase(phase, options.lines, began_s, before, cpu_by_name(named))
            if options.only_validate:
                _cancel(batch_id)
                break
        if options.sink:
            began_s, before = time.monotonic(), cpu_by_name(named)
            _wait(lambda: _is_delivered(batch_id), peak, folder)
            figures |= _phase("delivering", options.lines, began_s, before, cpu_by_name(named))
        figures["jobs_mib"] = round(peak.bytes / 2**20)
        took_s, after = time.monotonic() - lines_began_s, cpu_by_name(named)
        net = {name: after[name] - lines_before[name] - idle[name] * took_s for name in after}
        figures |= {f"net_{name}_us": round(1e6 * used / options.lines) for name, used in net.items()}
    if options.profile:
        print("\n".join((folder / "jobs.log").read_text().splitlines()[:60]))
    sums = [value for name, value in figures.items() if name.endswith("_sum_us")]
    net_us = sum(value for name, value in figures.items() if name.startswith("net_"))
    ours_us = net_us - figures.get("net_sim_us", 0.0) - figures.get("net_valkey_us", 0.0)
    return figures | {
        "sum_us": sum(sums),
        "net_us": net_us,
        "ours_us": ours_us,
        "completed": _completed(batch_id),
    }


class _Peak:
    """The most resident memory of a process that was seen."""

    def __init__(self, process: psutil.Process) -> None:
        self.process, self.bytes = process, 0

    def look(self) -> None:
        with suppress(psutil.Error):
            self.bytes = max(self.bytes, self.process.memory_info().rss)


def _wait(is_so: Callable[[], bool], peak: _Peak, folder: Path) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not is_so():
        peak.look()
        if not peak.process.is_running() or time.monotonic() > until_s:
            raise SystemExit(f"jobs has stopped, or {LIMIT_S:g} s passed:\n{(folder / 'jobs.log').read_text()[-4000:]}")
        time.sleep(0.05)


def _phase(
    phase: str, lines: int, began_s: float, before: Mapping[str, float], after: Mapping[str, float]
) -> dict[str, float]:
    us = {name: round(1e6 * (after[name] - before[name]) / lines) for name in after}
    figures: dict[str, float] = {f"{phase}_{name}_us": value for name, value in us.items() if value}
    return figures | {
        f"{phase}_per_s": round(lines / (time.monotonic() - began_s), 1),
        f"{phase}_sum_us": sum(us.values()),
    }


def _state(batch_id: str) -> str:
    from traffic.batches.models import Batch

    return Batch.objects.values_list("state", flat=True).get(id=batch_id)


def _fence(batch_id: str) -> int:
    from traffic.batches.models import Batch

    return Batch.objects.values_list("fence", flat=True).get(id=batch_id)


def _completed(batch_id: str) -> int:
    from traffic.batches.models import Batch

    return Batch.objects.values_list("completed", flat=True).get(id=batch_id)


def _cancel(batch_id: str) -> None:
    from kernel import clock
    from traffic.batches.models import Batch
    from traffic.batches.services.batch import batch_end_early

    batch_end_early(batch=Batch.objects.get(id=batch_id), now=clock.now())


def _is_delivered(batch_id: str) -> bool:
    from traffic.batch_sinks.models import BatchDelivery

    state, reason = BatchDelivery.objects.values_list("state", "reason").get(batch=batch_id)
    if state == "failed":
        raise SystemExit(f"the delivery failed: {reason}")
    return state == "delivered"
