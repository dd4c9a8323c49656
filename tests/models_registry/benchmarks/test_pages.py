"""Pages of benchmarks: the form, one benchmark, the Pareto chart of a use, and comparisons."""

from html import unescape
from urllib.parse import urlencode

import pytest
from django.contrib.auth.models import User
from django.test import Client

from kernel.access import Role
from models_registry.benchmarks.models import Benchmark, BenchmarkPoint
from tests.controlplane.access.callers import granted, make_user
from tests.controlplane.dashboard.clients import fragment, signed_in
from tests.controlplane.dashboard.reading import queries
from tests.fleet import rows
from tests.fleet.rows import NOW
from tests.models_registry.benchmarks.test_benchmark import measured

pytestmark = [pytest.mark.django_db, pytest.mark.slow]

ASKED = {"deployment": "sim-70b", "workload": "1000+150", "slo": "ttft=500,itl=50"}


def _client(user: User) -> Client:
    client = Client()
    client.force_login(user)
    return client


def _cell() -> None:
    rows.cell("sim-70b-us-east-1-1", rows.node("n-a", fingerprint={"kernel": "6", "sim.engine": "1"}))


def test_the_form_predicts_and_starts_what_the_cells_run() -> None:
    _cell()
    client = _client(make_user("oscar", Role.OPERATOR))
    predicted = client.get("/benchmarks/new/", {**ASKED, "rules.min_s": "5"}).text
    assert "Measures 1 cell of sim-70b in us-east-1" in predicted
    assert not Benchmark.objects.exists()
    started = client.post("/benchmarks/new/", {**ASKED, "version": "sim-70b@1", "rules.min_s": "5", "seed": "3"})
    row = Benchmark.objects.get()
    assert started.headers["Location"] == f"/benchmarks/{row.pk}/"
    assert (row.version.reference, row.region, row.rules, row.seed, row.actor, row.beside_traffic) == (
        "sim-70b@1", "us-east-1", {"min_s": 5.0}, 3, "oscar", False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"workload": "<b>many"}, "<b>many"),
        ({"slo": "ttft=1"}, "it must be ttft=MS,itl=MS"),
        ({"region": "mars"}, "no ready cell in mars"),
        ({"version": "sim-70b@9"}, "Unknown model version"),
        ({"rules.min_s": "0"}, "it must be a number from 1 to 600"),
        ({"rules.min_s": "long"}, "it must be a number"),
        ({"seed": "-1"}, "Seed:"),
        ({"deployment": "nope"}, "There is no deployment"),
    ],
)
def test_the_form_names_what_is_wrong_and_keeps_what_was_typed(wrong: dict[str, str], said: str) -> None:
    _cell()
    response = _client(make_user("oscar", Role.OPERATOR)).post("/benchmarks/new/", {**ASKED, "seed": "7", **wrong})
    assert response.status_code == 409
    assert said in unescape(response.text.partition('role="alert">')[2].partition("<")[0])
    assert f'value="{wrong.get("seed", "7")}"' in response.text
    assert "<b>many" not in response.text
    assert not Benchmark.objects.exists()


def test_viewers_cannot_start_or_cancel_and_grants_count() -> None:
    _cell()
    viewer, vera = _client(make_user("vera")), _client(granted("ada", "sim-70b"))
    row = measured(rows.version(), 8, deployment="sim-70b", state="running", ended_at=None)
    assert viewer.post("/benchmarks/new/", ASKED).status_code == 403
    assert viewer.post(f"/benchmarks/{row.pk}/ask/cancel/").status_code == 403
    assert "It needs the operator role on sim-70b." in fragment(viewer, f"/benchmarks/{row.pk}/", "benchmark")
    assert vera.post("/benchmarks/new/", {**ASKED, "version": "sim-70b@1"}).status_code == 302
    assert vera.post(f"/benchmarks/{row.pk}/ask/cancel/").headers["Location"] == f"/benchmarks/{row.pk}/"
    row.refresh_from_db()
    assert (row.state, row.reason) == ("cancelled", "cancelled by ada")
    assert "has ended" in vera.get(f"/benchmarks/{row.pk}/ask/cancel/").text


def test_a_benchmark_shows_its_points_against_the_objective() -> None:
    row = measured(rows.version(), 8)
    BenchmarkPoint.objects.create(
        benchmark=row, number=2, rate=16, verdict="broken", reason="late", figures={"ttft_p99_ms": 812.0},
        histograms={}, measured_at=NOW,
    )  # fmt: skip
    client = signed_in()
    assert f"Benchmark {row.pk} of sim-70b@1" in fragment(client, f"/benchmarks/{row.pk}/", "benchmark")
    points = fragment(client, f"/benchmarks/{row.pk}/", "benchmark-points")
    assert "812" in points
    assert "[null,812.0]" in points.replace("&quot;", '"')
    assert "held (goodput)" in points
    for wrong in ("0", "x", "9" * 30, "²"):
        assert client.get(f"/benchmarks/{wrong}/").status_code == 404


def test_the_list_has_the_chart_of_a_chosen_use() -> None:
    old, new = rows.version("1"), rows.version("2", max_concurrency=8)
    measured(old, 8)
    measured(new, 6)
    measured(new, 3, slo="ttft=9,itl=9")
    newest = fragment(signed_in(), "/benchmarks/", "benchmarks-use")
    assert "1000+150 within ttft=9,itl=9 <span" in newest
    chosen = fragment(
        signed_in(), f"/benchmarks/?{urlencode({'use': '1000+150 within ttft=500,itl=50'})}", "benchmarks-use"
    )
    assert chosen.count("<tr>") == 3
    assert "Best by goodput: sim-70b@1" in chosen


def test_only_benchmarks_of_one_use_are_compared() -> None:
    old, new = rows.version("1"), rows.version("2", max_concurrency=8)
    first, second, other = measured(old, 8), measured(new, 6), measured(new, 3, slo="ttft=9,itl=9")
    client = signed_in()
    alone = fragment(client, f"/benchmarks/compare/?id={first.pk}", "benchmarks-compared")
    assert f"?id={first.pk}&amp;id={second.pk}" in alone
    assert f"id={other.pk}" not in alone
    both = fragment(client, f"/benchmarks/compare/?id={first.pk}&id={second.pk}", "benchmarks-compared")
    assert both.index("sim-70b@1") < both.index("sim-70b@2")
    assert '<td class="number">8.00</td><td class="number">6.00</td>' in both
    mixed = fragment(client, f"/benchmarks/compare/?id={first.pk}&id={other.pk}", "benchmarks-compared")
    assert "Only benchmarks with the same workload and objective can be compared." in mixed
    assert "<table>" not in mixed
    assert client.get("/benchmarks/compare/?id=999999").status_code == 404
    few = queries(client, f"/benchmarks/compare/?id={first.pk}")
    assert queries(client, f"/benchmarks/compare/?id={first.pk}&id={second.pk}") == few
