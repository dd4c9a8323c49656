"""`switchyard why` and `switchyard replay`."""

import pytest

from fleet.faults.models import Incident
from tests.controlplane.cli.conftest import Switchyard
from tests.fleet.recorder.passes import fleet_with_a_new_cell, recorded_passes, standing_clock, suspect_a_node
from tests.fleet.rows import NOW

pytestmark = [pytest.mark.django_db, pytest.mark.slow]


def test_it_explains_a_bare_name_and_replays_an_incident(
    switchyard: Switchyard, monkeypatch: pytest.MonkeyPatch
) -> None:
    time, one_pass = standing_clock(monkeypatch), recorded_passes()
    cell = fleet_with_a_new_cell(one_pass)
    suspect_a_node(one_pass, time)
    incident = Incident.objects.create(kind="silent-node", subject="n-2", node="n-2", summary="silent", opened_at=NOW)

    told = switchyard("why", cell, "--alternatives").out
    assert "StartCell (reconcile): placed on n-0, n-1" in told
    assert "    not n-2: it is as near" in told
    assert "limits: lost_after_s 30.0, suspect_after_s 10.0" in switchyard("why", "node/n-2").out
    assert switchyard("why", "teapot/x").code == 2

    assert "= MoveNode (liveness): node:n-2" in switchyard("replay", str(incident.pk)).out
    other = switchyard("replay", str(incident.pk), "--set", "suspect_after_s=60")
    assert "- MoveNode (liveness): node:n-2" in other.out
    assert "decided differently" in other.out

    number = told.partition("[")[2].partition("]")[0]
    assert number.startswith("round/")
    assert "of the reconciler decided the same" in switchyard("replay", number).out
