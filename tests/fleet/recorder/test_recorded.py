"""Recorded passes on real rows: read back, decided again, explained."""

from collections.abc import Iterator

import pytest
from pytest_django import DjangoDbBlocker

from controlplane.explained import LOOPS
from fleet.recorder.models import RecordedRound
from fleet.recorder.planning.explanations import RECONCILER
from fleet.recorder.planning.reasons import Subject
from fleet.recorder.planning.replay import replay
from fleet.recorder.selectors import alternatives_of, reasons_about, rounds_decoded
from tests.fleet.recorder.passes import recorded_fleet, recorded_passes

pytestmark = pytest.mark.django_db


@pytest.fixture(scope="module")
def cell(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[str]:
    with recorded_fleet(django_db_blocker) as made:
        yield made


def test_rounds_are_differences_to_the_first_and_decide_the_same_again(cell: str) -> None:
    first, second, third = RecordedRound.objects.order_by("id")
    assert (first.base, second.base, third.base) == (None, first, first)
    assert (first.loop, first.planner, first.decided, second.decided) == ("reconciler", "plan_reconcile", 1, 1)
    assert second.size < first.size
    decoded = [one for _, one in rounds_decoded([first, second, third], LOOPS)]
    kinds = [type(one.decided[-1].decisions[0]).__name__ for one in decoded]
    assert kinds == ["CreateCell", "StartCell", "MoveNode"]
    assert all(replay(RECONCILER, one).is_same for one in decoded)


def test_a_placement_tells_why_and_what_else_there_was(cell: str) -> None:
    (started,) = reasons_about(Subject.CELL.named(cell), 10, LOOPS)
    assert (started.decision, started.planner) == ("StartCell", "plan_reconcile")
    assert started.reason.startswith("placed on n-0, n-1")
    assert (started.inputs["nodes"], started.inputs["spares"]) == ("n-0, n-1", 3)
    assert {"node:n-0", "node:n-1", "deployment:sim-70b"} <= set(started.subjects)
    assert [reason.decision for reason in reasons_about("deployment:sim-70b", 10, LOOPS)] == ["StartCell", "CreateCell"]
    (other,) = alternatives_of(started, LOOPS)
    assert (other.name, other.why_not.partition(";")[0]) == ("n-2", "it is as near")


def test_a_lost_node_tells_its_silence_and_the_limits(cell: str) -> None:
    suspected = next(one for one in reasons_about("node:n-2", 10, LOOPS) if one.decision == "MoveNode")
    assert suspected.inputs["to"] == "suspect"
    assert suspected.inputs["silence_s"] == 12.0
    assert suspected.limits == {"suspect_after_s": 10.0, "lost_after_s": 30.0}


def test_a_pass_that_decides_nothing_stores_nothing(cell: str) -> None:
    assert recorded_passes()() == 0
    assert RecordedRound.objects.count() == 3
