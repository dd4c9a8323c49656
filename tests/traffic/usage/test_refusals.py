"""A request that no cell answered counts once in charts, error budgets, usage and metrics, however it is reported."""

from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db.models import Sum

from controlplane.observability.fleet import FleetGauges
from fleet.deployments.models import Deployment
from fleet.deployments.pages.data import deployment_find
from fleet.load.models import RefusedRequests
from fleet.load.pages import load_charts, slo_of
from fleet.load.planner import FINE_S
from fleet.load.selectors import last_windows, seen_in_windows
from fleet.load.services import load_sample
from fleet.nodes.models import NodeReport
from kernel.time_ranges import last
from kernel.tones import Tone
from tests.fleet import rows
from tests.fleet.rows import NOW
from traffic.keys.services import key_create
from traffic.routing.models import Ingress
from traffic.routing.services.ingresses import IngressRow, ingress_create, ingress_remove, ingress_reports_store
from traffic.usage.models import UsageHour
from traffic.usage.services.counting import usage_count

pytestmark = pytest.mark.django_db

STEP = timedelta(seconds=FINE_S)
SUBJECTS = ("fleet", "region:us-east-1", "deployment:sim-70b", "deployment:sim-70b@us-east-1")


@pytest.fixture(autouse=True)
def deployment() -> Deployment:
    rows.cell("c1", rows.node("n-1"))
    ingress_create(region=rows.region("us-east-1"), address="127.0.0.1", port=8080, now=NOW)
    load_sample(now=NOW)
    return Deployment.objects.get()


def reports(
    codes: dict[str, int], *accounts: dict[str, Any], since: str = "a", name: str = "sim-70b", at: datetime = NOW
) -> None:
    refusals = {"since": since, "codes": {name: codes}, "accounts": [{"deployment": name, **each} for each in accounts]}
    ingress_reports_store(
        [
            IngressRow(
                ingress="i-us-east-1", connection="k", connected=True, changed_at=NOW, seen_at=at,
                telemetry={"refusals": refusals},
            )
        ]
    )  # fmt: skip


def errors_in_charts(now: datetime) -> dict[str, int]:
    return {name: round(point.errors_per_s * FINE_S) for name, point in last_windows(SUBJECTS, now).items()}


def test_an_outage_in_which_no_cell_answers_is_seen_everywhere(deployment: Deployment) -> None:
    key = key_create(name="search", tenant="rufus", actor="ann", now=NOW).key.prefix
    reports(
        {"no_ready_cell": 30, "queue_full": 10}, {"key": key, "total": 25}, {"total": 15, "serving_class": "realtime"}
    )
    load_sample(now=NOW + STEP)
    usage_count(now=NOW + STEP)
    assert errors_in_charts(NOW + STEP) == dict.fromkeys(SUBJECTS, 40)
    rate = load_charts("deployment:sim-70b", span=last("1h", NOW + STEP), now=NOW + STEP, markers=()).charts[0].series
    assert {line.name: max(filter(None, line.values)) for line in rate} == {"requests": 40 / 15, "errors": 40 / 15}
    assert slo_of(deployment, NOW + STEP).burns[0].tone is Tone.BAD
    row = deployment_find(name="sim-70b", now=NOW + STEP)
    assert row is not None
    assert row.errors_percent == 100.0
    used = UsageHour.objects.filter(deployment="sim-70b").values_list("tenant", "key", "serving_class", "refused")
    assert sorted(used) == [("", "", "realtime", 15), ("rufus", key, "", 25)]
    gauge = next(each for each in FleetGauges().collect() if each.name == "switchyard_requests_refused")
    assert [(each.labels, each.value) for each in gauge.samples] == [
        ({"region": "us-east-1", "deployment": "sim-70b"}, 40)
    ]


def test_totals_count_once_and_those_of_a_new_count_from_0() -> None:
    reports({"no_ready_cell": 30}, {"total": 30})
    reports({"no_ready_cell": 30}, {"total": 30})
    reports({"no_ready_cell": 20}, {"total": 20})
    load_sample(now=NOW + STEP)
    reports({"no_ready_cell": 3}, {"total": 3}, since="b")
    reports({"no_ready_cell": 5, "cell_silent": 1}, {"total": 6}, since="b")
    load_sample(now=NOW + 2 * STEP)
    usage_count(now=NOW + STEP)
    assert errors_in_charts(NOW + 2 * STEP) == dict.fromkeys(SUBJECTS, 6)
    assert seen_in_windows("deployment:sim-70b", NOW + 2 * STEP)[300].errors == 36
    assert RefusedRequests.objects.get().total == 36


def test_what_a_cell_handed_back_counts_once_at_the_ingress_if_nothing_better_came() -> None:
    load = {"requests_total": 10, "errors_total": 4, "handed_back_total": 3}
    NodeReport.objects.update(load=load, last_seen_at=NOW + STEP)
    reports({"no_ready_cell": 2})
    load_sample(now=NOW + STEP)
    assert errors_in_charts(NOW + STEP) == dict.fromkeys(SUBJECTS, 1 + 2)
    point = last_windows(["cell:c1"], NOW + STEP)["cell:c1"]
    assert round(point.errors_per_s * FINE_S) == 4, "all failures of the cell are shown"


def test_a_stream_that_continued_is_one_success_and_a_cut_one_is_one_failure() -> None:
    key = key_create(name="search", tenant="rufus", actor="ann", now=NOW).key.prefix
    load = {"requests_total": 12, "errors_total": 5, "passed_on_total": 5, "continued_total": 2}
    NodeReport.objects.update(load=load, last_seen_at=NOW + STEP)
    reports({"stream_cut": 3}, {"key": key, "total": 0, "cut": 3, "serving_class": "realtime"})
    load_sample(now=NOW + STEP)
    usage_count(now=NOW + STEP)
    seen = seen_in_windows("deployment:sim-70b", NOW + STEP)[300]
    assert (seen.requests, seen.errors) == (10, 3)
    point = last_windows(["cell:c1"], NOW + STEP)["cell:c1"]
    assert round(point.errors_per_s * FINE_S) == 5, "the cell shows how often its engine failed"
    row = UsageHour.objects.get(key=key)
    assert (row.tenant, row.refused, row.errors) == ("rufus", 0, 3)
    reports({"stream_cut": 3}, {"key": key, "total": 0, "cut": 3, "serving_class": "realtime"})
    load_sample(now=NOW + 2 * STEP)
    assert seen_in_windows("deployment:sim-70b", NOW + 2 * STEP)[300].errors == 3
    refused = RefusedRequests.objects.get()
    assert (refused.total, refused.cut) == (0, 3)


def test_what_failed_before_its_model_was_known_is_the_regions() -> None:
    reports({"long_bodies_unread": 2}, name="")
    load_sample(now=NOW + STEP)
    assert errors_in_charts(NOW + STEP) == {"fleet": 2, "region:us-east-1": 2}


def test_an_unknown_deployment_and_nonsense_count_nothing() -> None:
    reports({"no_ready_cell": 2}, name="invented")
    reports({"no_ready_cell": -5, "x": 2**80}, {"total": -1}, {"total": 1, "key": "../x"})
    nonsense: list[Any] = [[], {"codes": []}, {"codes": {"sim-70b": [1]}}, {"codes": {}, "accounts": {"a": 1}}]
    ingress_reports_store(
        [IngressRow("i-us-east-1", "k", True, NOW, NOW, telemetry={"refusals": refusals}) for refusals in nonsense]
    )
    load_sample(now=NOW + STEP)
    usage_count(now=NOW + STEP)
    assert not RefusedRequests.objects.exists()
    assert (UsageHour.objects.aggregate(n=Sum("refused"))["n"] or 0) == 0


def test_a_key_that_is_not_known_charges_no_tenant() -> None:
    key_create(name="search", tenant="rufus", actor="ann", now=NOW)
    reports({"no_ready_cell": 2}, {"key": "ffffffff", "total": 2})
    usage_count(now=NOW + STEP)
    assert list(UsageHour.objects.values_list("tenant", "key", "refused")) == [("", "", 2)]


def test_an_ingress_that_is_gone_is_forgotten() -> None:
    reports({"no_ready_cell": 2})
    ingress_remove(Ingress.objects.get(), "gone", NOW)
    assert not RefusedRequests.objects.exists()
