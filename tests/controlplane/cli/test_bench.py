"""Benchmarks on the command line: start, show, cancel, apply."""

import json

import pytest

from fleet.deployments.models import Deployment
from models_registry.benchmarks.models import Benchmark, BenchmarkPoint, ConfigurationSearch
from tests.controlplane.cli.conftest import Switchyard
from tests.fleet import rows
from tests.models_registry.benchmarks.test_benchmark import measured
from traffic.region_shares.selectors.traffic import traffic_policies

pytestmark = [pytest.mark.django_db, pytest.mark.slow]

RUN = ("bench", "run", "sim-70b@1", "--workload", "1000+150", "--slo", "ttft=500,itl=50")


@pytest.fixture(autouse=True)
def cell() -> None:
    rows.cell("sim-70b-us-east-1-1", rows.node("n-a", fingerprint={"sim.engine": "1"}))


def test_one_is_asked_for_and_cancelled(switchyard: Switchyard) -> None:
    made = switchyard(*RUN, "--rule", "min_s=20", "--detach")
    assert (made.code, "queued" in made.out) == (0, True)
    row = Benchmark.objects.get()
    assert (row.deployment, row.region, row.rules) == ("sim-70b", "us-east-1", {"min_s": 20})
    assert switchyard("bench", "cancel", str(row.pk), "--yes").code == 0
    assert "cancelled by operator" in switchyard("bench", "show", str(row.pk)).out
    wrong = switchyard("bench", "run", "sim-70b@1", "--workload", "all", "--slo", "ttft=1,itl=1", "--detach")
    assert (wrong.code, "PROMPT+OUTPUT" in wrong.err) == (3, True)


def test_what_was_found_is_shown_with_what_measured_the_same(switchyard: Switchyard) -> None:
    first, second = measured(rows.version(), 8), measured(rows.version(), 7)
    shown = switchyard("bench", "show", str(second.pk)).out
    assert f"benchmark {first.pk} measured the same: 8 requests/s" in shown
    best = switchyard("bench", "best", "--workload", "1000+150", "--slo", "ttft=500,itl=50")
    assert best.out.startswith("sim-70b@1 on local.cpu: 2 requests per second and chip")
    nothing = switchyard("bench", "best", "--workload", "9+9", "--slo", "ttft=500,itl=50")
    assert "Nothing was measured for this use" in nothing.out
    listed = json.loads(switchyard("get", "benchmarks", "-o", "json").out)
    assert {one["id"] for one in listed} == {first.pk, second.pk}


def test_capacity_is_set_by_hand_from_what_was_found(switchyard: Switchyard) -> None:
    row = measured(rows.version(), 8, concurrency=18.4, deployment="sim-70b")
    applied = switchyard("bench", "apply", str(row.pk), "--yes")
    assert applied.out == "deployment sim-70b: capacity of 18 concurrent requests per cell\n"
    assert traffic_policies()["sim-70b"].tested_concurrency == 18
    bare = measured(rows.version(), 8, deployment="sim-70b")
    refused = switchyard("bench", "apply", str(bare.pk), "--yes")
    assert "no rate held" in refused.err


def test_capacity_is_set_by_type_where_there_are_several(switchyard: Switchyard) -> None:
    rows.deployment()
    Deployment.objects.update(instance_types=["local.cpu", "local.big"])
    row = measured(rows.version(), 8, concurrency=18.4, deployment="sim-70b")
    applied = switchyard("bench", "apply", str(row.pk), "--yes")
    assert applied.out == "deployment sim-70b: capacity of 18 concurrent requests per cell\n"
    policy = traffic_policies()["sim-70b"]
    assert (policy.tested_on("local.cpu"), policy.tested_on("local.big")) == (18, None)


def test_what_tokens_cost_in_regions_is_set_by_hand_from_what_was_measured_there(switchyard: Switchyard) -> None:
    rows.region("eu-west-1")
    found = {}
    for region, dollars in (("us-east-1", 2.0), ("eu-west-1", 3.0), ("us-east-1", 2.4)):
        row = measured(rows.version(), 8, concurrency=18.4, deployment="sim-70b", region=region)
        figures = {**row.points.get().figures, "dollars_per_mtoken": dollars}
        row.points.all().delete()
        BenchmarkPoint.objects.create(
            benchmark=row, number=1, rate=8, verdict="held", reason="r", figures=figures, histograms={},
            measured_at=rows.NOW,
        )  # fmt: skip
        found[region] = row.pk
    applied = switchyard("bench", "apply", str(found["eu-west-1"]), "--cost", "--yes")
    assert applied.out.endswith("tokens cost 1.25 in eu-west-1, 1 in us-east-1\n")
    assert dict(traffic_policies()["sim-70b"].cost) == {"eu-west-1": 1.25, "us-east-1": 1.0}


def test_a_benchmark_without_a_price_says_how_one_is_stated(switchyard: Switchyard) -> None:
    row = measured(rows.version(), 8, concurrency=18.4, deployment="sim-70b")
    wrong = switchyard("bench", "apply", str(row.pk), "--cost", "--yes")
    assert (wrong.code, "switchyard create rate machine_price" in wrong.err) == (6, True)


SEARCH = ("bench", "search", "sim-70b@1", "--workload", "1000+150", "--slo", "ttft=500,itl=50", "--detach", "--yes")


def test_a_search_is_asked_for_shown_and_cancelled(switchyard: Switchyard) -> None:
    varied = ("--vary", "engine_options.max_num_seqs=8,16", "--vary", "speculation=[{}]")
    made = switchyard(*SEARCH, *varied, "--most-trials", "9", "--rule", "min_s=20")
    row = ConfigurationSearch.objects.get()
    assert (made.code, "waiting" in made.out) == (0, True)
    assert row.varied == {"engine_options.max_num_seqs": [8, 16], "speculation": [{}]}
    assert (row.most_trials, row.rules) == (9, {"min_s": 20})
    shown = switchyard("bench", "search-show", str(row.pk)).out
    assert "max_num_seqs=8" in shown
    assert "to be measured at 25% of the length" in shown
    assert switchyard("get", "searches").out.count("sim-70b@1") == 1
    assert switchyard("bench", "search-cancel", str(row.pk), "--yes").code == 0


@pytest.mark.parametrize("vary", ["max_concurrency", "max_concurrency=", "speculation=[{]"])
def test_what_cannot_be_read_of_a_search_says_what_can(switchyard: Switchyard, vary: str) -> None:
    wrong = switchyard(*SEARCH, "--vary", vary)
    assert (wrong.code, "--vary" in wrong.err) == (2, True)
    assert not ConfigurationSearch.objects.exists()
