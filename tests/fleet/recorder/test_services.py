"""Passes on real rows are recorded after they were applied, explained, replayed and deleted; a failure to record stops
nothing."""

from datetime import datetime, timedelta

import pytest

from controlplane.explained import LOOPS
from fleet.cells.models import Cell
from fleet.nodes.models import NodeReport
from fleet.recorder import services
from fleet.recorder.models import RecordedRound
from fleet.recorder.planning.encoding import CannotDecode
from fleet.recorder.planning.reasons import Subject
from fleet.recorder.selectors import present, rounds_decoded
from fleet.recorder.services import BYTES_MOST, rounds_trim
from tests.fleet import rows
from tests.fleet.provision import Clock
from tests.fleet.recorder.passes import Pass, fleet_with_a_new_cell, recorded_passes, standing_clock
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return standing_clock(monkeypatch)


@pytest.fixture
def one_pass(time: Clock) -> Pass:
    return recorded_passes()


def test_the_present_explains_what_a_cell_lacks_and_why_the_last_one_stays(time: Clock) -> None:
    rows.deployment(cells=2)
    rows.cell("c-1", rows.node("n-0"), rows.node("n-1"), state_since=NOW - timedelta(minutes=5))
    rows.cell("c-2", state="pending", generation=0, reason="needs 2 local.cpu; 1 is spare")
    rows.node("n-2")
    now = present(NOW)
    assert now.of(Subject.CELL, "c-1")[1].startswith(
        "It may not be drained on purpose: no other cell of the deployment"
    )
    waits = now.of(Subject.CELL, "c-2")
    assert waits[0] == "It has been pending for 0 s: needs 2 local.cpu; 1 is spare."
    assert waits[1] == "It needs 2 local.cpu; us-east-1 has 1 spare."
    assert now.of(Subject.DEPLOYMENT, "sim-70b")[0] == "us-east-1 lacks 1 cell: 2 cells wanted, 1 ready."
    assert now.of(Subject.NODE, "n-2")[-1] == "c-2 waits: needs 2 local.cpu; 1 is spare."
    assert now.of(Subject.CELL, "c-9") == []


def test_a_failure_to_record_stops_no_pass_and_the_next_begins_anew(
    one_pass: Pass, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> bytes:
        raise TypeError("this view cannot be encoded")

    with monkeypatch.context() as broken:
        broken.setattr(services, "encode_round", refuse)
        fleet_with_a_new_cell(one_pass)
    assert RecordedRound.objects.count() == 0
    NodeReport.objects.exclude(node="n-2").update(cell=Cell.objects.get().pk, generation=1, state="ready")
    assert one_pass() == 1
    assert RecordedRound.objects.get().base is None


def test_a_chain_ends_after_its_time_and_with_other_settings(one_pass: Pass, time: Clock) -> None:
    fleet_with_a_new_cell(one_pass)
    time.now = NOW + services.CHAIN_FOR
    NodeReport.objects.update(last_seen_at=time.now, cell=Cell.objects.get().pk, generation=1, state="ready")
    NodeReport.objects.filter(node="n-2").update(cell="", state="idle")
    one_pass()
    assert RecordedRound.objects.filter(base=None).count() == 2


def recorded_at(at: datetime, size: int = 10, base: RecordedRound | None = None) -> RecordedRound:
    known = {"loop": "reconciler", "planner": "plan_reconcile", "schema": "s", "release": "1"}
    return RecordedRound.objects.create(base=base, at=at, decided=1, inputs=b"x", size=size, **known)


def test_inputs_go_by_age_and_by_bytes_and_rows_by_age(db: None) -> None:
    gone = recorded_at(NOW - services.ROUNDS_KEPT - timedelta(hours=1))
    recorded_at(gone.at, base=gone)
    old = recorded_at(NOW - services.INPUTS_KEPT - timedelta(hours=1))
    large = recorded_at(NOW - timedelta(hours=2), BYTES_MOST - 10)
    kept = recorded_at(NOW - timedelta(hours=1), 5)
    follower = recorded_at(NOW, 6, kept)
    assert rounds_trim(now=NOW) == 2
    left = {row.pk: row.inputs is not None for row in RecordedRound.objects.all()}
    assert left == {old.pk: False, large.pk: False, kept.pk: True, follower.pk: True}
    with pytest.raises(CannotDecode, match="were deleted"):
        list(rounds_decoded([old], LOOPS))
