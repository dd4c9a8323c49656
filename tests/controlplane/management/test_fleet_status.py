"""`manage.py fleet_status`: how far the fleet is, until all of it is there or the time is up."""

from collections.abc import Callable
from datetime import timedelta
from io import StringIO

import pytest
from django.core.management import CommandError, call_command

from controlplane.management.commands import fleet_status
from fleet.cells.models import Cell
from fleet.reconcile.planning.states import CellState
from tests.fleet import rows
from tests.fleet.rows import NOW
from traffic.routing.models import IngressReport
from traffic.routing.selectors import latest_tables
from traffic.routing.services.ingresses import ingress_create
from traffic.routing.services.tables import tables_publish

pytestmark = pytest.mark.django_db


class Watch:
    """A clock that only waiting moves; of `events` one happens in each wait."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events: list[Callable[[], object]] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        if self.events:
            self.events.pop(0)()


@pytest.fixture(autouse=True)
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    made = Watch()
    monkeypatch.setattr(fleet_status, "time", made)
    return made


def status(**options: float) -> list[str]:
    out = StringIO()
    call_command("fleet_status", stdout=out, **options)
    return out.getvalue().splitlines()


def starting_cell() -> None:
    rows.deployment(cells=1)
    rows.cell("c1", rows.node("n-a"), state=CellState.STARTING, reason="weights are loading")


def test_without_a_wait_it_only_says_how_far_things_are() -> None:
    starting_cell()
    assert status() == ["0 of 1 cells ready, 1 nodes joined"]


def test_it_waits_until_every_cell_is_ready_and_says_each_step_once(watch: Watch) -> None:
    starting_cell()
    watch.events = [lambda: None, lambda: Cell.objects.update(state="ready")]
    assert status(wait_s=60) == ["0 of 1 cells ready, 1 nodes joined", "1 of 1 cells ready, 1 nodes joined"]


def test_when_the_time_is_up_it_says_what_is_missing() -> None:
    starting_cell()
    with pytest.raises(CommandError, match=r"not ready after 5 s: .*0 of 1 ready; c1 is starting: weights are loading"):
        status(wait_s=5)


def test_ready_cells_are_not_enough_while_an_ingress_does_not_see_them(watch: Watch) -> None:
    starting_cell()
    Cell.objects.update(state="ready")
    ingress = ingress_create(region=rows.region(), address="127.0.0.1", port=8080, now=NOW)
    tables_publish(now=NOW)
    revision = latest_tables()["us-east-1"].revision
    report = IngressReport.objects.create(ingress=ingress, connected=True, last_seen_at=NOW + timedelta(seconds=1))

    def reports(**columns: object) -> None:
        IngressReport.objects.filter(pk=report.pk).update(**columns)

    watch.events = [
        lambda: reports(revision=revision),
        lambda: reports(cells={"c1": "down"}),
        lambda: reports(cells={"c1": "up"}),
    ]
    assert [line.partition("; ")[2] for line in status(wait_s=60)] == [
        f"ingress i-us-east-1 runs revision 0 of {revision}",
        "cell c1 is unknown at ingress i-us-east-1",
        "cell c1 is down at ingress i-us-east-1",
        "",
    ]
