"""Racing decisions on real PostgreSQL: one of them is stale, and none is half applied."""

from functools import partial

import pytest

from fleet.cells.models import Cell, CellMember
from fleet.cells.services import cell_start
from fleet.faults.models import Replacement
from fleet.faults.planning.views import Rule
from fleet.faults.services.incidents import node_replace
from fleet.nodes.models import Node
from fleet.nodes.services.nodes import node_retire
from fleet.reconcile.planning.decisions import ReplaceNode, RetireNode, StartCell
from fleet.reconcile.planning.states import CellState, NodeState
from tests.fleet import rows
from tests.fleet.racing import Step, race
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db(transaction=True)

START: Step = partial(cell_start, StartCell("c1", CellState.PENDING, 0, ("n-a", "n-b"), "placed"), now=NOW)
START_ANOTHER: Step = partial(cell_start, StartCell("c2", CellState.PENDING, 0, ("n-b", "n-a"), "placed"), now=NOW)
RETIRE: Step = partial(node_retire, RetireNode("n-a", NodeState.READY, "surplus"), now=NOW)


@pytest.fixture(autouse=True)
def fleet() -> None:
    rows.node("n-a"), rows.node("n-b")
    for name in ("c1", "c2"):
        rows.cell(name, state=CellState.PENDING, generation=0)


def members() -> dict[str, str]:
    return dict(CellMember.objects.values_list("node_id", "cell_id"))


def test_a_node_that_joined_a_cell_meanwhile_is_not_retired() -> None:
    assert race(START, RETIRE) == "StaleDecision"
    assert members() == {"n-a": "c1", "n-b": "c1"}
    assert Node.objects.get(id="n-a").state == NodeState.READY


def test_a_cell_does_not_start_on_a_node_that_was_retired_meanwhile() -> None:
    assert race(RETIRE, START) == "StaleDecision"
    assert members() == {}
    assert Cell.objects.get(id="c1").state == CellState.PENDING


def test_two_cells_never_get_the_same_nodes() -> None:
    assert race(START, START_ANOTHER) in {"StaleDecision", "IntegrityError"}
    assert members() == {"n-a": "c1", "n-b": "c1"}
    assert Cell.objects.get(id="c2").generation == 0


def test_one_decision_is_applied_once() -> None:
    assert race(START, START) == "StaleDecision"
    assert Cell.objects.get(id="c1").generation == 1


def test_a_node_that_two_reconcilers_condemn_is_replaced_once() -> None:
    since = Node.objects.get(id="n-a").state_since
    condemn = partial(
        node_replace, ReplaceNode("n-a", NodeState.READY, since, "", Rule.HARD_SIGNATURE, "it broke"), now=NOW
    )
    assert race(condemn, condemn) == "StaleDecision"
    assert Replacement.objects.count() == 1


def test_a_cell_does_not_start_on_a_node_that_was_condemned_meanwhile() -> None:
    since = Node.objects.get(id="n-a").state_since
    condemned = ReplaceNode("n-a", NodeState.READY, since, "", Rule.HARD_SIGNATURE, "it broke")
    assert race(partial(node_replace, condemned, now=NOW), START) == "StaleDecision"
    assert members() == {}


def test_a_node_that_joined_a_cell_meanwhile_is_not_condemned_by_what_was_seen_before() -> None:
    since = Node.objects.get(id="n-a").state_since
    condemned = ReplaceNode("n-a", NodeState.READY, since, "", Rule.HARD_SIGNATURE, "it broke")
    assert race(START, partial(node_replace, condemned, now=NOW)) == "StaleDecision"
    assert Node.objects.get(id="n-a").state == NodeState.READY
