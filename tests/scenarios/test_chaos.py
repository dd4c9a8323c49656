"""A short campaign of faults on the running fleet: what `make chaos` does for half an hour."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from threading import Thread

import pytest

from bench.chaos.__main__ import last_pass_age_s
from bench.chaos.campaign import Campaign, FleetUnderTest
from bench.chaos.schedule import Fault, Harm, Target
from tests.load import Answer, steady_load
from tests.scenarios.running_fleet import REGIONS, RunningFleet

pytestmark = [pytest.mark.scenario, pytest.mark.timeout(900)]

RATE = 5.0
FAULTS = (
    Fault(2, Target.INGRESS_AGENT, Harm.PAUSE, 5),
    Fault(4, Target.CONTROLLER, Harm.KILL),
    Fault(8, Target.NODE_AGENT, Harm.TORN_STATE),
    Fault(10, Target.WEB, Harm.PAUSE, 5),
    Fault(14, Target.ENGINE, Harm.KILL),
    Fault(18, Target.VALKEY, Harm.KILL),
)
"""Of those that `make chaos` draws, some that are over soon and that no other scenario does."""


def test_a_short_campaign_breaks_no_promise(fleet: RunningFleet) -> None:
    with load_on_both(fleet) as answers:
        report = Campaign(under_test(fleet), seed=1).run(FAULTS, answers)
    assert report.broken == [], report.faults
    assert len(report.faults) == len(FAULTS)


def under_test(fleet: RunningFleet) -> FleetUnderTest:
    def published() -> dict[str, dict[str, int]]:
        return dict(json.loads((fleet.home / "up.json").read_text()))

    return FleetUnderTest(
        home=fleet.home,
        cells=partial(fleet.cells, deployment="sim-70b"),
        is_whole=fleet.is_whole,
        open_incidents=lambda: [row["summary"] for row in fleet.api("incidents", state="open")["results"]],
        sessions=lambda: published()["sessions"],
        last_pass_age_s=lambda: last_pass_age_s(str(published()["database_url"])),
    )


@contextmanager
def load_on_both(fleet: RunningFleet) -> Iterator[list[Answer]]:
    answers: list[Answer] = []
    loop, stop = asyncio.new_event_loop(), asyncio.Event()

    async def send() -> None:
        streams = [steady_load(fleet.ingress(region), "sim-70b", RATE, stop, answers) for region in REGIONS]
        await asyncio.gather(*streams)

    thread = Thread(target=loop.run_until_complete, args=(send(),))
    thread.start()
    try:
        yield answers
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
