"""A cell whose ranks run different software does not form, and every member says in which field they differ (I2)."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine_agent.engines.sim.cells import SECRET, Cell, until

pytestmark = pytest.mark.processes

STACK = {"kernel": "6.8", "engine": "sim 1", "flags": "0123456789ab"}


@pytest.fixture
def cell(tmp_path: Path) -> Iterator[Cell]:
    cell = Cell(tmp_path, followers=1)
    yield cell
    cell.stop()


def test_ranks_that_run_the_same_form_a_cell(cell: Cell) -> None:
    leader, follower = cell.start(0, fingerprint=STACK), cell.start(1, fingerprint=STACK)
    until(lambda: leader.health()[0] == 200 and follower.health()[0] == 200, leader.said)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({**STACK, "kernel": "6.9"}, "kernel is 6.9 instead of 6.8"),
        ({"kernel": "6.8", "engine": "sim 1"}, "flags is absent instead of 0123456789ab"),
        ({**STACK, "driver": "2"}, "driver is 2 instead of absent"),
    ],
)
def test_a_rank_that_runs_something_else_ends_the_cell_at_once_and_is_named(
    cell: Cell, other: dict[str, str], said: str
) -> None:
    reason = f"fingerprint mismatch: rank 1 ({cell.node_id(1)}) differs from rank 0 ({cell.node_id(0)}): {said}"
    leader = cell.start(0, fingerprint=STACK)
    until(lambda: leader.health()[0] == 503, leader.said)

    follower = cell.start(1, fingerprint=other)

    assert (leader.exit_status(), follower.exit_status()) == (1, 1)
    for member in (leader, follower):
        assert member.said().splitlines()[-1].endswith(f"exit with status 1: {reason}")


def test_who_does_not_know_the_secret_cannot_end_a_cell_with_another_fingerprint(cell: Cell) -> None:
    leader = cell.start(0, fingerprint=STACK)
    until(lambda: leader.health()[0] == 503, leader.said)
    stranger = cell.start(1, "--rendezvous-timeout-s", "2", secret=f"not {SECRET}", fingerprint={"kernel": "0"})
    assert stranger.exit_status() == 1
    assert leader.health() == (503, "waiting for followers: 0 of 1 connected")
