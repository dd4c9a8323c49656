"""A short campaign of faults on the running fleet: what `make chaos` does for half an hour."""

import json
from functools import partial

import pytest

from bench.chaos.campaign import Campaign, FleetUnderTest
from bench.chaos.schedule import Fault, Harm, Target
from bench.live_fleet import last_pass_age_s
from tests.load import background_load
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
    with background_load([fleet.ingress(region) for region in REGIONS], "sim-70b", RATE) as answers:
        report = Campaign(under_test(fleet), seed=1).run(FAULTS, answers)
    assert report.broken == [], report.faults
    assert len(report.faults) == len(FAULTS)


def under_test(fleet: RunningFleet) -> FleetUnderTest:
    return FleetUnderTest(
        home=fleet.home,
        cells=partial(fleet.cells, deployment="sim-70b"),
        is_whole=fleet.is_whole,
        open_incidents=lambda: [row["summary"] for row in fleet.api("incidents", state="open")["results"]],
        sessions=lambda: json.loads((fleet.home / "up.json").read_text())["sessions"],
        last_pass_age_s=partial(last_pass_age_s, f"http://127.0.0.1:{fleet.port}"),
    )
