"""A fleet of any size in the database, with everything that a page can show of it."""

import json
from datetime import timedelta
from decimal import Decimal

from audit.models import Proof
from audit.services import Act, Actor, audit_record
from fleet.agents.models import ApplicationCertificate
from fleet.autoscaling.models import RoleState, ScalingDecision, ScalingState
from fleet.cells.models import Cell
from fleet.clouds.models import CapacityPool, CloudRegion, ImageMove
from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.deployments.planner import UpdatePolicy, policy_as_json
from fleet.drafts.models import PlanDraft
from fleet.faults.models import Incident
from fleet.machines.models import Invitation
from fleet.quotas.models import Quota
from fleet.recorder.models import RecordedRound, RoundSubject
from fleet.regions.models import Rate, Region
from fleet.releases.models import AgentRelease
from fleet.requests.models import RequestSample
from fleet.rollouts.models import Rollout
from kernel import clock
from kernel.events import event_record
from models_registry.benchmarks.models import Benchmark, BenchmarkPoint
from models_registry.builds.models import EngineBuild, EngineBuildUpload
from models_registry.compile_caches.models import CompileCache
from models_registry.imports.models import ImportFile, ModelImport
from models_registry.instance_types.models import InstanceType
from models_registry.versions.models import Model, ModelVersion, Validation
from tests.engine_agent.engines.builds.packed import FACTS as BUILD_FACTS
from tests.fleet import rows
from tests.fleet.rows import NOW
from traffic.async_requests.models import AsyncRequest, RequestQueue
from traffic.batch_schedules.models import BatchSchedule
from traffic.batch_sinks.models import BatchSink
from traffic.batches.models import Batch, BatchRange, BatchTimeline
from traffic.demand.models import DemandForecast
from traffic.entry.models import Entry, EntryRevision
from traffic.keys.models import ApplicationKey
from traffic.region_shares.models import TrafficMatrix, TrafficOverride, TrafficShift
from traffic.responses.models import StoredResponse
from traffic.routing.models import Ingress, IngressReport, RoutingTable
from traffic.streams.models import StreamHour
from traffic.tenants.models import TenantGrant, TenantWebhook
from traffic.usage.models import Budget, CellHour, CostShare, UsageHour, UsageMonth

COUNTS = {"ttft_counts": {"12": 3}, "itl_counts": {"7": 40}}
LOAD = {"in_flight": 7, "queued": 2, "tokens_per_s": 431.5, "ttft_p50_ms": 80.0, "ttft_p99_ms": 410.0, **COUNTS}
FOUND = {"check": "memory", "ok": True, "found": "256 MiB held 5 of 5 patterns", "seconds": 0.6}
CHECKS = {"request": "joining", "began_at": 1795262221.0, "ended_at": 1795262233.9, "results": [FOUND]}
STATES = ("ready", "starting", "failed", "draining", "pending", "lost")


def one_more_of_everything(number: int) -> Cell:
    """A region with a two-node cell in one of the states, two spares, an ingress, and all that speaks of them."""
    region = rows.region(f"region-{number}", position=number)
    kind, _ = InstanceType.objects.get_or_create(name="local.cpu", defaults={"accelerator": "cpu"})
    invitation = Invitation.objects.create(
        prefix=f"invited{number}", digest=64 * "0", region=region, role="node", count=2, left=1, created_by="operator",
        created_at=NOW, expires_at=NOW.replace(year=NOW.year + 50),
    )  # fmt: skip
    cordon = Act("node.cordon", object=f"node/n-{number:08x}", changes={"asked": {"why": "fan"}})
    audit_record(actor=Actor("operator", Proof.SESSION, "127.0.0.1"), act=cordon, now=NOW)
    model = Model.objects.create(name=f"model-{number}", created_at=NOW)
    wanted = {"apiVersion": "switchyard/v1", "kind": "Model", "metadata": {"name": model.name}, "spec": {}}
    PlanDraft.objects.create(
        key=f"draft-{number}", owner="operator", name="More cells", documents=[wanted], changed_at=NOW
    )
    EngineBuild.objects.create(
        name=f"build-{number}", uri=f"s3://builds/{number}", digest=f"sha256:{number}", serves="vllm", version="1",
        platform="cpu", program="bin/python", python="3.11.7", cpu_arch="x86_64", least_glibc="2.17", packed_bytes=1,
        unpacked_bytes=1, parts=1, actor="ada", created_at=NOW,
    )  # fmt: skip
    EngineBuildUpload.objects.create(
        name=f"upload-{number}", digest=f"sha256:u{number}", facts=json.dumps(BUILD_FACTS), parts=41, parts_done=7,
        packed_bytes=2_600_000_000, bytes_done=447_000_000, actor="ada", created_at=NOW, touched_at=NOW,
    )  # fmt: skip
    version = ModelVersion.objects.create(
        model=model,
        version="1",
        engine="sim",
        state="released",
        parallelism={"local.cpu": {"nodes": 2, "tp": 4}},
        artifact_digest="sha256:0123456789abcdef",
        golden_prompts=[{"prompt": "2 + 2 =", "expect": "4"}],
        created_at=NOW,
        state_since=NOW,
    )
    validated(version)
    CompileCache.objects.create(
        version=version, instance_type="local.cpu", rank=0, key=64 * "c", digest="sha256:" + 64 * "d",
        packed_bytes=2**20, unpacked_bytes=2**23, node=f"n-{number:08x}", cell="cell-1", used_at=NOW, created_at=NOW,
    )  # fmt: skip
    fetched = ModelImport.objects.create(
        id=1000 + number, source=f"hf://org/model-{number}@main", actor="operator", created_at=NOW, due_at=NOW,
        files_total=2, files_done=1, bytes_total=3 * 2**30, bytes_done=2**30, bytes_per_s=2**27, license="apache-2.0",
    )  # fmt: skip
    ImportFile.objects.create(model_import=fetched, path="config.json", size=2**30, blob=40 * "0", stored=64 * "a")
    ImportFile.objects.create(model_import=fetched, path="model.safetensors", size=2**31, sha256=64 * "b")
    benchmark = Benchmark.objects.create(
        id=1000 + number, version=version, deployment=f"deployment-{number}", region=region.name, state="failed",
        reason="no cell", workload="1000+150", slo="ttft=1000,itl=60", actor="ada", created_at=NOW,
        ended_at=NOW,
    )  # fmt: skip
    figures = {"tokens_per_s": 1200.0, "tokens_per_s_per_user": 25.0, "ttft_p99_ms": 410.0, "itl_p99_ms": 39.0}
    BenchmarkPoint.objects.create(
        benchmark=benchmark, number=1, rate=8, verdict="held", reason="all inside", figures=figures, histograms={},
        measured_at=NOW,
    )  # fmt: skip
    deployment = Deployment.objects.create(
        name=f"deployment-{number}",
        model_version=version,
        instance_types=[kind.name],
        created_at=NOW,
        team=f"team-{number}",
    )
    granted = {"cells_granted": 1, "granted_at": NOW, "grant_rule": "priority", "grant_reason": "others go before"}
    place = DeploymentRegion.objects.create(
        deployment=deployment, region=region, cells=2, cells_min=1, cells_max=9, prefill=1, decode=1, **granted
    )
    RoleState.objects.create(
        place=place, mixed=0, prefill=1, decode=1, rule="demand", reason="long prompts", acting=False, looked_at=NOW
    )
    Quota.objects.create(
        name=f"team-{number}:{kind.name}", team=f"team-{number}", instance_type=kind, machines=2, changed_at=NOW
    )
    found = {"wanted": 3, "rule": "queue", "reason": "many wait"}
    load = {"in_flight": 7.0, "queued": 2.0, "per_cell": 4.0}
    ScalingState.objects.create(place=place, acting=False, load=load, looked_at=NOW, **found)
    ScalingDecision.objects.create(
        deployment=deployment, region=region, was=2, acted=False, at=NOW, observed_s=60.0, **found
    )
    cell = _cell(number, deployment, version)
    _spares(number)
    _cloud(region)
    ApplicationCertificate.objects.create(
        name=f"certificate-{number}",
        region=region,
        chain="",
        sealed_secret="",
        names=[f"{number}.example"],
        issuer="CN=an authority",
        key_kind="EC P-256",
        fingerprint=f"{number:064x}",
        digest=f"{number:064x}",
        not_before=NOW,
        not_after=NOW + timedelta(days=90),
        actor="ada",
        created_at=NOW,
        changed_at=NOW,
    )
    AgentRelease.objects.create(id=f"{number:016x}", version="0.1.0", protocol=2, is_current=not number, created_at=NOW)
    rows.machine(
        f"m-{number:08x}",
        where=region.name,
        provider="local",
        runs=f"n-{number:08x}",
        state="taken",
        invitation=invitation,
    )
    _incidents(cell)
    Rollout.objects.create(
        deployment=deployment,
        from_version=version,
        to_version=version,
        reason="started",
        region_order=[region.name],
        policy=policy_as_json(UpdatePolicy()),
        actor="ada",
        created_at=NOW,
        state_since=NOW,
    )
    event_record(
        kind="cell.ready",
        message=f"Cell {cell.pk} is ready",
        now=NOW,
        region=cell.region_id,
        deployment=deployment.pk,
        cell=cell.pk,
        node=cell.members.all()[0].node_id,
    )
    _recorded(cell)
    _traffic(number, cell)
    _requests(number, cell)
    return cell


def _recorded(cell: Cell) -> None:
    """A round that started the cell, and one of its rollout."""
    node, deployment = cell.members.all()[0].node_id, f"deployment:{cell.deployment_id}"
    rollout = Rollout.objects.get(deployment=cell.deployment_id).pk
    for subjects in ([f"cell:{cell.pk}", f"node:{node}", deployment], [f"rollout:{rollout}", deployment]):
        reason = {
            "decision": "StartCell", "planner": "plan_reconcile", "rule": "reconcile", "reason": "placed on n-0",
            "subjects": subjects, "inputs": {"spares": 3, "in_state_s": 2.5}, "limits": {"restart_backoff_s": 2.0},
        }  # fmt: skip
        row = RecordedRound.objects.create(
            at=NOW, planner="plan_reconcile", decided=1, reasons=[reason], schema="s", release="1"
        )
        RoundSubject.objects.bulk_create(RoundSubject(round=row, subject=subject) for subject in subjects)
    event_record(kind="node.ready", message=f"Node {node} is ready", now=NOW, node=node)


def validated(version: ModelVersion) -> Validation:
    """What a validation leaves behind."""
    kinds = [{"instance_type": "local.cpu", "problem": ""}]
    event_record(kind="version.released", message="released", now=NOW, detail={"version": version.reference})
    return Validation.objects.create(
        version=version,
        version_revision=1,
        state="passed",
        reason="it names no artifact",
        actor="ada",
        evidence={"artifacts": [], "instance_types": kinds, "golden_prompts": 1, "golden_waiver": ""},
        started_at=NOW,
        seen_at=NOW,
        ended_at=NOW,
    )


def _cell(number: int, deployment: Deployment, version: ModelVersion) -> Cell:
    region = f"region-{number}"
    report = {"load": LOAD, "telemetry": {"checks": CHECKS}}
    nodes = [
        rows.node(f"n-{number:06x}{rank:02x}", where=region, fingerprint={"sim.engine": "sim 1"}, report=report)
        for rank in range(2)
    ]
    return rows.cell(
        f"deployment-{number}-{region}-1",
        *nodes,
        deployment=deployment,
        region=rows.region(region),
        model_version=version,
        state=STATES[number % len(STATES)],
        reason="because the test says so",
    )


def _spares(number: int) -> None:
    rows.node(f"n-{number:06x}aa", where=f"region-{number}", cordoned=True)
    rows.node(f"n-{number:06x}bb", where=f"region-{number}", state="joining", topology=[])


def _cloud(region: Region) -> None:
    CloudRegion.objects.create(
        region=region, aws_region="us-east-1", stack="a-stack", state="ready", read_at=NOW, listed_at=NOW,
        silent_zones=["us-east-1b"], suspects={"a/resources": {"vol-1": NOW.isoformat()}},
    )  # fmt: skip
    event_record(kind="region.ready", message=f"region {region.pk} was read", now=NOW, region=region.pk)
    markets = ({"market": "on_demand", "enabled": False}, {"market": "spot", "declared_by": "ada", "max_price": 9.5})
    for position, columns in enumerate(markets):
        CapacityPool.objects.create(
            region=region, instance_type_id="local.cpu", position=position, zone="us-east-1a", zone_id="use1-az1",
            subnet="subnet-1", image="ami-1", **columns,
        )  # fmt: skip
    ImageMove.objects.create(
        region=region, instance_type_id="local.cpu", image="ami-2", state="canary", reason="the first unit boots",
        asked_by="ada", asked_at=NOW,
    )  # fmt: skip


def _incidents(cell: Cell) -> None:
    where = {"region": cell.region_id, "cell": cell.pk, "node": cell.members.all()[1].node_id}
    Incident.objects.create(
        kind="node-lost", subject=cell.pk, summary=f"A node of {cell.pk} is lost", opened_at=NOW, **where
    )
    Incident.objects.create(
        kind="cell-failed", subject=cell.pk, summary="Healed", state="closed", opened_at=NOW, closed_at=NOW, **where
    )


def _traffic(number: int, cell: Cell) -> None:
    ingress = Ingress.objects.create(
        id=f"i-{number}", region_id=cell.region_id, address="127.0.0.1", port=8080 + number, created_at=NOW
    )
    IngressReport.objects.create(
        ingress=ingress, connected=True, last_seen_at=NOW, revision=1, cells={cell.pk: "up", "gone": "down"}
    )
    pool = {"name": cell.deployment_id, "cells": [{"cell": cell.pk, "drain": True}]}
    for revision in (1, 2):
        RoutingTable.objects.create(
            region_id=cell.region_id,
            revision=revision,
            body={"pools": [pool]},
            reason="a cell is ready",
            created_at=NOW,
        )
    StreamHour.objects.create(
        deployment_id=cell.deployment_id,
        region_id=cell.region_id,
        at=clock.now().replace(minute=0, second=0, microsecond=0),
        counts={"relayed_total": 40, "continued_total": {"engine_died": 2}, "pauses": {"3": 2}},
    )
    _steering(cell)
    _key(number)


def _key(number: int) -> None:
    prefix, tenant = f"0a{number:06x}", f"tenant-{number}"
    TenantWebhook.objects.create(tenant="acme", url=f"https://app-{number}.example", actor="admin", created_at=NOW)
    for use, target in (("callback", f"app-{number}.example"), ("read", f"s3://bucket-{number}")):
        TenantGrant.objects.create(tenant="acme", use=use, target=target, actor="admin", created_at=NOW)
    ApplicationKey.objects.create(
        prefix=prefix,
        digest=f"{number:064x}",
        name="search",
        tenant=tenant,
        created_by="ada",
        created_at=NOW,
        last_used_at=NOW,
        requests_per_min=60,
    )
    hour = clock.now().replace(minute=0, second=0, microsecond=0)  # pages show the last days
    UsageHour.objects.create(tenant=tenant, key=prefix, hour=hour, arrived=7)
    batch = Batch.objects.create(
        id=f"batch_{number:032x}",
        tenant=tenant,
        region=Region.objects.earliest("name"),
        endpoint="/v1/chat/completions",
        lines_by_model={"sim-70b": 400},
        input_file_id=f"file-{number:032x}",
        window="24h",
        state="in_progress",
        lines=400,
        created_at=NOW,
        in_progress_at=NOW,
        expires_at=NOW,
    )
    BatchRange.objects.create(batch=batch, number=0, start=0, end=1, lines=400, completed=100, failed=3)
    queue = RequestQueue.objects.create(
        url=f"kafka://broker.example:9092/requests-{number}", kind="kafka", name=f"requests-{number}",
        key=ApplicationKey.objects.get(prefix=prefix), actor="ada", created_at=NOW, state="reading", read_at=NOW,
        waiting=3,
    )  # fmt: skip
    AsyncRequest.objects.create(
        tenant=tenant, key=prefix, region=batch.region, path="/v1/chat/completions", model=f"model-{number}",
        serving_class="near_realtime", digest="5e" * 32, due_at=NOW, deadline_at=NOW, created_at=NOW, results_to=queue,
    )  # fmt: skip
    schedule = BatchSchedule.objects.create(
        name=f"schedule-{number}",
        key=ApplicationKey.objects.get(prefix=prefix),
        cron="30 2 * * *",
        input="s3://acme-batches/in/{date}.jsonl",
        actor="ada",
        created_at=NOW,
        changed_at=NOW,
        next_at=NOW,
        checked_until=NOW,
    )
    schedule.runs.create(due_at=NOW, batch=batch, state="started", started_at=NOW)
    sink = BatchSink.objects.create(
        name=f"sink-{number}",
        tenant=tenant,
        kind="valkey",
        url="valkeys://answers.example:6379/0",
        key_template="answers:{custom_id}",
        actor="ada",
        created_at=NOW,
        changed_at=NOW,
    )
    sink.deliveries.create(batch=batch, due_at=NOW, state="failed", reason="it does not answer", lines=40)
    BatchTimeline.objects.create(batch=batch, completed=[0, 40, None, 100], failed=[0, 1, None, 3])
    StoredResponse.objects.create(
        tenant=tenant, key=prefix, model="m", state="completed", input=b"[]", response=b"{}", bytes=4, created_at=NOW,
        ended_at=NOW,
    )  # fmt: skip
    UsageHour.objects.create(
        tenant=tenant,
        key=prefix,
        deployment="deployment-0",
        serving_class="realtime",
        hour=hour,
        requests=7,
        completion_tokens=9,
        charged=Decimal("1.25"),
        machine_cost=Decimal("0.5"),
    )
    kind = {"deployment": "deployment-0", "version": "model-0@1", "region": "region-0", "instance_type": "local.cpu"}
    CostShare.objects.create(
        **kind, tenant=tenant, key=prefix, serving_class="realtime", hour=hour, completion_tokens=9, cost=Decimal("0.5")
    )
    Budget.objects.create(deployment=f"deployment-{number}", unit="usd", limit=9, actor="a", changed_at=NOW)
    Rate.objects.create(
        kind="machine_price", subject=f"kind-{number}", value=2, valid_from=NOW, actor="a", created_at=NOW
    )
    CellHour.objects.create(
        deployment=f"deployment-{number}",
        instance_type="local.cpu",
        hour=hour,
        machine_ms=3_600_000,
        busy_ms=900_000,
        cost=Decimal(2),
        idle=Decimal("1.5"),
        settled=True,
    )
    Rate.objects.create(
        kind="prompt_price", subject=f"deployment-{number}", value=1, valid_from=NOW, actor="ada", created_at=NOW
    )
    Budget.objects.create(tenant=tenant, unit="usd", limit=2, hard_stop=True, actor="ada", changed_at=NOW)
    UsageMonth.objects.create(tenant=tenant, month=clock.now().date().replace(day=1), tokens=9, charged=Decimal("1.25"))


def _requests(number: int, cell: Cell) -> None:
    place = {"cell": cell.pk, "deployment": cell.deployment_id, "region": cell.region_id, "generation": 1}
    for kind, status in (("uniform", 200), ("slow", 200), ("error", 500)):
        RequestSample.objects.create(
            request=f"{kind}-{number}", kind=kind, status=status, at=clock.now(), key=f"0a{number:06x}",
            tenant=f"tenant-{number}", first_ms=80.0, total_ms=900.0, **place,
        )  # fmt: skip


def _steering(cell: Cell) -> None:
    shares = {cell.region_id: {cell.region_id: 0.7, "elsewhere": 0.3}}
    seen = {"demand": 12.0, "load": 8.4, "capacity": 16.0, "capacity_now": 16.0}
    TrafficMatrix.objects.create(
        deployment_id=cell.deployment_id,
        shares=shares,
        revision=1,
        moved_at=NOW,
        held="no fresh report",
        held_since=NOW,
        figures={"regions": {cell.region_id: seen}, "unplaced": {cell.region_id: 2.0}},
    )
    slots = {name: [2.0] * 96 for name in ("p50", "p90", "p99")}
    series = {"deployment_id": cell.deployment_id, "origin_id": cell.region_id, "serving_class": "realtime"}
    DemandForecast.objects.create(**series, made_at=NOW, slot_s=900, methods=["blend"] * 96, **slots)
    entry = Entry.objects.create(name=f"{cell.pk}.example.com")
    EntryRevision.objects.create(
        entry=entry, revision=1, token=f"{cell.pk:0>32}", weights={"region-0": 255}, records=[], state="in_force",
        reason="the first weights", at=NOW,
    )  # fmt: skip
    TrafficShift.objects.create(
        deployment_id=cell.deployment_id, revision=1, kind="relief", shares=shares, moved=0.3, reason="r", at=NOW
    )
    TrafficOverride.objects.create(
        kind="evacuation", mode="drill", region_id=cell.region_id, why="w", actor="ada", created_at=NOW,
        expires_at=NOW.replace(year=NOW.year + 50),
    )  # fmt: skip
