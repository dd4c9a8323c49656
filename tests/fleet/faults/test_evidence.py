"""Signals of agents are stored once until they are settled, and a pass reads them."""

from datetime import timedelta

import pytest

from fleet.faults.models import CellSighting, FaultRule, Incident, Repair, Signal
from fleet.faults.planning.views import IncidentKind, Rule, RuleMode
from fleet.faults.services.incidents import hardware_faults_settle, repair_record
from fleet.nodes.models import Node
from fleet.nodes.services.reports import fault_record
from fleet.reconcile.selectors.snapshot import fleet_view
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db

LATER = NOW + timedelta(seconds=30)


@pytest.fixture(autouse=True)
def node() -> Node:
    return rows.node("n-a")


def seen(signature: str = "neuron_dma_error", times: int = 1) -> None:
    for second in range(times):
        at = NOW + timedelta(seconds=second)
        fault_record(node="n-a", signature=signature, summary="it broke", evidence={"device": 3}, now=at)


def test_a_signature_that_is_seen_again_and_again_is_one_signal() -> None:
    seen(times=3)
    (view,) = fleet_view(now=LATER).faults.signals
    assert (view.signature, view.count, view.first_at) == ("neuron_dma_error", 3, NOW)
    assert not view.settled


def test_a_process_that_ended_is_no_signal_of_the_hardware() -> None:
    seen("engine_ended")
    assert not Signal.objects.exists()


def test_a_settled_signal_makes_room_for_a_new_one_and_counts_for_a_while() -> None:
    seen()
    assert hardware_faults_settle(node_id="n-a", now=LATER) == 1
    seen()
    assert [signal.settled for signal in fleet_view(now=LATER).faults.signals] == [True, False]
    hardware_faults_settle(now=LATER)
    assert fleet_view(now=LATER + timedelta(minutes=11)).faults.signals == ()


def test_a_fault_that_passes_by_itself_counts_as_a_repair_once() -> None:
    seen("neuron_hbm_repairable", times=2)
    assert [repair.what for repair in Repair.objects.all()] == ["reload"]


def test_repairs_count_for_a_week_and_until_a_person_looked() -> None:
    for days in (8, 6, 2, 1):
        repair_record(node="n-a", what="agent_restart", reason="dead", now=NOW - timedelta(days=days))
    assert fleet_view(now=NOW).faults.repairs == {"n-a": 3}
    Incident.objects.create(
        kind=IncidentKind.REPEATED_REPAIRS,
        subject="n-a",
        node="n-a",
        state="closed",
        opened_at=NOW,
        closed_at=NOW - timedelta(days=1, hours=12),
    )
    assert fleet_view(now=NOW).faults.repairs == {"n-a": 1}


def test_a_rule_is_in_force_until_it_is_set_otherwise() -> None:
    assert fleet_view(now=NOW).faults.mode(Rule.SLOW) is RuleMode.ON
    FaultRule.objects.create(rule=Rule.SLOW, mode=RuleMode.SHADOW, actor="ann", changed_at=NOW)
    assert fleet_view(now=NOW).faults.mode(Rule.SLOW) is RuleMode.SHADOW


def test_only_the_fresh_word_of_a_witness_about_the_present_generation_counts(node: Node) -> None:
    rows.cell("c1", node)
    CellSighting.objects.create(witness="i-east", seen_at=NOW, down={"c1": 1, "c0": 4})
    assert fleet_view(now=NOW).faults.down == {"c1": "i-east"}
    assert fleet_view(now=LATER).faults.down == {}
    CellSighting.objects.update(down={"c1": 0})
    assert fleet_view(now=NOW).faults.down == {}
