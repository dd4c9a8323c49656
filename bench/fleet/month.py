"""Seeds what a month leaves behind in a fleet of `seed_scale`: machines, rounds, incidents, rollouts and windows of
nodes here; the rest is in `month_of_work`. Rows do not depend on chance, so that two runs can be compared."""

from datetime import datetime, timedelta
from typing import Any

from bench.fleet.month_of_work import ACCOUNTS, BATCH, DAYS, spread, work_seed
from bench.fleet.own_control_plane import NO_PROVIDER

ROUNDS = 20_000
INCIDENTS = 1200
ROLLOUTS = 300
_NODE_SUBJECTS = """
INSERT INTO fleet_loadsubject (name, index, memory, seen_at) SELECT 'node:' || id, 0, '', %(now)s FROM fleet_node
"""
_NODE_WINDOWS = """
INSERT INTO fleet_nodewindow (subject_id, step_s, at, cpu_percent, memory_percent, disk_percent, utilisation_percent,
    device_memory_percent, clock_percent, temperature_c, power_watts, network_received, network_sent, disk_read,
    disk_written, ecc_errors, link_errors)
SELECT id, %(step)s, at, 10 + wave, 40 + wave / 2.0, 30, wave, 70 + wave / 3.0, 100 - wave / 10.0, 45 + wave / 2.0,
    200 + 4 * wave, n * 1000000, n * 500000, n * 20000, n * 10000, n / 500, 0
FROM fleet_loadsubject,
    generate_series(%(first)s::timestamptz, %(last)s::timestamptz, make_interval(secs => %(step)s)) AS at,
    LATERAL (SELECT extract(epoch FROM at)::bigint / %(step)s AS n) AS steps,
    LATERAL (SELECT ((n + id) %% 60)::int AS wave) AS waves
WHERE name LIKE ANY(%(names)s)
"""
ALL_NODES, MEASURED = ["node:%"], ["node:%1", "deployment:%", "region:%", "fleet"]
"""Patterns of subjects. One node in sixteen has its whole past, the others an hour, which fills the yard map."""
_FRESH = """
INSERT INTO {table} ({columns}) SELECT {shifted} FROM {table} JOIN fleet_loadsubject subject ON subject.id = subject_id
WHERE step_s = %(step)s AND at >= %(first)s AND (at >= %(last)s OR subject.name !~ '^(cell|node):')
"""
_EVENTS = """
INSERT INTO kernel_event (at, kind, tone, message, actor, region, deployment, cell, node, detail)
SELECT opened_at, 'incident.opened', 'bad', summary, 'switchyard', region, deployment, cell, node, '{}'
FROM fleet_incident UNION ALL
SELECT created_at, 'rollout.started', 'moving', 'Rollout ' || id || ' began', 'switchyard', '', deployment_id, '', '',
    jsonb_build_object('rollout', id) FROM fleet_rollout UNION ALL
SELECT at, 'traffic.shifted', 'moving', reason, 'switchyard', '', deployment_id, '', '', '{}' FROM traffic_trafficshift
"""


def month_seed(now: datetime) -> None:
    """Needs the fleet of `seed_scale` with its keys."""
    from django.db import connection

    _machines(now)
    _windows_of_nodes(now)
    _fresh_windows(now)
    _incidents(now)
    _rollouts(now)
    _rounds(now)
    _decisions(now)
    _clouds(now)
    work_seed(now)
    with connection.cursor() as cursor:
        cursor.execute(_EVENTS)
        cursor.execute("ANALYZE")


def _machines(now: datetime) -> None:
    from fleet.machines.models import Invitation, Machine
    from fleet.nodes.models import Node

    Machine.objects.bulk_create(
        (
            Machine(
                id=f"m-{node.id.removeprefix('n-')}",
                provider=NO_PROVIDER,
                provider_id=f"host-{number}",
                region_id=node.region_id,
                state="taken",
                runs=node.id,
                instance_type_id=node.instance_type_id,
                address=node.address,
                connected=True,
                last_seen_at=now,
                created_at=node.created_at,
                state_since=node.created_at,
            )
            for number, node in enumerate(Node.objects.order_by("id"))
        ),
        batch_size=BATCH,
    )
    Invitation.objects.bulk_create(
        Invitation(
            prefix=f"invited{number}",
            digest=64 * "0",
            region_id=f"region-{number % 10:02d}",
            role="node",
            count=100,
            left=number,
            created_by="ada",
            created_at=spread(number, ACCOUNTS, now),
            expires_at=now + timedelta(days=1),
        )
        for number in range(ACCOUNTS)
    )


def _windows_of_nodes(now: datetime) -> None:
    from django.db import connection

    from fleet.load.planner import MINUTE_S, NODE_KEPT_S

    with connection.cursor() as cursor:
        cursor.execute(_NODE_SUBJECTS, {"now": now})
        for step, kept_s in NODE_KEPT_S.items():
            last = datetime.fromtimestamp(now.timestamp() // step * step - step, now.tzinfo)
            first = last - timedelta(seconds=kept_s - step)
            values: dict[str, Any] = {"step": step, "first": first, "last": last, "names": MEASURED}
            cursor.execute(_NODE_WINDOWS, values)
            if step == MINUTE_S:
                others = {**values, "first": last - timedelta(hours=1), "names": ALL_NODES}
                cursor.execute(f"{_NODE_WINDOWS} ON CONFLICT DO NOTHING", others)


def _fresh_windows(now: datetime) -> None:
    """Windows of the next hour, so that figures stay current during a measurement: the last one of each cell and node,
    and those of an hour of all other subjects."""
    from django.db import connection

    from fleet.load.models import LoadWindow, NodeWindow
    from fleet.load.planner import FINE_S, MINUTE_S

    hour = timedelta(hours=1)
    for model, step in ((LoadWindow, FINE_S), (NodeWindow, MINUTE_S)):
        names = [field.column for field in model._meta.local_concrete_fields if field.column]
        shifted = ", ".join("at + interval '1 hour'" if name == "at" else name for name in names)
        statement = _FRESH.format(table=model._meta.db_table, columns=", ".join(names), shifted=shifted)
        with connection.cursor() as cursor:
            cursor.execute(statement, {"step": step, "first": now - hour, "last": now - timedelta(seconds=2 * step)})


def _incidents(now: datetime) -> None:
    from fleet.cells.models import CellMember
    from fleet.faults.models import Incident, IncidentNote, IncidentPart, Repair, Replacement

    members = list(CellMember.objects.select_related("cell").order_by("cell_id", "rank"))
    hit = [members[number * 7 % len(members)] for number in range(INCIDENTS)]
    closed = Incident.objects.bulk_create(
        Incident(
            kind="node-lost",
            subject=member.node_id,
            state="closed",
            summary=f"Node {member.node_id} is lost",
            resolution="a spare replaced it",
            region=member.cell.region_id,
            deployment=member.cell.deployment_id,
            cell=member.cell_id,
            node=member.node_id,
            evidence={"silent_s": 12.5, "witnesses": ["i-region-00"]},
            closed_by="switchyard",
            opened_at=(opened := spread(number, INCIDENTS, now)),
            seen_at=opened,
            closed_at=opened + timedelta(minutes=4),
        )
        for number, member in enumerate(hit)
    )
    IncidentPart.objects.bulk_create(
        IncidentPart(incident=each, noun=noun, name=name, since=each.opened_at, recovered_at=each.closed_at)
        for each in Incident.objects.all()
        for noun, name in (("node", each.node), ("cell", each.cell))
        if name
    )
    IncidentNote.objects.bulk_create(
        IncidentNote(incident=each, at=each.opened_at, actor="ada", text=f"note {note}")
        for each in closed[::10]
        for note in range(5)
    )
    Replacement.objects.bulk_create(
        Replacement(
            node_id=each.node,
            cell=each.cell,
            rule="liveness",
            reason="lost",
            incident=each,
            opened_at=each.opened_at,
            begun_at=each.opened_at,
            closed_at=each.closed_at,
            resolution="replaced",
        )
        for each in closed
    )
    Repair.objects.bulk_create(
        Repair(node_id=each.node, what="restart_engine", reason="lost", at=each.opened_at, ended_at=each.closed_at)
        for each in closed
    )


def _rollouts(now: datetime) -> None:
    from fleet.deployments.models import Deployment
    from fleet.deployments.planner import UpdatePolicy, policy_as_json
    from fleet.rollouts.models import Rollout, RolloutPoints
    from fleet.rollouts.planning.gates import NEW, OLD
    from fleet.rollouts.selectors import MEASURES
    from models_registry.versions.models import ModelVersion
    from traffic.region_shares.models import TrafficShift

    deployments = list(Deployment.objects.select_related("model_version"))
    second = {each.model_id: each for each in ModelVersion.objects.filter(version="2")}
    made = Rollout.objects.bulk_create(
        Rollout(
            deployment=(deployment := deployments[number % len(deployments)]),
            from_version=deployment.model_version,
            to_version=second[deployment.model_version.model_id],
            state="rolled_back",
            reason="first wave",
            cause="the gate found a slower first token",
            region_order=[f"region-{n:02d}" for n in range(10)],
            policy=policy_as_json(UpdatePolicy()),
            actor="ada",
            created_at=(began := spread(number, ROLLOUTS, now)),
            state_since=began + timedelta(minutes=20),
            ended_at=began + timedelta(minutes=20),
        )
        for number in range(ROLLOUTS)
    )
    values = [50.0 + n % 9 for n in range(200)]
    lines = {measure: {NEW: values, OLD: values} for measure in MEASURES}
    RolloutPoints.objects.bulk_create(
        RolloutPoints(rollout=each, start=each.created_at, step_s=15, lines=lines) for each in made
    )
    TrafficShift.objects.bulk_create(
        TrafficShift(
            deployment=deployment,
            revision=number + 2,
            kind="relief",
            shares={f"region-{n:02d}": {f"region-{n:02d}": 0.9, f"region-{(n + 1) % 10:02d}": 0.1} for n in range(10)},
            moved=0.1,
            reason="a region was full",
            at=spread(number, 200, now),
        )
        for deployment in deployments
        for number in range(200)
    )


def _rounds(now: datetime) -> None:
    """The last twenty, half an hour ago, hold the fleet as it is now, so that pages with `?at=` have something to
    decode."""
    from fleet.cells.models import CellMember
    from fleet.reconcile.planning.settings import FleetSettings
    from fleet.reconcile.selectors.snapshot import fleet_view
    from fleet.recorder.models import RecordedRound, RoundSubject
    from fleet.recorder.planning.loops import Decided, Round
    from fleet.recorder.services import Recorder

    members = list(CellMember.objects.select_related("cell").order_by("cell_id", "rank"))
    rows, about = [], []
    for number in range(ROUNDS):
        member = members[number * 7 % len(members)]
        named = (f"cell:{member.cell_id}", f"node:{member.node_id}", f"deployment:{member.cell.deployment_id}")
        reason = {
            "decision": "StartCell",
            "planner": "plan_reconcile",
            "rule": "reconcile",
            "reason": f"placed on {member.node_id}",
            "subjects": named,
            "inputs": {"spares": 3, "in_state_s": 2.5},
            "limits": {"restart_backoff_s": 2.0},
        }
        at = spread(number, ROUNDS, now - timedelta(hours=1))
        known = {"loop": "reconciler", "planner": "plan_reconcile", "schema": "s", "release": "1"}
        row = RecordedRound(at=at, decided=1, reasons=[reason], **known)
        rows.append(row)
        about.append(named)
    RecordedRound.objects.bulk_create(rows, batch_size=BATCH)
    subjects = (
        RoundSubject(round=row, subject=subject) for row, named in zip(rows, about, strict=True) for subject in named
    )
    RoundSubject.objects.bulk_create(subjects, batch_size=BATCH)
    recorder, view, settings = Recorder(), fleet_view(now=now), FleetSettings()
    rounds = (now - timedelta(minutes=30) + timedelta(seconds=20 * number) for number in range(20))
    recorder.record(Round(view, settings, at, (Decided("plan_reconcile", (), ()),)) for at in rounds)


def _decisions(now: datetime) -> None:
    from fleet.autoscaling.models import ScalingDecision, ScalingState
    from fleet.deployments.models import DeploymentRegion

    DeploymentRegion.objects.filter(deployment__name="deployment-01").update(cells_min=1, cells_max=100)
    found = {"wanted": 25, "rule": "queue", "reason": "many wait"}
    places = list(DeploymentRegion.objects.filter(cells_max=100))
    load = {"in_flight": 70.0, "queued": 2.0, "per_cell": 8.0}
    ScalingState.objects.bulk_create(
        ScalingState(place=place, acting=True, load=load, looked_at=now, **found) for place in places
    )
    ScalingDecision.objects.bulk_create(
        ScalingDecision(
            deployment_id=place.deployment_id,
            region_id=place.region_id,
            was=24,
            acted=True,
            at=spread(number, 500, now),
            observed_s=60.0,
            **found,
        )
        for number in range(500)
        for place in places
    )


def _clouds(now: datetime) -> None:
    from fleet.clouds.models import CapacityPool, CloudRegion
    from fleet.quotas.models import Quota
    from fleet.regions.models import Rate, Region

    regions = list(Region.objects.all())
    CloudRegion.objects.bulk_create(
        CloudRegion(region=region, aws_region="us-east-1", stack="a-stack", state="ready", read_at=now, listed_at=now)
        for region in regions
    )
    CapacityPool.objects.bulk_create(
        CapacityPool(
            region=region,
            instance_type_id="local.cpu",
            position=position,
            market=("on_demand", "spot")[position % 2],
            zone=f"us-east-1{'abc'[position % 3]}",
            subnet=f"subnet-{position}",
            image="ami-1",
            price_per_hour=1.0 + position / 10,
            price_at=now,
        )
        for region in regions
        for position in range(12)
    )
    Quota.objects.bulk_create(
        Quota(name=f"team-{n}:local.cpu", team=f"team-{n}", instance_type_id="local.cpu", machines=100, changed_at=now)
        for n in range(10)
    )
    Rate.objects.create(
        kind="machine_price",
        subject="local.cpu",
        value=2,
        valid_from=now - timedelta(days=DAYS),
        actor="ada",
        created_at=now,
    )
