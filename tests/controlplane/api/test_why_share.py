"""Why requests of a region go where they go, and other settings for a recorded pass, over HTTP."""

import pytest

from tests.controlplane.api.client import bearer, rules
from tests.fleet.rows import NOW
from tests.traffic.steered import EAST, WEST, Steered
from traffic.region_shares.models import TrafficMatrix

pytestmark = [pytest.mark.django_db, pytest.mark.slow]


def test_a_share_tells_what_is_in_force_and_what_moved_it() -> None:
    fleet = Steered({EAST: 3, WEST: 3}, {EAST: 12.0, WEST: 12.0})
    fleet.record()
    fleet.run(2)
    found = bearer().get("/api/v1/why/share/sim-70b@us-east-1?alternatives=true").json()
    assert found["now"] == ["Requests from us-east-1 go to us-east-1 100%."]
    assert [one["decision"] for one in found["decisions"]] == ["PublishTable", "ShiftTraffic"]
    assert found["decisions"][1]["inputs"]["from us-east-1"] == "none -> us-east-1 100%"
    assert [one["name"] for one in found["decisions"][0]["alternatives"]] == ["sim-70b to us-west-2"]
    TrafficMatrix.objects.update(held="reports are stale", held_since=NOW)
    held = bearer().get("/api/v1/why/share/sim-70b?limit=1").json()
    assert held["now"][-1] == "The shares have been kept since 2026-11-21 12:00:00: reports are stale."
    number = held["decisions"][0]["round"]
    other = bearer().get(f"/api/v1/replay/rounds/{number}?set=publication.load_bound=1.25").json()
    assert (other["same"], other["rounds"][0]["loop"]) == (False, "publication")
    assert bearer().get(f"/api/v1/replay/rounds/{number}?set=autopilot.step=0.2").json()["same"] is True
    refused = bearer().get(f"/api/v1/replay/rounds/{number}?set=publication.load_bound=0")
    assert (refused.status_code, list(rules(refused))) == (400, ["set"])
    assert bearer().get("/api/v1/why/share/sim-70b@nowhere").status_code == 404
