"""Recorded passes on a small fleet of rows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from pytest_django import DjangoDbBlocker

from fleet.cells.models import Cell
from fleet.nodes.models import NodeReport
from fleet.reconcile.selectors.cache import FleetCache
from fleet.reconcile.selectors.snapshot import LISTENING_LEASE
from fleet.reconcile.services import reconcile_alone
from fleet.recorder.services import Recorder
from kernel import clock
from kernel.leases import lease_take
from tests.fleet import rows
from tests.fleet.provision import Clock
from tests.fleet.rows import NOW
from tests.rows_of_a_file import rows_of_a_file

Pass = Callable[[], int | None]


def standing_clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that is moved by hand; agents could connect for ten minutes."""
    made = Clock()
    monkeypatch.setattr(clock, "now", made)
    lease_take(name=LISTENING_LEASE, holder="web", ttl_s=3600, now=NOW - timedelta(minutes=10))
    return made


def recorded_passes() -> Pass:
    """Passes of one process, which records them."""
    cache, recorder = FleetCache(), Recorder()
    return lambda: reconcile_alone(cache=cache, recorder=recorder)


def fleet_with_a_new_cell(one_pass: Pass) -> str:
    """A cell of two nodes that a pass created and started; a third node is spare."""
    rows.deployment(cells=1)
    for index in range(3):
        rows.node(f"n-{index}")
    assert one_pass() == 2
    return str(Cell.objects.get().pk)


def suspect_a_node(one_pass: Pass, time: Clock) -> None:
    """`n-2` falls silent for 12 s, and a pass makes it suspect."""
    time.now = NOW + timedelta(seconds=12)
    NodeReport.objects.exclude(node="n-2").update(last_seen_at=time.now)
    assert one_pass()


@contextmanager
def recorded_fleet(blocker: DjangoDbBlocker) -> Iterator[str]:
    """For a fixture of a file: a cell on `n-0` and `n-1` that recorded passes created and started; then its spare `n-2`
    became suspect. The clock stands at 12 s."""
    with pytest.MonkeyPatch.context() as patch, rows_of_a_file(blocker):
        time, one_pass = standing_clock(patch), recorded_passes()
        cell = fleet_with_a_new_cell(one_pass)
        suspect_a_node(one_pass, time)
        yield cell
