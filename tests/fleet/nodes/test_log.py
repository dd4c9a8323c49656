"""Reading a cell's logs makes its nodes send them for a minute."""

from datetime import timedelta

import pytest

from engine_agent.protocol.messages import LogTail
from fleet.nodes.models import Node, NodeLog
from fleet.nodes.selectors import cell_log_lines, desired_for
from fleet.nodes.services.reports import REQUEST_TTL, node_logs_request, node_logs_store, node_logs_trim
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db

TAIL = LogTail(cell="c1", generation=1, logs={"engine": ("one", "nul \x00")})


@pytest.fixture(autouse=True)
def cell() -> None:
    rows.cell("c1", rows.node("n-1"), rows.node("n-2"))


def version() -> int:
    return Node.objects.get(pk="n-1").desired_version


def test_a_wish_is_part_of_what_a_node_should_do() -> None:
    before = version()
    node_logs_request(nodes=["n-1"], now=NOW)
    wish = desired_for(["n-1"])["n-1"].logs
    assert wish is not None
    assert wish.until == (NOW + REQUEST_TTL).timestamp()
    assert (version(), desired_for(["n-2"])["n-2"].logs) == (before + 1, None)


def test_a_reader_who_looks_often_costs_an_agent_little() -> None:
    for second in range(0, 70, 5):
        node_logs_request(nodes=["n-1"], now=NOW + timedelta(seconds=second))
    assert version() == 3, "asked at 0 and renewed at 35 s"


def test_what_an_agent_shows_is_read_by_rank() -> None:
    node_logs_request(nodes=["n-1", "n-2"], now=NOW)
    node_logs_store(tails={"n-1": TAIL}, now=NOW)
    leader, follower = cell_log_lines("c1")
    assert (leader.logs, leader.is_of_cell, leader.said_at) == ({"engine": ["one", "nul \ufffd"]}, True, NOW)
    assert (follower.logs, follower.is_of_cell, follower.said_at) == ({}, False, None)


def test_lines_of_an_earlier_generation_are_known_as_such() -> None:
    node_logs_request(nodes=["n-1"], now=NOW)
    node_logs_store(tails={"n-1": LogTail(cell="c1", generation=0, logs={})}, now=NOW)
    assert not cell_log_lines("c1")[0].is_of_cell


def test_lines_that_nobody_asked_for_are_not_kept() -> None:
    node_logs_store(tails={"n-1": TAIL, "n-unknown": TAIL}, now=NOW)
    node_logs_request(nodes=["n-2"], now=NOW)
    node_logs_store(tails={"n-2": TAIL}, now=NOW + timedelta(minutes=10))
    assert not NodeLog.objects.exclude(logs={}).exists()


def test_lines_that_nobody_reads_any_more_are_forgotten() -> None:
    node_logs_request(nodes=["n-1"], now=NOW)
    node_logs_trim(now=NOW + timedelta(minutes=59))
    assert NodeLog.objects.exists()
    node_logs_trim(now=NOW + timedelta(minutes=62))
    assert not NodeLog.objects.exists()
