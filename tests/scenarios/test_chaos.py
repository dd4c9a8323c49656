"""A short campaign of faults on the running fleet: what `make chaos` does for half an hour."""

import json
from functools import partial
from typing import Any

import pytest

from bench.chaos.campaign import Campaign, FleetUnderTest
from bench.chaos.schedule import Fault, Harm, Target
from bench.chaos.users import Users
from bench.fleet.live_fleet import last_pass_age_s
from tests.scenarios.running_fleet import REGIONS, RunningFleet

pytestmark = [pytest.mark.long, pytest.mark.scenario, pytest.mark.timeout(900)]

RATE = 6.0
FAULTS = (
    Fault(Target.INGRESS_AGENT, Harm.PAUSE, 5),
    Fault(Target.CONTROLLER, Harm.KILL),
    Fault(Target.WORKER, Harm.CANNOT_WRITE, 5),
    Fault(Target.NODE_AGENT, Harm.TORN_STATE, state="journal.json"),
    Fault(Target.WEB, Harm.PAUSE, 5),
    Fault(Target.HAPROXY, Harm.SLOWLORIS, 5),
    Fault(Target.FOLLOWER, Harm.KILL, trail=("cell.failed",)),
    Fault(Target.RELAY, Harm.PAUSE, 5),
    Fault(Target.CELL, Harm.DRAIN),
    Fault(Target.VALKEY, Harm.KILL),
)
"""Of those that `make chaos` draws, some that are over soon and that no other scenario does."""


def test_a_short_campaign_breaks_no_promise(fleet: RunningFleet) -> None:
    users = Users({region: [fleet.ingress(region)] for region in REGIONS}, "sim-70b", RATE, seed=1)
    users.record()
    with users.sending() as requests:
        report = Campaign(under_test(fleet), seed=1, hostile_share=0.05).run(FAULTS, requests)
    assert report.broken == [], report.faults
    assert len(report.faults) == len(FAULTS)


def under_test(fleet: RunningFleet) -> FleetUnderTest:
    def sessions() -> dict[str, int]:
        status = json.loads((fleet.home / "up.json").read_text())
        return {**status["sessions"], "launcher": status["pid"]}

    def trail() -> list[Any]:
        return [*fleet.api("events", page_size="1000")["results"], *fleet.api("incidents")["results"]]

    return FleetUnderTest(
        home=fleet.home,
        web_url=f"http://127.0.0.1:{fleet.port}",
        agents_url=f"https://127.0.0.1:{fleet.agent_port}",
        cells=partial(fleet.cells, deployment="sim-70b"),
        nodes=lambda: {node["id"]: node for node in fleet.api("nodes")["results"]},
        ingresses=lambda: {row["id"]: row for row in fleet.api("ingresses")["results"]},
        is_whole=fleet.is_whole,
        open_incidents=lambda: [row["summary"] for row in fleet.api("incidents", state="open")["results"]],
        sessions=sessions,
        last_pass_age_s=partial(last_pass_age_s, f"http://127.0.0.1:{fleet.port}"),
        trail=trail,
        order=lambda path: fleet.post(path, {"why": "chaos"}),
        roll_out=lambda: pytest.fail("no rollout is among these faults"),
    )
