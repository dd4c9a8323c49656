"""Cost of one pass of each control loop by size of the fleet.

Cases: idle, with a changing fleet, with a fault, with a rollout.

    .venv/bin/python -m bench passes --nodes 1000 5000 20000 --passes 20

Starts its own servers; needs no fleet. It runs the loops' functions in this process, one pass of each every second.
Statements change rows every 2 s as the reports of agents and ingresses would. Compare CPU times: that of the pass, and
that of its PostgreSQL backend. `--controller 60` instead runs the process `controller` on the idle fleet for 60 s and
prints its CPU time.

A second table has the flight recorder's part of the passes of each loop that it records: CPU time in Python, rows and
bytes. In the phase *steer*, the autopilot moves the shares of three deployments each second, and the autoscaler changes
the cells of one in every region, in shadow mode.

`--lost-regions 3` instead makes all nodes of three of the ten regions silent together, for so long that a pass finds
all their cells lost."""

import argparse
import logging
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench import cpu_s, family
from bench.fleet.own_control_plane import database, seed_calm
from controlplane.embedded import control_plane
from controlplane.embedded.configuration import read_configuration

PORT = 24380
TICK_S = 1.0
RECORDER_TABLE = """
| nodes | phase | loop | rounds | median ms | least | most | of the pass | bytes of a whole one | of a difference |
| ---: | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"""
SETTLE_PASSES = 3
STARTED_AFTER_S = 20.0
RECORDED = ("fleet.reconcile", "traffic.publish", "traffic.autopilot", "traffic.autoscale")
MOVING = (*RECORDED, "fleet.provision", "traffic.ensure_ingresses")
_REPORTS = """
UPDATE fleet_nodereport SET last_seen_at = %(now)s - random() * interval '0.5 s', connected = true,
    listener = 'bench', load = jsonb_set(load, '{queued}', '1')
WHERE connection <> 'dead'
    AND (last_seen_at <= %(now)s - interval '60 s' OR listener = '' AND abs(hashtext(node_id)) %% 8 = %(tick)s %% 8)
"""
_OBEDIENT = """
UPDATE fleet_nodereport AS report SET cell = cell.id, generation = cell.generation, rank = member.rank,
    unhealthy_since = NULL, load = jsonb_set(load, '{in_flight}', '0'),
    state = CASE WHEN cell.state = 'starting' THEN 'ready' ELSE report.state END
FROM fleet_cellmember AS member JOIN fleet_cell AS cell ON cell.id = member.cell_id
WHERE member.node_id = report.node_id AND cell.state IN ('starting', 'draining') AND report.connection <> 'dead'
"""
_FOLLOWED = """
UPDATE traffic_ingressreport AS report SET connected = true, last_seen_at = %(now)s, revision = (
    SELECT max(revision) FROM traffic_routingtable AS published
    JOIN traffic_ingress AS ingress ON ingress.region_id = published.region_id WHERE ingress.id = report.ingress_id)
"""
_FLAP = """
UPDATE fleet_nodereport SET connected = NOT connected, connection_changed_at = %(now)s
WHERE connection <> 'dead' AND abs(hashtext(node_id)) %% 100 IN (%(tick)s %% 100, (%(tick)s - 1) %% 100)
"""
_STEER = """
UPDATE traffic_trafficmatrix SET shares = '{}'
WHERE deployment_id IN ('deployment-04', 'deployment-05', 'deployment-06')
"""
_SCALE = """
UPDATE fleet_deploymentregion SET cells_min = cells + %(tick)s, cells_max = 1000 WHERE deployment_id = 'deployment-03'
"""
_BREAK = """
UPDATE fleet_nodereport SET state = 'failed', reason = 'out of memory'
WHERE rank = 0 AND cell <> '' AND abs(hashtext(node_id)) %% 100 = 7
"""
_SILENCE = """
UPDATE fleet_nodereport SET connection = 'dead', quiet = true, last_seen_at = %(now)s - interval '11 s'
WHERE abs(hashtext(node_id)) %% 100 = 9
"""
_CALM = "UPDATE fleet_nodereport SET connection_changed_at = now() - interval '1 hour'"
_LOSE = """
UPDATE fleet_nodereport SET connection = 'dead', quiet = true, last_seen_at = now() - interval '121 s'
FROM fleet_node AS node WHERE node.id = node_id AND node.region_id IN (
    SELECT name FROM fleet_region ORDER BY name DESC LIMIT %s)
"""
_STEPS = """
INSERT INTO fleet_steprecord (node_id, cell, generation, index, totals, windows)
SELECT node_id, cell_id, 1, 100, '{}', (
    SELECT jsonb_agg(jsonb_build_object('index', number, 'steps', counts.steps, 'compute_ms', counts.compute_ms))
    FROM generate_series(95, 99) AS number, (
        SELECT jsonb_object_agg(bucket, 200) AS steps, jsonb_object_agg(bucket, 200 * (10 + bucket)) AS compute_ms
        FROM generate_series(4, 11) AS bucket) AS counts)
FROM fleet_cellmember
"""


@dataclass
class Figures:
    """What the passes of one loop took, in seconds; PostgreSQL's only in sum, for it counts in hundredths."""

    wall_s: list[float] = field(default_factory=list)
    python_s: list[float] = field(default_factory=list)
    postgres_s: float = 0.0
    queries: list[int] = field(default_factory=list)


class Fleet:
    def __init__(self) -> None:
        self.tick = 0

    def move(self, *statements: str) -> None:
        """What agents and ingresses write in a second, and these statements."""
        from django.db import connection

        from fleet.nodes.services.reports import listener_renew
        from fleet.reconcile.selectors.snapshot import LISTENING_LEASE
        from kernel import clock
        from kernel.leases import lease_take

        self.tick += 1
        now = clock.now()
        lease_take(name=LISTENING_LEASE, holder="bench", ttl_s=1800, now=now - timedelta(seconds=600))
        listener_renew(listener="bench", keeps_up=True, now=now)
        with connection.cursor() as cursor:
            for statement in (_REPORTS, _OBEDIENT, _FOLLOWED, *statements):
                cursor.execute(statement, {"now": now, "tick": self.tick})


@dataclass
class Recording:
    """What the flight recorder took in the passes of a loop in a phase."""

    python_s: list[float] = field(default_factory=list)
    rows: int = 0
    bytes: int = 0
    whole_bytes: int = 0
    wholes: int = 0

    @contextmanager
    def watched(self, recorder: Any) -> Iterator[None]:
        from django.db.models import Sum

        from fleet.recorder.models import RecordedRound

        record, last = recorder.record, RecordedRound.objects.order_by("-id").values_list("id", flat=True).first()

        def timed(rounds: Any) -> None:
            began = time.thread_time()
            record(rounds)
            self.python_s.append(time.thread_time() - began)

        recorder.record = timed
        try:
            yield
        finally:
            del recorder.record
        rows = RecordedRound.objects.filter(id__gt=last or 0, loop=recorder.loop.name)
        whole = rows.filter(base=None)
        self.rows, self.wholes = rows.count(), whole.count()
        self.bytes, self.whole_bytes = (found.aggregate(sum=Sum("size"))["sum"] or 0 for found in (rows, whole))


@contextmanager
def _measured(figures: Figures, postgres_pid: int) -> Iterator[None]:
    from django.db import connection

    queries = [0]

    def counted(execute: Callable[..., Any], *arguments: Any) -> Any:
        queries[0] += 1
        return execute(*arguments)

    before, python, wall = cpu_s(family(postgres_pid)), time.thread_time(), time.monotonic()
    with connection.execute_wrapper(counted):
        yield
    figures.wall_s.append(time.monotonic() - wall)
    figures.python_s.append(time.thread_time() - python)
    figures.postgres_s += cpu_s(family(postgres_pid)) - before
    figures.queries.append(queries[0])


def _recorders() -> dict[str, Any]:
    """The recorders of this process, by task."""
    from fleet import tasks as of_fleet
    from traffic import tasks as of_traffic

    return dict(zip(RECORDED, (of_fleet._recorder, *map(of_traffic._recorders.get, of_traffic.RECORDED)), strict=True))


def measure(fleet: Fleet, passes: int, *each_second: str) -> tuple[dict[str, Figures], dict[str, Recording]]:
    """So many passes of every loop; the first few of a process are not counted."""
    from django.db import connection

    from controlplane.celery import app

    app.loader.import_default_modules()
    figures, recordings = {name: Figures() for name in MOVING}, {name: Recording() for name in RECORDED}
    connection.ensure_connection()
    postgres_pid = connection.connection.info.backend_pid
    with ExitStack() as watched:
        for name, recorder in _recorders().items():
            watched.enter_context(recordings[name].watched(recorder))
        for _ in range(passes):
            began = time.monotonic()
            fleet.move(*each_second)
            for name in MOVING:
                with _measured(figures[name], postgres_pid):
                    app.tasks[name].run()
            time.sleep(max(0.0, TICK_S - (time.monotonic() - began)))
    return figures, recordings


def _roll_out() -> None:
    """Two deployments move to their second version, without waiting between waves."""
    from fleet.deployments.models import Deployment
    from fleet.rollouts.services import rollout_propose, rollout_start
    from kernel import clock

    for name in ("deployment-00", "deployment-01"):
        model = Deployment.objects.get(name=name).model_version.model_id
        policy = {"max_unavailable": 4, "canary": False, "bake_s": 5, "min_healthy_s": 1}
        proposal = rollout_propose(deployment=name, version=f"{model}@2", policy=policy)
        rollout_start(proposal=proposal, actor="bench", now=clock.now())


def _report(nodes: int, phase: str, measured: tuple[dict[str, Figures], dict[str, Recording]]) -> str:
    """Prints the figures of the loops, and returns the lines of the recorder's table."""
    figures, recordings = measured
    for name, one in figures.items():
        wall, passes = sorted(one.wall_s), len(one.wall_s)
        p99 = wall[min(passes - 1, round(0.99 * passes))]
        python = statistics.mean(one.python_s)
        print(
            f"| {nodes:,} | {phase} | {name} | {statistics.median(wall) * 1000:.0f} | {p99 * 1000:.0f} "
            f"| {python * 1000:.0f} | {max(one.python_s) * 1000:.0f} | {one.postgres_s / passes * 1000:.0f} "
            f"| {statistics.median(one.queries):.0f} | {max(one.queries)} |",
            flush=True,
        )
    lines = (_recorder_line(nodes, phase, name, figures[name], one) for name, one in recordings.items() if one.rows)
    return "\n".join(lines)


def _recorder_line(nodes: int, phase: str, loop: str, figures: Figures, recording: Recording) -> str:
    took_s = sorted(recording.python_s)
    share = sum(took_s) / (sum(figures.python_s) + figures.postgres_s)
    differences = recording.rows - recording.wholes
    each = (recording.bytes - recording.whole_bytes) / differences if differences else 0
    whole = recording.whole_bytes / recording.wholes if recording.wholes else 0
    return (
        f"| {nodes:,} | {phase} | {loop} | {recording.rows} | {statistics.median(took_s) * 1000:.1f} "
        f"| {took_s[0] * 1000:.1f} | {took_s[-1] * 1000:.1f} | {share:.1%} | {whole:,.0f} | {each:,.0f} |"
    )


def run_controller(nodes: int, seconds: float, log: Path) -> None:
    """The real process: its loops receive wake-ups, pause, and read everything periodically."""
    from kernel.models import LoopPass

    program = control_plane.service("controller", read_configuration({}), dict(os.environ)).program
    fleet = Fleet()
    took_s: dict[str, dict[datetime, float]] = defaultdict(dict)
    fleet.move()
    with log.open("wb") as output:
        process = subprocess.Popen(
            program.arguments, env=dict(program.environment), cwd=program.folder, stdout=output, stderr=output
        )
    try:
        used_s, began = 0.0, time.monotonic()
        from_s = began
        while (now := time.monotonic()) - began < STARTED_AFTER_S + seconds:
            if now - began < STARTED_AFTER_S:
                used_s = cpu_s(family(process.pid))
                from_s = now
            fleet.move()
            for one in LoopPass.objects.filter(loop__in=MOVING):
                took_s[one.loop][one.passed_at] = one.took_s
            time.sleep(max(0.0, TICK_S - (time.monotonic() - now)))
        cores = (cpu_s(family(process.pid)) - used_s) / (time.monotonic() - from_s)
    finally:
        process.terminate()
        process.wait(30)
    print(f"{nodes:,} nodes: the controller uses {cores:.2f} cores", flush=True)
    for loop, seen in sorted(took_s.items()):
        passes = sorted(seen.values())
        print(f"  {loop}: {len(passes)} passes seen, median {statistics.median(passes):.2f} s, most {passes[-1]:.2f} s")


def run(nodes: int, passes: int, *, steps: bool, controller_s: float, lost_regions: int, log: Path) -> None:
    from django.db import connection

    fleet = Fleet()
    began = time.monotonic()
    seed_calm(nodes, int(nodes * 0.45), with_past=False)
    with connection.cursor() as cursor:
        cursor.execute("UPDATE fleet_nodereport SET load = '{}' WHERE load IS NULL")
        if steps:
            cursor.execute(_STEPS)
        cursor.execute("VACUUM ANALYZE")
    print(f"{nodes} nodes seeded in {time.monotonic() - began:.0f} s", file=sys.stderr)
    if controller_s:
        run_controller(nodes, controller_s, log)
        return
    measure(fleet, SETTLE_PASSES)
    if lost_regions:
        with connection.cursor() as cursor:
            cursor.execute(_CALM)
            cursor.execute(_LOSE, [lost_regions])
            lost = cursor.rowcount
        print(RECORDER_TABLE, _report(nodes, f"{lost:,} lost", measure(fleet, passes)), sep="\n", flush=True)
        return
    recorder = [
        _report(nodes, "idle", measure(fleet, passes)),
        _report(nodes, "1 % change", measure(fleet, passes, _FLAP)),
    ]
    _roll_out()
    recorder.append(_report(nodes, "rollout", measure(fleet, passes)))
    recorder.append(_report(nodes, "steer", measure(fleet, passes, _STEER, _SCALE)))
    fleet.move(_BREAK, _SILENCE)
    recorder.append(_report(nodes, "fault", measure(fleet, passes)))
    print(RECORDER_TABLE, *filter(None, recorder), sep="\n", flush=True)


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=int, nargs="+", default=[1000, 5000, 20_000])
    parser.add_argument("--passes", type=int, default=20, help="of each loop in each phase")
    parser.add_argument("--steps", action="store_true", help="every rank has five windows of steps to compare")
    parser.add_argument("--controller", type=float, default=0.0, help="seconds")
    parser.add_argument("--lost-regions", type=int, default=0, help="of ten, instead of the other phases")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    logging.disable(logging.ERROR)  # no provider knows these nodes, and each decision is a line
    print("| nodes | phase | loop | median ms | p99 ms | Python ms | most | PostgreSQL ms | queries | most |")
    print("| ---: | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
    for nodes in options.nodes:
        child = os.fork()
        if child == 0:  # a process each, because Django keeps to its first database
            with TemporaryDirectory(prefix="switchyard-bench-") as folder, database(Path(folder), PORT):
                log = Path(folder) / "controller.log"
                parts = {
                    "steps": options.steps,
                    "controller_s": options.controller,
                    "lost_regions": options.lost_regions,
                }
                run(nodes, options.passes, **parts, log=log)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            raise SystemExit(f"the bench of {nodes} nodes failed")
