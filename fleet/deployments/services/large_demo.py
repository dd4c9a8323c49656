"""Seeds a large fleet into an empty database, to measure screens and the API. It has no agents, so nothing runs. The
rows do not depend on chance, so that two runs can be compared."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import count, islice
from typing import Any

import msgspec
from django.db import connection, transaction

from engine_agent.protocol.load_messages import ClassLoad, Load, UsageRow
from engine_agent.protocol.messages import Health
from fleet.cells.models import Cell, CellMember
from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.deployments.planner import UpdatePolicy, policy_as_json
from fleet.faults.models import Incident
from fleet.load.models import LoadSubject
from fleet.load.planner import KEPT_S
from fleet.load.selectors import FLEET, cell_subject, deployment_subject, region_subject
from fleet.nodes.models import Node, NodeReport
from fleet.reconcile.planning.states import CellState, NodeState, RolloutState
from fleet.regions.models import Region
from fleet.rollouts.models import Rollout
from kernel.refusals import Conflict
from models_registry.instance_types.planner import LOCAL_CPU
from models_registry.instance_types.services import instance_types_ship
from models_registry.versions.models import Model, ModelVersion, VersionState

REGIONS = 10
DEPLOYMENTS = 10
BATCH = 1000
EVENTS_PER_CELL = 20
REPORT_IN = timedelta(hours=1)
"""Reports are dated in the future, so that they stay fresh during a measurement."""
ODD_STATES = {7: CellState.STARTING, 101: CellState.DRAINING, 203: CellState.FAILED, 307: CellState.PENDING}
"""Of each 400 cells, the number of the one in this state. All others are ready."""
LOAD = Load(
    ttft_p50_ms=95.0,
    ttft_p99_ms=400.0,
    itl_p50_ms=14.0,
    itl_p99_ms=21.0,
    ttft_counts={bucket: 3 + bucket % 7 for bucket in range(70, 110)},
    itl_counts={bucket: 40 + bucket % 9 for bucket in range(50, 80)},
    classes={"realtime": ClassLoad(in_flight=5, requests_total=90_000, errors_total=12)},
    usage=tuple(UsageRow(1.0e9, f"tenant-{n}", f"{n:08x}", in_flight=1, requests_total=9000) for n in range(10)),
)
_WINDOWS = """
INSERT INTO fleet_loadwindow (subject_id, step_s, at, covered_s, requests, errors, slow, cells, in_flight, queued,
    tokens_per_s, ttft_p50_ms, ttft_p95_ms, itl_p50_ms, itl_p95_ms, prompt_tokens, preemptions, ttft_p99_ms, running,
    waiting, kv_percent, cache_hit_percent, step_ms)
SELECT id, %(step)s, at, %(step)s, %(step)s * 4 + wave, (wave / 40)::int, (wave / 10)::int, 1, wave / 8.0, wave / 40.0,
    300 + wave, 80 + wave, 300 + 2 * wave, 14 + wave / 40.0, 22 + wave / 20.0, %(step)s * 400, wave / 50,
    400 + 3 * wave, wave / 10.0, wave / 40.0, wave, 100 - wave, 12 + wave / 40.0
FROM fleet_loadsubject,
    generate_series(%(first)s::timestamptz, %(last)s::timestamptz, make_interval(secs => %(step)s)) AS at,
    LATERAL (SELECT ((extract(epoch FROM at)::bigint / %(step)s + id) %% 60)::int AS wave) AS w
"""
_EVENTS = """
INSERT INTO kernel_event (at, kind, tone, message, actor, region, deployment, cell, node, detail)
SELECT %(now)s - make_interval(secs => n * 60), 'cell.ready', 'ok', 'Cell ' || id || ' is ready', 'switchyard',
    region_id, deployment_id, id, '', '{}' FROM fleet_cell, generate_series(1, %(each)s) AS n ORDER BY n DESC, id
"""


@dataclass(frozen=True, slots=True)
class SeedCounts:
    regions: int
    deployments: int
    cells: int
    nodes: int


@transaction.atomic
def load_test_fleet_seed(*, cells: int, nodes: int, now: datetime, with_past: bool = True) -> SeedCounts:
    """Creates cells and nodes over ten regions and ten deployments, with past events and load. Raises Conflict if a
    fleet exists already, or there are fewer nodes than cells."""
    if Region.objects.exists():
        raise Conflict("the database has a fleet already; use an empty one")
    if nodes < cells:
        raise Conflict(f"{cells} cells need at least as many nodes, not {nodes}")
    instance_types_ship()
    regions = Region.objects.bulk_create(Region(name=f"region-{n:02d}", position=n) for n in range(REGIONS))
    deployments = [_deployment(number, cells, nodes, now) for number in range(DEPLOYMENTS)]
    _nodes(nodes, now)
    made = _cells(cells, deployments, now)
    _reports(now)
    _wanted_cells(made)
    _incidents_and_rollouts(made, now)
    if with_past:
        _history(made, deployments, regions, now)
    return SeedCounts(len(regions), len(deployments), len(made), nodes)


def _deployment(number: int, cells: int, nodes: int, now: datetime) -> Deployment:
    """As many deployments as possible have two nodes per cell. One node in ten stays spare."""
    twice = number < DEPLOYMENTS * min(1.0, max(0.0, 0.9 * nodes / cells - 1))
    model = Model.objects.create(name=f"model-{number:02d}", created_at=now)
    made = [
        ModelVersion.objects.create(
            model=model,
            version=str(version),
            engine="sim",
            state=VersionState.RELEASED.value,
            parallelism={LOCAL_CPU: {"nodes": 2 if twice else 1, "tp": 1}},
            golden_prompts=[{"prompt": "2 + 2 =", "expect": "4"}],
            created_at=now,
            state_since=now,
        )
        for version in (1, 2)
    ]
    name = f"deployment-{number:02d}"
    return Deployment.objects.create(name=name, model_version=made[0], instance_types=[LOCAL_CPU], created_at=now)


def _nodes(nodes: int, now: datetime) -> None:
    rows = (
        Node(
            id=f"n-{number:08x}",
            region_id=f"region-{number % REGIONS:02d}",
            instance_type_id=LOCAL_CPU,
            state=(NodeState.SUSPECT if number % 611 == 5 else NodeState.READY).value,
            cordoned=number % 503 == 9,
            address=f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}",
            port_base=20_000,
            topology=[f"spine-{number % 4}", f"rack-{number // REGIONS % 60}"],
            fingerprint={"sim.engine": "sim 1", "host.kernel": "6.8", "python": "3.11"},
            created_at=now - timedelta(days=7),
            state_since=now - timedelta(days=6),
            spare_since=now,
        )
        for number in range(nodes)
    )
    Node.objects.bulk_create(rows, batch_size=BATCH)


def _cells(cells: int, deployments: list[Deployment], now: datetime) -> list[Cell]:
    free = {region: (f"n-{number:08x}" for number in count(region, REGIONS)) for region in range(REGIONS)}
    made, members = [], []
    for number in range(cells):
        region, deployment = number % REGIONS, deployments[number // REGIONS % DEPLOYMENTS]
        state = ODD_STATES.get(number % 400, CellState.READY)
        made.append(
            Cell(
                id=f"{deployment.name}-region-{region:02d}-{number}",
                deployment=deployment,
                region_id=f"region-{region:02d}",
                instance_type_id=LOCAL_CPU,
                model_version=deployment.model_version,
                state=state.value,
                reason="" if state is CellState.READY else "seeded in this state",
                generation=1,
                created_at=now - timedelta(days=6),
                state_since=now - timedelta(minutes=number % 600),
            )
        )
        size = deployment.model_version.parallelism[LOCAL_CPU]["nodes"]
        for rank, node in enumerate(islice(free[region], size)):
            members.append(CellMember(cell=made[-1], node_id=node, rank=rank))
    Cell.objects.bulk_create(made, batch_size=BATCH)
    CellMember.objects.bulk_create(members, batch_size=BATCH)
    return made


def _reports(now: datetime) -> None:
    places = {member.node_id: member for member in CellMember.objects.select_related("cell")}
    rows = (
        NodeReport(
            node_id=node,
            connected=True,
            connection="seeded",
            connection_changed_at=now,
            last_seen_at=now + REPORT_IN,
            boot_id="seeded",
            agent_version="1",
            **(_report(places[node]) if node in places else {}),
        )
        for node in Node.objects.values_list("id", flat=True)
    )
    NodeReport.objects.bulk_create(rows, batch_size=BATCH)


def _report(member: CellMember) -> dict[str, Any]:
    report: dict[str, Any] = {
        "cell": member.cell_id,
        "generation": 1,
        "rank": member.rank,
        "engine_pid": 4711,
        "state": "ready",
        "health": msgspec.to_builtins(Health(ok=True, probe_ms=3.2, checked_s_ago=1.5)),
        "telemetry": {"cpu_percent": 12.5, "memory_bytes": 2**31, "engine_memory_bytes": 2**30},
    }
    if member.rank == 0 and member.cell.state == CellState.READY:
        number = sum(member.cell_id.encode())
        own = {"in_flight": number % 16, "queued": number % 3, "tokens_per_s": 300.0 + number % 99}
        totals = {"requests_total": 100_000 + number, "errors_total": number % 50}
        report["load"] = msgspec.to_builtins(msgspec.structs.replace(LOAD, **own, **totals), str_keys=True)
    return report


def _wanted_cells(cells: list[Cell]) -> None:
    wanted: dict[tuple[str, str], int] = {}
    for cell in cells:
        place = (cell.deployment_id, cell.region_id)
        wanted[place] = wanted.get(place, 0) + 1
    DeploymentRegion.objects.bulk_create(
        DeploymentRegion(deployment_id=deployment, region_id=region, cells=number)
        for (deployment, region), number in wanted.items()
    )


def _incidents_and_rollouts(cells: list[Cell], now: datetime) -> None:
    broken = [cell for cell in cells if cell.state == CellState.FAILED.value]
    Incident.objects.bulk_create(
        Incident(
            kind="cell-failed",
            subject=cell.id,
            summary=f"Cell {cell.id} failed",
            region=cell.region_id,
            deployment=cell.deployment_id,
            cell=cell.id,
            opened_at=now,
        )
        for cell in broken
    )
    for deployment in Deployment.objects.select_related("model_version")[:3]:
        Rollout.objects.create(
            deployment=deployment,
            from_version=deployment.model_version,
            to_version=ModelVersion.objects.get(model=deployment.model_version.model, version="2"),
            state=RolloutState.PAUSED.value,
            reason="seeded",
            region_order=[f"region-{n:02d}" for n in range(REGIONS)],
            policy=policy_as_json(UpdatePolicy()),
            actor="switchyard",
            created_at=now,
            state_since=now,
        )


def _history(cells: list[Cell], deployments: list[Deployment], regions: list[Region], now: datetime) -> None:
    names = [FLEET, *(region_subject(region.name) for region in regions), *(cell_subject(cell.id) for cell in cells)]
    for deployment in deployments:
        names += [deployment_subject(deployment.name, region) for region in ("", *(each.name for each in regions))]
    LoadSubject.objects.bulk_create((LoadSubject(name=name, seen_at=now) for name in names), batch_size=BATCH)
    with connection.cursor() as cursor:
        for step, kept_s in KEPT_S.items():
            last = now.timestamp() // step * step - step
            first = datetime.fromtimestamp(last - kept_s + step, now.tzinfo)
            values: dict[str, Any] = {"step": step, "first": first, "last": datetime.fromtimestamp(last, now.tzinfo)}
            cursor.execute(_WINDOWS, values)
        cursor.execute(_EVENTS, {"now": now, "each": EVENTS_PER_CELL})
        cursor.execute("ANALYZE")
