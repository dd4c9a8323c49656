"""The number of queries of a list does not grow with its rows."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Group, User
from django.contrib.postgres.fields import ArrayField
from django.db import connection
from django.db.models import (
    AutoField,
    BooleanField,
    CharField,
    DateTimeField,
    DecimalField,
    Field,
    FloatField,
    ForeignKey,
    IntegerField,
    JSONField,
    TextField,
)
from django.test.utils import CaptureQueriesContext
from pytest_django import DjangoDbBlocker

from accounts.models import Grant, GroupRole, LoginSession, ServiceAccount
from accounts.services.token import token_create
from audit.models import Proof
from audit.services import Act, Actor, audit_record
from controlplane.api.urls import router
from fleet.agents.models import ApplicationCertificate
from fleet.autoscaling.models import ScalingDecision, ScalingState
from fleet.clouds.models import CapacityPool
from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.deployments.planner import UpdatePolicy, policy_as_json
from fleet.drafts.models import PlanDraft
from fleet.machines.services.machines import invitation_create
from fleet.regions.models import Region
from fleet.releases.models import AgentMove, AgentRelease, AgentRollout
from fleet.rollouts.models import Rollout
from kernel import clock
from models_registry.benchmarks.models import (
    Benchmark,
    BenchmarkPoint,
    ConfigurationSearch,
    SearchCandidate,
    SearchTrial,
)
from models_registry.instance_types.models import InstanceType
from models_registry.versions.models import Model, ModelVersion
from tests.controlplane.api.client import DescribedClient, bearer, lists
from tests.fleet import rows
from tests.fleet.rows import NOW
from tests.rows_of_a_file import rows_of_a_file
from traffic.async_requests.models import RefusedMessage, RequestQueue
from traffic.batch_schedules.models import BatchSchedule
from traffic.batch_sinks.models import BatchSink
from traffic.batches.models import Batch, BatchRange
from traffic.entry.models import Entry, EntryRevision
from traffic.keys.models import ApplicationKey
from traffic.keys.services import key_create
from traffic.region_shares.models import TrafficMatrix, TrafficOverride, TrafficRule, TrafficShift
from traffic.responses.models import StoredResponse
from traffic.routing.models import Ingress, IngressReport, RoutingTable
from traffic.usage.models import Budget, CellHour, CostShare, UsageHour

pytestmark = pytest.mark.django_db

LATER = datetime(2100, 1, 1, tzinfo=UTC)


def one_more_rollout_of_agents(number: int) -> None:
    release = AgentRelease.objects.create(id=f"{number:016x}", version="1", protocol=2, created_at=NOW)
    upgrade = AgentRollout.objects.create(
        source=release, target=release, state="succeeded", soak_s=1, actor="a", created_at=NOW, ring_since=NOW
    )
    AgentMove.objects.create(agent=f"n-{number:06x}00", rollout=upgrade, release=release.id)


def one_more_request_queue(number: int) -> None:
    key = ApplicationKey.objects.create(
        prefix=f"bb{number:06x}", digest="d", name="n", tenant="t", created_by="a", created_at=NOW
    )
    columns = {"aws_region": "us-east-1", "account": "1", "name": f"q-{number}", "actor": "a", "created_at": NOW}
    queue = RequestQueue.objects.create(url=f"https://q/{number}", key=key, **columns)
    RefusedMessage.objects.create(queue=queue, message="m", reason="r", at=NOW)


def one_more_entry(number: int, deployment: Deployment) -> None:
    TrafficShift.objects.create(deployment=deployment, revision=1, kind="step", shares={}, moved=0, reason="r", at=NOW)
    entry = Entry.objects.create(name=f"{number}.example.com")
    EntryRevision.objects.create(
        entry=entry, revision=1, token=f"{number:032x}", weights={"region-0": 255}, records=[], state="in_force",
        reason="the first weights", at=NOW,
    )  # fmt: skip


def one_more_batch(region: Region, version: ModelVersion) -> None:
    """With everything that a tenant may own, and a benchmark."""
    times = {"created_at": NOW, "expires_at": NOW}
    batch = Batch.objects.create(
        region=region, endpoint="/v1/embeddings", input_file_id="file-1", window="24h", lines=9, **times
    )
    BatchRange.objects.create(batch=batch, number=0, start=0, end=1, lines=9)
    key = ApplicationKey.objects.latest("id")
    schedule = BatchSchedule.objects.create(
        name=batch.id, key=key, cron="0 0 * * *", input="file-1", actor="a", created_at=NOW, changed_at=NOW,
        checked_until=NOW,
    )  # fmt: skip
    schedule.runs.create(due_at=NOW, batch=batch)
    sink = BatchSink.objects.create(
        name=batch.id, tenant="t", kind="s3", url="s3://bucket/{batch}", actor="a", created_at=NOW, changed_at=NOW
    )
    sink.deliveries.create(batch=batch, due_at=NOW)
    benchmark = Benchmark.objects.create(
        version=version, deployment="d", region="r", workload="10+10", slo="ttft=9,itl=9", actor="a", created_at=NOW
    )
    BenchmarkPoint.objects.create(
        benchmark=benchmark, number=1, rate=1, verdict="held", reason="r", figures={}, histograms={}, measured_at=NOW
    )
    search = ConfigurationSearch.objects.create(
        version=version, deployment=batch.id, region="r", instance_type="k", workload="10+10", slo="ttft=9,itl=9",
        varied={"max_concurrency": [1]}, most_trials=1, most_hours=1, actor="a", created_at=NOW, seen_at=NOW,
    )  # fmt: skip
    candidate = SearchCandidate.objects.create(
        search=search, number=1, choice=[["max_concurrency", 1]], version=version
    )
    SearchTrial.objects.create(candidate=candidate, fidelity=0.25, benchmark=benchmark, score=1, begun_at=NOW)


def one_more_decision(deployment: Deployment, region: Region) -> None:
    for place in ("region-0", region.name):
        ranged = {"cells": 1, "cells_min": 1, "cells_max": 3}
        DeploymentRegion.objects.get_or_create(deployment=deployment, region_id=place, defaults=ranged)
    found = {"wanted": 2, "rule": "min", "reason": "r"}
    ScalingState.objects.create(place=deployment.regions.get(region=region), acting=False, looked_at=NOW, **found)
    ScalingDecision.objects.create(deployment=deployment, region=region, was=1, acted=False, at=NOW, **found)


def one_more_region(number: int) -> tuple[Region, InstanceType]:
    region = rows.region(f"region-{number}")
    kind, _ = InstanceType.objects.get_or_create(name=f"kind-{number}", defaults={"accelerator": "cpu"})
    CapacityPool.objects.create(
        region=region, instance_type=kind, position=0, market="on_demand", zone="a", subnet="s", image="i"
    )
    return region, kind


def one_more_bill(number: int) -> None:
    UsageHour.objects.create(tenant=f"t{number}", key=f"{number}", hour=clock.now())
    StoredResponse.objects.create(
        tenant=f"t{number}", model="m", state="completed", input=b"[]", response=b"{}", bytes=4, created_at=NOW,
        ended_at=NOW,
    )  # fmt: skip
    for whose in ({"tenant": f"t{number}"}, {"deployment": f"d{number}"}):
        Budget.objects.create(**whose, unit="usd", limit=1, actor="a", changed_at=NOW)
    kind = {"deployment": f"d{number}", "version": "m@1", "region": "r", "instance_type": "t", "hour": clock.now()}
    CellHour.objects.create(**kind, machine_ms=1, settled=True)
    CostShare.objects.create(**kind, tenant=f"t{number}")


def one_more_draft(number: int) -> None:
    """Of the caller, because other users' drafts are not listed."""
    columns = {"owner": "operator", "name": f"d{number}", "changed_at": NOW}
    PlanDraft.objects.create(key=f"draft-{number}", **columns)


def one_more_user(number: int) -> None:
    user = User.objects.create(username=f"user-{number}", is_superuser=True)
    program = User.objects.create(username=f"program-{number}")
    group = Group.objects.create(name=f"group-{number}")
    user.groups.add(group)
    program.groups.add(group)
    GroupRole.objects.create(group=group, role="operator")
    Grant.objects.create(user=user, deployment="d", role="operator", created_by="a", created_at=NOW)
    ServiceAccount.objects.create(user=program, created_by="a", created_at=NOW)
    token_create(user=program, name="t", now=NOW)
    LoginSession.objects.create(
        session_key=f"s{number}", user=user, method="password", created_at=NOW, seen_at=NOW, expires_at=LATER
    )


def one_more_fleet(number: int) -> None:
    """A region with a two-node cell, a spare, an ingress, and every object that refers to them."""
    region, kind = one_more_region(number)
    model = Model.objects.create(name=f"model-{number}", created_at=NOW)
    versions = [ModelVersion.objects.create(model=model, version=v, engine="sim", created_at=NOW) for v in ("1", "2")]
    deployment = Deployment.objects.create(
        name=f"deployment-{number}", model_version=versions[0], instance_types=[kind.name], created_at=NOW
    )
    one_more_decision(deployment, region)
    nodes = [rows.node(f"n-{number:06x}{rank:02x}", where=region.name) for rank in range(3)]
    rows.cell(f"cell-{number}", *nodes[:2], deployment=deployment, region=region, model_version=versions[0])
    audit_record(actor=Actor("a", Proof.TOKEN), act=Act(action="a.b"), now=NOW)
    Rollout.objects.create(
        deployment=deployment,
        from_version=versions[0],
        to_version=versions[1],
        reason="r",
        region_order=["region-0", region.name],
        policy=policy_as_json(UpdatePolicy()),
        actor="a",
        created_at=NOW,
        state_since=NOW,
    )
    ingress = Ingress.objects.create(id=f"i-{number}", region=region, address="a", port=1, created_at=NOW)
    IngressReport.objects.create(ingress=ingress, revision=1)
    RoutingTable.objects.create(region=region, revision=1, body={}, reason="r", created_at=NOW)
    key_create(name="k", tenant="t", actor="a", now=NOW)
    pool = rows.region(f"pool-{number}", provider="machines")
    invitation_create(region=pool.name, count=1, expires_in=timedelta(hours=1), actor="a", now=NOW)
    rows.machine(f"m-{number:08x}", where=pool.name, instance_type=kind)
    one_more_rollout_of_agents(number)
    one_more_request_queue(number)
    one_more_batch(region, versions[0])
    one_more_bill(number)
    TrafficRule.objects.create(deployment=deployment, actor="a", changed_at=NOW)
    TrafficMatrix.objects.create(deployment=deployment)
    one_more_entry(number, deployment)
    for order in ("shares", "evacuation"):
        TrafficOverride.objects.create(
            kind=order, deployment=deployment, region=region, why="w", actor="a", created_at=NOW, expires_at=NOW
        )
    ApplicationCertificate.objects.create(
        name=f"certificate-{number}", names=["llm.example.com"], not_before=NOW, not_after=LATER, created_at=NOW,
        changed_at=NOW,
    )  # fmt: skip
    one_more_draft(number)
    one_more_user(number)


def one_more_row(shown: Any, number: int) -> None:
    """Fills each column without default: one of its choices, another row of a foreign key, or a value of its type."""
    text = f"x-{number}"
    values: dict[type[Field[Any, Any]], Any] = {
        ArrayField: [], BooleanField: False, CharField: text, DateTimeField: LATER, DecimalField: 1, FloatField: 1,
        IntegerField: number + 1, JSONField: {}, TextField: text,
    }  # fmt: skip
    columns: dict[str, Any] = {}
    for column in shown.Meta.model._meta.concrete_fields:
        if isinstance(column, ForeignKey):
            columns[column.name] = column.related_model._base_manager.order_by("pk")[number]
        elif choices := list(getattr(shown.fields.get(column.name), "choices", ())):
            columns[column.name] = choices[number % len(choices)]
        elif column.name == "url":
            columns[column.name] = f"https://hooks.example.com/{text}"
        elif not (column.has_default() or column.null or column.blank or isinstance(column, AutoField)):
            columns[column.name] = next(value for kind, value in values.items() if isinstance(column, kind))
    shown.Meta.model(**columns).save()  # which updates the row if all choices of a key are used


def one_more_of_everything(number: int) -> None:
    """Rows that `one_more_fleet` does not create follow from the columns, so that a new table needs no line here."""
    one_more_fleet(number)
    view_sets: list[Any] = [view_set for _, view_set, _ in router.registry]
    classes: list[Any] = [getattr(view_set, "serializer_class", None) for view_set in view_sets]
    shown = {kind.Meta.model._meta.label: kind for kind in classes if hasattr(getattr(kind, "Meta", None), "model")}
    for label in sorted(shown):
        if shown[label].Meta.model._base_manager.count() <= number:
            one_more_row(shown[label](), number)


def queries(client: DescribedClient, path: str) -> tuple[int, list[Any]]:
    with CaptureQueriesContext(connection) as captured:
        results = client.get(path).json()["results"]
    return len(captured), results


@pytest.fixture(scope="module")
def short(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[dict[str, tuple[int, list[Any]]]]:
    """Queries and results of each list with one of everything; afterwards there are six."""
    with rows_of_a_file(django_db_blocker):
        client = bearer()
        one_more_of_everything(0)
        counts = {path: queries(client, path) for path in lists()}
        for number in range(1, 6):
            one_more_of_everything(number)
        yield counts


@pytest.mark.slow
def test_a_longer_list_asks_as_often_as_a_short_one(short: dict[str, tuple[int, list[Any]]]) -> None:
    client = bearer()
    for path, (few, results) in short.items():
        many, more_results = queries(client, path)
        assert len(more_results) > len(results) > 0, path
        assert many == few, path
        assert few <= 5, f"{path}: one for the token, the rest for the list"
