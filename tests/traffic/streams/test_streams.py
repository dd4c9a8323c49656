"""Streams that ingresses report: each counts once, and the page of a deployment shows what became of them."""

from datetime import timedelta
from typing import Any

import pytest

from fleet.deployments.models import Deployment
from kernel import clock
from tests.controlplane.dashboard.clients import fragment, signed_in
from tests.fleet import rows
from tests.fleet.rows import NOW
from traffic.routing.models import Ingress
from traffic.routing.services.ingresses import IngressRow, ingress_create, ingress_remove, ingress_reports_store
from traffic.streams.models import StreamHour, StreamTotal
from traffic.streams.pages import streams_of
from traffic.streams.services import HOURS_KEPT, streams_trim

pytestmark = pytest.mark.django_db
HOUR = timedelta(hours=1)


@pytest.fixture(autouse=True)
def deployment() -> Deployment:
    rows.cell("c1", rows.node("n-1"))
    ingress_create(region=rows.region("us-east-1"), address="127.0.0.1", port=8080, now=NOW)
    return Deployment.objects.get()


def reports(pools: Any, *, since: str = "a", at: Any = NOW) -> None:
    telemetry = {"streams": {"since": since, "pools": pools}}
    ingress_reports_store([IngressRow("i-us-east-1", "k", True, NOW, at, telemetry=telemetry)])


def counted(relayed: int, continued: int = 0, cut: int = 0) -> dict[str, Any]:
    counts: dict[str, Any] = {"relayed_total": relayed, "pauses": {"80": continued}}
    return {**counts, "continued_total": {"engine_died": continued}, "cut_total": {"no_cell": cut}}


def test_each_stream_counts_once_in_its_hour() -> None:
    reports({"sim-70b": counted(10, 2)})
    reports({"sim-70b": counted(10, 2)})
    reports({"sim-70b": counted(15, 3, 1)}, at=NOW + HOUR)
    reports({"sim-70b": counted(4)}, since="b", at=NOW + HOUR)
    seen = streams_of("sim-70b", NOW + HOUR)
    assert (seen.counts.relayed_total, seen.continued, seen.cut) == (19, 3, 1)
    assert [(row.name, row.reason, row.count) for row in seen.outcomes] == [
        ("continued", "their engine died", 3), ("cut", "no cell", 1),
    ]  # fmt: skip
    assert seen.pause_p50_ms == seen.pause_p99_ms == pytest.approx(98, abs=10)
    moved = seen.charts[0].series[0].values
    assert (len(moved), list(moved[-2:])) == (24, [2.0, 1.0])
    assert streams_of("sim-70b", NOW + 40 * HOUR).counts.relayed_total == 0
    streams_trim(now=NOW + HOURS_KEPT + 2 * HOUR)
    assert not StreamHour.objects.exists()


def test_unknown_deployments_and_nonsense_count_nothing() -> None:
    wrong: list[Any] = [
        [], {"sim-70b": 3}, {"invented": counted(1)}, {"sim-70b": {"relayed_total": -1}},
        {"sim-70b": {"relayed_total": 2**80}},
        {"sim-70b": {"cut_total": {"<b>": 1}}}, {"sim-70b": {"pauses": {"9999": 1}}},
        {"sim-70b": {"cut_total": {"a" * n: 1 for n in range(1, 40)}}},
    ]  # fmt: skip
    for pools in wrong:
        reports(pools)
    assert not StreamHour.objects.exists()
    for since in "abc":
        reports({"sim-70b": {"relayed_total": 2**53}}, since=since)
    assert streams_of("sim-70b", NOW).counts.relayed_total == 2**53


def test_an_ingress_that_is_gone_is_forgotten() -> None:
    reports({"sim-70b": counted(3)})
    ingress_remove(Ingress.objects.get(), "gone", NOW)
    assert not StreamTotal.objects.exists()
    assert StreamHour.objects.exists()


def test_the_page_of_a_deployment_shows_them() -> None:
    place = ("/deployments/sim-70b/", "deployment-streams")
    assert "Streams end with their cell" in fragment(signed_in(), *place)
    reports({"sim-70b": {**counted(10, 2, 1), "unable_total": {"several_answers": 4}}}, at=clock.now())
    text = fragment(signed_in(), *place)
    for shown in ("their engine died", "no cell", "several answers", "Pause p99", "Now off"):
        assert shown in text
