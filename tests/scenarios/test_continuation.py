"""Long greedy streams while the fleet takes their cell away: none is cut, each has the text and the usage of an
undisturbed one, and some continued at another cell."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from bench.traffic.continued_rollout import streaming
from bench.traffic.stream_reader import Seen, StreamReader
from engine_agent.ingress.relay_processes import read_counts
from tests.scenarios.running_fleet import RunningFleet, eventually
from tests.scenarios.test_rollouts import NO_BAKE, ended, start

pytestmark = [pytest.mark.long, pytest.mark.scenario, pytest.mark.timeout(900)]

MODEL, REGION = "sim-70b", "us-east-1"
TOKENS, RATE = 200, 2.0
"""A stream takes some 4 s, so several run on each cell."""
NOTICE = """
from datetime import timedelta
from fleet.machines.models import Machine
from fleet.machines.planner import Statement
from fleet.machines.services.reports import notice_record
from fleet.reconcile.planning.states import NoticeKind, NoticeSource
from kernel import clock
now = clock.now()
notice_record(
    machine=Machine.objects.get(runs="%s"), kind=NoticeKind.INTERRUPTION, source=NoticeSource.IMDS,
    statement=Statement("spot", now, now + timedelta(seconds=120)), text="a spot warning", now=now,
)
"""
"""What a spot instance reads from its metadata two minutes before its end."""


def cell_of(fleet: RunningFleet) -> dict[str, Any]:
    return dict(next(iter(fleet.cells(deployment=MODEL, region=REGION, state="ready").values())))


def is_replaced(fleet: RunningFleet, cell: dict[str, Any]) -> bool:
    """Whether the cell, or one in its place, is ready in another start."""
    now = fleet.cells(deployment=MODEL, region=REGION, state="ready")
    return len(now) == 2 and now.get(cell["id"], {}).get("generation") != cell["generation"]


def drain(fleet: RunningFleet) -> None:
    cell = cell_of(fleet)
    fleet.post(f"cells/{cell['id']}/drain")
    eventually(lambda: is_replaced(fleet, cell))


def roll_out(fleet: RunningFleet) -> None:
    _, goal = fleet.versions()
    assert ended(fleet, start(fleet, goal.partition("@")[2], NO_BAKE))["state"] == "succeeded"


def warn_of_the_end(fleet: RunningFleet) -> None:
    cell = cell_of(fleet)
    node = cell["nodes"][0]["id"]
    fleet.run_in_shell(NOTICE % node)
    eventually(lambda: is_replaced(fleet, cell))
    assert node not in {member["id"] for each in fleet.cells().values() for member in each["nodes"]}


def kill_a_node(fleet: RunningFleet) -> None:
    cell = cell_of(fleet)
    fleet.take_down(cell["nodes"][0]["id"])
    eventually(lambda: is_replaced(fleet, cell))


@pytest.mark.parametrize(
    ("act", "reasons"),
    [
        pytest.param(drain, {"leaving"}, id="drain"),
        pytest.param(roll_out, {"leaving"}, id="rollout"),
        pytest.param(warn_of_the_end, {"leaving"}, id="spot notice"),
        pytest.param(kill_a_node, {"engine_died", "connection_lost"}, id="killed node"),
    ],
)
def test_no_stream_is_cut(fleet: RunningFleet, act: Callable[[RunningFleet], None], reasons: set[str]) -> None:
    before = continued(fleet.home)
    with undisturbed_streams(fleet.ingress(REGION), MODEL) as seen:
        act(fleet)
    now = continued(fleet.home) - before
    assert now.keys() & reasons, f"{len(seen)} streams; continued: {now}"


@contextmanager
def undisturbed_streams(url: str, model: str, rate: float = RATE) -> Iterator[list[Seen]]:
    """Sends `rate` streams a second while the block runs. Fails unless each is complete, with the text and the usage of
    the first."""
    reader, port = StreamReader("chat", TOKENS, model=model), urlsplit(url).port
    assert port is not None
    expected = asyncio.run(reader.read(port, 0))()
    assert not expected.is_cut, expected.error
    with streaming(reader, port, rate) as seen:
        eventually(lambda: len(seen) >= 2)
        yield seen
    assert [each.error or "no end" for each in seen if each.is_cut] == []
    assert {each.text for each in seen} == {expected.text}
    assert {each.usage for each in seen} == {expected.usage}


def continued(home: Path) -> Counter[str]:
    """Streams that continued, by reason, as the relays of ingresses in this folder counted them."""
    found: Counter[str] = Counter()
    for socket in home.rglob("relay/[0-9].sock"):
        for pool in asyncio.run(read_counts(socket)).pools.values():
            found.update(pool.continued_total)
    return found
