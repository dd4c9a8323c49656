"""From leaders' reports of engine work to the weights that split an hour, on PostgreSQL."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import asdict

from engine_agent.engines.sim.batching import ModelParameters
from engine_agent.protocol.load_messages import CellWork
from fleet.capacity.planning.rates import Source
from fleet.nodes.models import NodeReport
from fleet.regions.models import Rate
from tests.fleet import rows
from tests.fleet.rows import NOW
from tests.traffic.usage.planning.test_prices import simulated
from tests.traffic.usage.test_machine_hours import a_cell, in_flight, shared
from traffic.usage.models import CellHour, CostShare, TokenFit, TokenWork, UsageMark
from traffic.usage.planning.prices import FIT_DAYS
from traffic.usage.services.machine_hours import machine_hours_count
from traffic.usage.services.token_fit import token_fit_all, token_work_count

pytestmark = pytest.mark.django_db
LOOK = timedelta(seconds=15)
HOUR = timedelta(hours=1)


def says(node: str, totals: CellWork | None, **changes: Any) -> None:
    work = None if totals is None else {**asdict(totals), **changes}
    NodeReport.objects.update_or_create(
        node_id=node, defaults={"connected": True, "cell": "c", "generation": 1, "load": {"work": work}}
    )


def watched(looks: int, node: str = "n-a") -> None:
    for number, totals in enumerate(simulated(ModelParameters(), looks, 1)):
        says(node, totals)
        token_work_count(now=NOW - HOUR + number * LOOK)


def test_a_report_counts_once_and_only_from_the_leader_of_a_cell_that_serves() -> None:
    a_cell()
    says("n-a", CellWork(1.0, 10_000, 300, 400, 100, 200))
    says("n-b", CellWork(1.0, 10_000, 300, 400, 100, 200))
    assert token_work_count(now=NOW) == 0, "its start is unknown"
    says("n-a", CellWork(1.0, 20_000, 600, 800, 200, 400))
    says("n-b", CellWork(1.0, 20_000, 600, 800, 200, 400))
    assert [token_work_count(now=NOW + number * LOOK) for number in (1, 2)] == [1, 0]
    (work,) = TokenWork.objects.all()
    assert (work.version, work.instance_type, work.node, work.samples, work.steps) == (
        "sim-70b@1", rows.KIND, "n-a", 1, 300,
    )  # fmt: skip
    says("n-a", CellWork(2.0, 500, 9, 9, 0, 9))
    assert token_work_count(now=NOW + 3 * LOOK) == 0, "the engine restarted"


@pytest.mark.parametrize("wrong", [{"steps": -1}, {"busy_ms": "many"}, {"prompt_tokens": 2**63}, {"steps": 1.5}])
def test_what_is_no_count_is_passed_over(wrong: dict[str, Any]) -> None:
    a_cell()
    for factor in (1, 2):
        totals = CellWork(1.0, 10_000 * factor, 300 * factor, 400 * factor, 0, 200 * factor)
        says("n-a", totals, **wrong)
        assert token_work_count(now=NOW + factor * LOOK) == 0
    assert not UsageMark.objects.filter(source="work").exists()


@pytest.mark.slow
def test_an_hour_is_split_by_measured_weights_once_there_are_some_and_says_so() -> None:
    a_cell()
    in_flight(1)
    machine_hours_count(now=NOW)
    shared("reader", 0)
    shared("writer", 1000)
    CostShare.objects.filter(tenant="reader").update(prompt_tokens=10_000)
    watched(80)
    assert token_fit_all(now=NOW + timedelta(minutes=5)) == 1
    fit = TokenFit.objects.get()
    assert (fit.version, fit.instance_type, fit.nodes, fit.bounded) == ("sim-70b@1", rows.KIND, 1, False)
    assert fit.prompt_us == pytest.approx(125, rel=0.05)
    machine_hours_count(now=NOW + timedelta(minutes=30))
    machine_hours_count(now=NOW + HOUR + timedelta(minutes=2))
    row = CellHour.objects.get(deployment="sim-70b", hour=NOW)
    assert (row.settled, row.weights_source) == (True, Source.MEASURED)
    reader, writer = (CostShare.objects.get(tenant=tenant) for tenant in ("reader", "writer"))
    assert reader.cost + writer.cost + row.idle == row.cost
    assert float(writer.cost / reader.cost) == pytest.approx(fit.completion * 1000 / (fit.prompt * 10_000), rel=0.001)


@pytest.mark.parametrize(("priced", "source"), [(True, Source.RATED), (False, Source.ESTIMATED)])
def test_without_a_fit_prices_of_tokens_weigh_and_without_these_lists_do(priced: bool, source: Source) -> None:
    a_cell()
    if priced:
        columns = {"subject": "sim-70b", "valid_from": NOW, "actor": "a", "created_at": NOW}
        for kind, value in (("prompt_price", 1), ("completion_price", 4)):
            Rate.objects.create(kind=kind, value=value, **columns)
    machine_hours_count(now=NOW)
    machine_hours_count(now=NOW + timedelta(minutes=30))
    assert token_fit_all(now=NOW) == 0
    machine_hours_count(now=NOW + HOUR + timedelta(minutes=2))
    assert CellHour.objects.get(deployment="sim-70b", hour=NOW).weights_source == source


@pytest.mark.slow
def test_a_fit_that_nothing_renews_is_given_up_and_old_days_are_forgotten() -> None:
    a_cell()
    watched(80)
    assert token_fit_all(now=NOW) == 1
    long_after = NOW + timedelta(days=FIT_DAYS + 2)
    assert token_fit_all(now=long_after) == 0
    assert not TokenWork.objects.exists()
    assert TokenFit.objects.get().fitted_at == NOW


@pytest.mark.slow
def test_a_node_cannot_say_what_another_does() -> None:
    """A lying leader's numbers are summed under its own name; three honest ones outvote it."""
    a_cell()
    watched(80)
    honest = TokenWork.objects.get()
    for name in ("n-c", "n-d"):
        TokenWork.objects.create(
            **{field: getattr(honest, field) for field in ("version", "instance_type", "day", "samples", "sums")},
            node=name, square=honest.square, steps=honest.steps, completion_tokens=honest.completion_tokens,
        )  # fmt: skip
    token_fit_all(now=NOW)
    before = TokenFit.objects.get().weights()
    lying = honest.work()
    liar = TokenWork(version=honest.version, instance_type=honest.instance_type, node="n-e", day=honest.day)
    liar.take(
        replace(lying, targets=tuple(value * (9 if term == 2 else 1) for term, value in enumerate(lying.targets)))
    )
    liar.save()
    token_fit_all(now=NOW)
    after = TokenFit.objects.get().weights()
    assert after.completion / after.prompt == pytest.approx(before.completion / before.prompt, rel=0.01)
