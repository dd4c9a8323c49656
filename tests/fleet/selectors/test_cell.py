"""Whether the fleet is what it should be, and what it waits for."""

import pytest

from fleet.planning.states import CellState
from fleet.selectors.cell import fleet_readiness
from tests.fleet import rows

pytestmark = pytest.mark.django_db


def test_a_fleet_that_wants_nothing_is_ready() -> None:
    readiness = fleet_readiness()
    assert readiness.is_ready
    assert readiness.summary == "0 of 0 cells ready, 0 nodes joined"


def test_a_whole_fleet_is_ready() -> None:
    rows.deployment(cells=1)
    rows.cell("c1", rows.node("n-a"), rows.node("n-b"))
    readiness = fleet_readiness()
    assert readiness.is_ready
    assert readiness.summary == "1 of 1 cells ready, 2 nodes joined"


def test_what_is_missing_is_said_with_what_holds_it_up() -> None:
    rows.deployment(cells=2)
    rows.cell("c1", rows.node("n-a"))
    rows.cell("c2", state=CellState.PENDING, reason="waits for 2 nodes")
    assert fleet_readiness().waiting_for == (
        "sim-70b in us-east-1: 1 of 2 ready",
        "c2 is pending: waits for 2 nodes",
    )


def test_a_surplus_elsewhere_makes_up_for_nothing_and_is_not_counted() -> None:
    rows.deployment(cells=1)
    rows.deployment(cells=1, where="us-west-2")
    rows.cell("c1", rows.node("n-a"))
    rows.cell("c2", rows.node("n-b"))
    readiness = fleet_readiness()
    assert readiness.waiting_for == ("sim-70b in us-west-2: 0 of 1 ready",)
    assert readiness.summary.startswith("1 of 2 cells ready")


def test_more_to_wait_for_can_be_added() -> None:
    more = fleet_readiness().plus(("ingress i is not connected",))
    assert not more.is_ready
    assert more.summary.endswith("ingress i is not connected")
