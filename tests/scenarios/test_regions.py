"""Shares of regions on the running fleet: an evacuation without failed requests, and its automatic end."""

import pytest

from lab.steady_load import Answer
from tests.scenarios.running_fleet import REGIONS, AskedFleet, eventually
from tests.scenarios.test_healing import RATE, under_load

pytestmark = [pytest.mark.long, pytest.mark.scenario, pytest.mark.timeout(900)]

EAST, WEST = REGIONS
DEPLOYMENT = "sim-70b"


def shares_in_force(fleet: AskedFleet, region: str) -> dict[str, float]:
    """From the table that all of the region's ingresses have acknowledged; empty while they differ."""
    revision, *others = {each["revision"] for each in fleet.api("ingresses", region=region)["results"]}
    if others:
        return {}
    pools = fleet.api(f"routing-tables/{region}@{revision}")["body"]["pools"]
    found: dict[str, float] = next(pool["fractions"] for pool in pools if pool["name"] == DEPLOYMENT)
    return found


@pytest.mark.anywhere
def test_a_region_is_evacuated_under_load_and_taken_back_without_a_failed_request(fleet: AskedFleet) -> None:
    asked = {"region": EAST, "mode": "real", "duration_s": 600, "why": "a test", "deployment": DEPLOYMENT}
    emptied_at = back_at = 0.0

    def evacuate_and_take_back(answers: list[Answer]) -> None:
        nonlocal emptied_at, back_at
        (effect,) = fleet.post("traffic/evacuations/preview", asked)["effects"]
        assert (effect["shares"][EAST], effect["over_cap"]) == ({WEST: 1.0}, [])
        order = fleet.post("traffic/evacuations", {**asked, "confirm": EAST})
        eventually(lambda: shares_in_force(fleet, EAST) == {WEST: 1.0} == shares_in_force(fleet, WEST))
        emptied_at = max(answer.began for answer in answers)
        reached = len(answers)
        eventually(lambda: len(answers) >= reached + 2 * RATE)
        back_at = max(answer.began for answer in answers)
        fleet.post(f"traffic/overrides/{order['id']}/end", {"why": "enough"})
        # Steps would take two minutes; this order moves all requests in one step and expires.
        home = {"deployment": DEPLOYMENT, "origin": EAST, "shares": {EAST: 1.0}, "duration_s": 10, "why": "home again"}
        fixed = fleet.post("traffic/overrides", home)
        eventually(lambda: shares_in_force(fleet, EAST) == {EAST: 1.0})
        eventually(lambda: not fleet.api(f"traffic/overrides/{fixed['id']}")["active"])

    answers = under_load(fleet, evacuate_and_take_back)
    assert [answer for answer in answers if answer.error] == []
    meanwhile = [answer.cell for answer in answers if emptied_at < answer.began < back_at]
    assert meanwhile
    assert all(f"-{WEST}-" in cell for cell in meanwhile)
    assert shares_in_force(fleet, EAST) == {EAST: 1.0}
