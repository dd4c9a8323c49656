"""Seeds a month of work in a fleet of `seed_scale`: forecasts, plans, drafts, builds, jobs, usage and audit records."""

from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any

DAYS = 30
JOBS = 200
"""Of each kind: imports, benchmarks, batches."""
DRAFTS = 60
AUDITS = 1000
ACCOUNTS = 40
"""Pairs of a key and a deployment with usage in every hour."""
BATCH = 2000


def work_seed(now: datetime) -> None:
    """Needs the deployments and keys of `seed_scale`."""
    _forecasts(now)
    _models(now)
    _jobs(now)
    _usage(now)
    _people(now)


def spread(number: int, of: int, now: datetime) -> datetime:
    """The time of one of so many rows that are spread evenly over the month, newest last."""
    return now - timedelta(days=DAYS) * (1 - (number + 1) / (of + 1))


def _forecasts(now: datetime) -> None:
    from fleet.capacity.models import DayPlan, DayPlanPlace
    from fleet.capacity.planning.forecast_series import LEADS
    from fleet.deployments.models import DeploymentRegion
    from traffic.demand.models import DemandDay, DemandForecast, ForecastRecord
    from traffic.region_shares.models import RegionLoss

    made = now.replace(minute=now.minute // 15 * 15, second=0, microsecond=0)
    places = list(DeploymentRegion.objects.all())
    slots: dict[str, list[Any]] = {name: [30.0 + n % 50 for n in range(96)] for name in ("p50", "p90", "p99")}
    slots["methods"] = ["blend"] * 96
    series = DemandForecast.objects.bulk_create(
        DemandForecast(
            deployment_id=place.deployment_id,
            origin_id=place.region_id,
            serving_class="realtime",
            made_at=made,
            slot_s=900,
            is_judged=True,
            **slots,
        )
        for place in places
    )
    said = {"blend": [30.0] * len(LEADS)}
    ForecastRecord.objects.bulk_create(
        ForecastRecord(series=each, made_at=made - timedelta(minutes=30 * back), p50=said, p90=said)
        for each in series
        for back in range(48)
    )
    DemandDay.objects.bulk_create(
        DemandDay(
            deployment_id=place.deployment_id,
            origin_id=place.region_id,
            serving_class="realtime",
            day=(now - timedelta(days=back)).date(),
            loads=[20.0 + n % 40 for n in range(288)],
        )
        for place in places
        for back in range(28)
    )
    plan = DayPlan.objects.create(
        at=made, made_at=made, slot_s=900, solver="exact", took_s=2.0, shifts=3, dollars=[400.0] * 96
    )
    DayPlanPlace.objects.bulk_create(
        DayPlanPlace(
            plan=plan,
            deployment_id=place.deployment_id,
            region_id=place.region_id,
            cells=[place.cells] * 96,
            by_type={"local.cpu": [place.cells] * 96},
            expected=[30.0] * 96,
            cover=[40.0] * 96,
            budget=[5.0] * 96,
            due=[0.0] * 96,
            start_up_s=12.0,
        )
        for place in places
    )
    RegionLoss.objects.bulk_create(
        RegionLoss(region_id=name, made_at=now, deployments=10, is_judged=True)
        for name in sorted({place.region_id for place in places})
    )


def _models(now: datetime) -> None:
    from fleet.deployments.models import DeploymentRegion
    from fleet.drafts.models import PlanDraft
    from models_registry.builds.models import EngineBuild
    from models_registry.versions.models import Model

    wanted = [
        {
            "apiVersion": "switchyard/v1",
            "kind": "Deployment",
            "metadata": {"name": place.deployment_id},
            "spec": {"regions": [{"region": place.region_id, "cells": place.cells + 1}]},
        }
        for place in DeploymentRegion.objects.order_by("deployment_id", "region_id").distinct("deployment_id")
    ]
    PlanDraft.objects.bulk_create(
        PlanDraft(
            key=f"draft-{number}",
            owner=f"user-{number % 20}",
            name=f"More cells {number}",
            documents=wanted,
            changed_at=spread(number, DRAFTS, now),
        )
        for number in range(DRAFTS)
    )
    EngineBuild.objects.bulk_create(
        EngineBuild(
            name=f"build-{number}",
            uri=f"s3://builds/{number}",
            digest=f"sha256:{number}",
            serves="vllm",
            version="1",
            platform="cpu",
            program="bin/python",
            python="3.11.7",
            cpu_arch="x86_64",
            least_glibc="2.17",
            packed_bytes=2**30,
            unpacked_bytes=2**31,
            parts=41,
            actor="ada",
            created_at=now,
        )
        for number in range(40)
    )
    Model.objects.bulk_create(Model(name=f"other-{number:03d}", created_at=now) for number in range(100))


def _jobs(now: datetime) -> None:
    from models_registry.benchmarks.models import Benchmark, BenchmarkPoint
    from models_registry.imports.models import ImportFile, ModelImport
    from models_registry.versions.models import ModelVersion
    from traffic.batches.models import Batch, BatchRange, BatchTimeline

    version = ModelVersion.objects.order_by("pk")[0]
    imports = ModelImport.objects.bulk_create(
        ModelImport(
            source=f"hf://org/model-{number}@main",
            state="failed",
            reason="the hub did not answer",
            actor="ada",
            files_total=12,
            files_done=6,
            bytes_total=12 * 2**30,
            bytes_done=6 * 2**30,
            created_at=(at := spread(number, JOBS, now)),
            due_at=at,
            ended_at=at + timedelta(hours=1),
        )
        for number in range(JOBS)
    )
    ImportFile.objects.bulk_create(
        ImportFile(model_import=each, path=f"model-{file:02d}.safetensors", size=2**30, sha256=64 * "b")
        for each in imports
        for file in range(12)
    )
    benchmarks = Benchmark.objects.bulk_create(
        Benchmark(
            version=version,
            deployment="deployment-01",
            region="region-00",
            state="failed",
            reason="no cell",
            workload="1000+150",
            slo="ttft=1000,itl=60",
            actor="ada",
            created_at=(at := spread(number, JOBS, now)),
            ended_at=at + timedelta(minutes=20),
        )
        for number in range(JOBS)
    )
    figures = {"tokens_per_s": 1200.0, "tokens_per_s_per_user": 25.0, "ttft_p99_ms": 410.0, "itl_p99_ms": 39.0}
    BenchmarkPoint.objects.bulk_create(
        BenchmarkPoint(
            benchmark=each,
            number=number,
            rate=2.0**number,
            verdict="held",
            reason="all inside",
            figures=figures,
            histograms={},
            measured_at=each.created_at,
        )
        for each in benchmarks
        for number in range(8)
    )
    batches = Batch.objects.bulk_create(
        Batch(
            id=f"batch_{number:032x}",
            tenant=f"tenant-{number % 100:02d}",
            region_id="region-00",
            endpoint="/v1/chat/completions",
            lines_by_model={"deployment-01": 40_000},
            input_file_id=f"file-{number:032x}",
            window="24h",
            state="in_progress" if number >= JOBS - 10 else "completed",
            lines=40_000,
            created_at=(at := spread(number, JOBS, now)),
            in_progress_at=at,
            expires_at=now + timedelta(hours=8),
        )
        for number in range(JOBS)
    )
    BatchRange.objects.bulk_create(
        BatchRange(batch=each, number=number, start=number, end=number + 1, lines=400, completed=100, failed=3)
        for each in batches[-10:]
        for number in range(100)
    )
    BatchTimeline.objects.bulk_create(
        BatchTimeline(batch=each, completed=[100 * n for n in range(240)], failed=list(range(240))) for each in batches
    )


def _usage(now: datetime) -> None:
    from traffic.keys.models import ApplicationKey
    from traffic.usage.models import Budget, CellHour, CostShare, UsageHour, UsageMonth
    from traffic.usage.services.day_sums import days_sum

    last = now.replace(minute=0, second=0, microsecond=0)
    hours = [last - timedelta(hours=back) for back in range(24 * DAYS)]
    keys = list(ApplicationKey.objects.order_by("prefix")[:ACCOUNTS])
    accounts = [
        {"tenant": key.tenant, "key": key.prefix, "deployment": f"deployment-{number % 10:02d}"}
        for number, key in enumerate(keys)
    ]
    tokens = {"serving_class": "realtime", "prompt_tokens": 900_000, "completion_tokens": 90_000}
    UsageHour.objects.bulk_create(
        (
            UsageHour(**account, **tokens, hour=hour, requests=900, charged=Decimal("1.5"), machine_cost=Decimal(1))
            for account in accounts
            for hour in hours
        ),
        batch_size=BATCH,
    )
    kind = {"version": "model-00@1", "instance_type": "local.cpu"}
    CellHour.objects.bulk_create(
        (
            CellHour(
                **kind,
                deployment=f"deployment-{deployment:02d}",
                region=f"region-{region:02d}",
                hour=hour,
                machine_ms=90_000_000,
                busy_ms=30_000_000,
                cost=Decimal(50),
                idle=Decimal(20),
                settled=True,
            )
            for deployment in range(10)
            for region in range(10)
            for hour in hours[::4]
        ),
        batch_size=BATCH,
    )
    CostShare.objects.bulk_create(
        (
            CostShare(**kind, **account, **tokens, region="region-00", hour=hour, cost=Decimal(1))
            for account in accounts
            for hour in hours
        ),
        batch_size=BATCH,
    )
    days_sum(now=now)
    month = {"tokens": 10**9, "charged": Decimal(900), "month": date(now.year, now.month, 1)}
    UsageMonth.objects.bulk_create(UsageMonth(tenant=f"tenant-{n:02d}", **month) for n in range(100))
    Budget.objects.bulk_create(
        Budget(tenant=f"tenant-{n:02d}", unit="usd", limit=1000, actor="ada", changed_at=now) for n in range(ACCOUNTS)
    )


def _people(now: datetime) -> None:
    from django.contrib.auth.models import User

    from audit.models import Proof
    from audit.services import Act, Actor, audit_record

    User.objects.bulk_create(User(username=f"person-{number}") for number in range(200))
    for number in range(AUDITS):
        act = Act("node.cordon", object=f"node/n-{number:08x}", changes={"asked": {"why": "fan"}})
        at = spread(number, AUDITS, now)
        audit_record(actor=Actor(f"person-{number % 200}", Proof.SESSION, "127.0.0.1"), act=act, now=at)
