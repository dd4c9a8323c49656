"""The machines under a cell: place, price, what was announced, and why another pool is not taken."""

import re
from datetime import timedelta
from typing import Any

import pytest

from controlplane.dashboard.selectors.cells import cell_find
from controlplane.dashboard.selectors.machines import cell_machines
from fleet.models import CapacityPool, CloudNotice, Deployment, Machine
from fleet.planning.markets import Market
from fleet.planning.states import MachineState, NoticeKind, NoticeSource
from tests.controlplane.dashboard.clients import fragment, signed_in
from tests.fleet import rows
from tests.fleet.rows import KIND, NOW

pytestmark = pytest.mark.django_db


def pool(position: int, market: Market, zone: str, **columns: Any) -> CapacityPool:
    return CapacityPool.objects.create(
        region_id="us-east-1", instance_type_id=KIND, position=position, market=market, zone=zone, zone_id=zone,
        subnet="s", image="ami", **columns,
    )  # fmt: skip


@pytest.fixture
def cell() -> None:
    nodes = [rows.node(f"n-{rank}", topology=["az1", "nn-1", f"nn-2{rank}"]) for rank in (0, 1)]
    rows.cell("c1", *nodes)
    columns: dict[str, Any] = {"zone": "az1", "market": Market.SPOT, "price_per_hour": 6.5}
    for node in nodes:
        rows.machine(f"m-{node.id}", where="us-east-1", runs=node.id, state=MachineState.TAKEN, **columns)


@pytest.mark.usefixtures("cell")
def test_a_cell_shows_its_machines_and_why_each_pool_is_not_used_for_the_next() -> None:
    pool(1, Market.SPOT, "az1", paused_until=NOW + timedelta(minutes=3), pause_reason="no capacity", failures=1)
    pool(2, Market.ON_DEMAND, "az1", enabled=False)
    pool(3, Market.ON_DEMAND, "az2")
    found = cell_find(cell_id="c1", now=NOW)
    assert found is not None
    shown = cell_machines(found, NOW)
    assert [(row.zone_id, row.network_nodes) for row in shown.rows] == [
        ("az1", ("nn-1", "nn-20")),
        ("az1", ("nn-1", "nn-21")),
    ]
    assert shown.price_per_hour == 13.0
    assert [(line.name, line.is_used, line.why_not) for line in shown.pools] == [
        ("spot in az1", True, "it rests until 2026-11-21 12:03 UTC, because no capacity"),
        ("on_demand in az1", False, "a person has switched it off"),
        ("on_demand in az2", False, ""),
    ]


@pytest.mark.usefixtures("cell")
def test_a_pool_of_a_market_that_the_deployment_refuses_is_not_used() -> None:
    pool(1, Market.SPOT, "az1")
    pool(2, Market.ON_DEMAND, "az1")
    Deployment.objects.update(markets=["on_demand"])
    found = cell_find(cell_id="c1", now=NOW)
    assert found is not None
    assert [line.why_not for line in cell_machines(found, NOW).pools] == ["its deployment does not use spot", ""]
    page = fragment(signed_in(), "/deployments/sim-70b/", "deployment")
    assert re.search(r"<dt>Markets</dt>\s*<dd>on_demand</dd>", page)


@pytest.mark.usefixtures("cell")
def test_the_page_says_what_was_announced() -> None:
    pool(1, Market.SPOT, "az1")
    CloudNotice.objects.create(
        machine=Machine.objects.get(runs="n-0"),
        kind=NoticeKind.REBALANCE,
        source=NoticeSource.EVENTS,
        at=NOW,
        text="soon",
    )
    page = fragment(signed_in(), "/cells/c1/", "cell-machines")
    assert "Its provider announced rebalance: soon." in page
    assert "nn-1 / nn-20" in page
    assert "13.00 $ an hour together" in page
