"""A large fleet is seeded whole, and only where there is none."""

import pytest
from django.core.management import CommandError, call_command

from fleet.cells.models import Cell, CellMember
from fleet.load.models import LoadSubject
from fleet.load.selectors import cell_load
from fleet.nodes.models import Node, NodeReport
from traffic.routing.models import IngressReport

pytestmark = pytest.mark.django_db


@pytest.mark.slow
def test_it_makes_as_many_cells_and_nodes_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet.deployments.services.large_demo.KEPT_S", {15: 30, 3600: 7200})
    call_command("seed_scale", cells=40, nodes=80)
    assert (Cell.objects.count(), Node.objects.count(), NodeReport.objects.count()) == (40, 80, 80)
    assert 40 < CellMember.objects.count() <= 80
    assert LoadSubject.objects.filter(windows__step_s=3600).distinct().count() == LoadSubject.objects.count()
    assert IngressReport.objects.count() == 10
    serving = Cell.objects.filter(state="ready").first()
    assert serving is not None
    assert cell_load(serving).ttft_p50_ms == 95.0
    with pytest.raises(CommandError, match="the database has a fleet already"):
        call_command("seed_scale")


def test_more_cells_than_nodes_are_refused() -> None:
    with pytest.raises(CommandError, match="5 cells need at least as many nodes, not 4"):
        call_command("seed_scale", cells=5, nodes=4)
