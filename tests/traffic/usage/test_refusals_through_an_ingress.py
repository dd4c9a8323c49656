"""Metrics, charts, error budgets, usage and the dashboard count the failures that HAProxy's clients saw."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from asgiref.sync import sync_to_async
from django.db import connections
from django.db.models import Sum

from controlplane.observability.fleet import FleetGauges
from engine_agent.ingress.settings import QUEUES
from engine_agent.node.telemetry.exposition import agent_exposition
from engine_agent.protocol.states import ServingClass
from fleet.load.pages import load_charts
from fleet.load.planner import FINE_S
from fleet.load.selectors import seen_in_windows
from fleet.load.services import load_sample
from kernel.time_ranges import last
from tests.engine_agent.fake_control_plane import eventually
from tests.engine_agent.ingress.cells import FakeCell
from tests.engine_agent.ingress.ingresses import RunningIngress, pool
from tests.engine_agent.ingress.keyed import keyed
from tests.fleet import rows
from tests.fleet.rows import NOW
from traffic.routing.models import Ingress
from traffic.routing.services.ingresses import IngressRow, ingress_reports_store
from traffic.usage.models import UsageHour
from traffic.usage.services.counting import usage_count

pytestmark = [pytest.mark.processes, pytest.mark.django_db(transaction=True), pytest.mark.asyncio]
BODY = b'{"model": "sim-70b"}'
KEY = keyed()
T = TypeVar("T")


async def in_database(work: Callable[[], T]) -> T:
    return await sync_to_async(work, thread_sensitive=True)()


async def test_the_sum_of_5xx_that_clients_saw_is_what_every_place_counts(tmp_path: Path) -> None:
    ingress = RunningIngress(tmp_path / "home", ingress_id="i-us-east-1")
    queue = replace(QUEUES[ServingClass.REALTIME], wait_s=1, waiting_per_cell=1)
    times = replace(ingress.settings.times, silence_s=1)
    ingress.use(replace(ingress.settings, queues={**QUEUES, ServingClass.REALTIME: queue}, times=times))
    async with ingress.running(), FakeCell(max_connections=1).running() as cell:
        no_cells = pool(name="sim-70b", models=("sim-70b",))
        await ingress.route(no_cells, keys=(KEY.entry,))
        answers = [await ingress.post(BODY), await ingress.post(BODY, **KEY.headers), await ingress.post(b"{")]
        answers.append(await ingress.post(b'{"model": "sim-70b", "prompt": "%s"}' % (b"x" * 300_000)))
        await ingress.route(pool(cell, name="sim-70b", models=("sim-70b",)), keys=(KEY.entry,))
        await ingress.sees(**{cell.name: "up"})
        cell.release.clear()
        answers += await asyncio.gather(*(ingress.post(BODY) for _ in range(5)))
        cell.release.set()
        seen = sum(answer.status_code >= 500 for answer in answers)
        assert seen >= 4

        def reported() -> int:
            refusals = ingress.reports[-1].telemetry.refusals
            return sum(refusals.codes.get("sim-70b", {}).values()) if refusals else 0

        await eventually(lambda: reported() == seen, what=f"{seen} refused")
        report = ingress.reports[-1]

    def count() -> dict[str, Any]:
        region = rows.region("us-east-1")
        rows.deployment()
        Ingress.objects.create(id="i-us-east-1", region=region, address="127.0.0.1", port=8080, created_at=NOW)
        load_sample(now=NOW)
        telemetry = msgspec.to_builtins(report.telemetry)
        stored = IngressRow("i-us-east-1", "k", True, NOW, NOW, telemetry=telemetry)
        ingress_reports_store([stored, stored])
        now = NOW + timedelta(seconds=FINE_S)
        load_sample(now=now)
        usage_count(now=now)
        chart = load_charts("deployment:sim-70b", span=last("1h", now), now=now, markers=()).charts[0]
        errors = next(series for series in chart.series if series.name == "errors")
        gauge = next(each for each in FleetGauges().collect() if each.name == "switchyard_requests_refused")
        return {
            "chart": sum(round(value * FINE_S) for value in errors.values if value),
            "budget": seen_in_windows("deployment:sim-70b", now)[300].errors,
            "region": seen_in_windows("region:us-east-1", now)[300].errors,
            "usage": UsageHour.objects.filter(deployment="sim-70b").aggregate(n=Sum("refused"))["n"],
            "web": sum(sample.value for sample in gauge.samples),
        }

    counted = await in_database(count)
    await in_database(connections.close_all)
    lines = agent_exposition("i-us-east-1", True, report).splitlines()
    refused = [line for line in lines if line.startswith("switchyard_ingress_refused_total{")]
    assert sum(int(float(line.rsplit(" ", 1)[1])) for line in refused) == seen
    assert counted == dict.fromkeys(counted, seen)
