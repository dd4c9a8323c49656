"""What operators do through the API, on the running fleet."""

import pytest

from tests.scenarios.running_fleet import AskedFleet, eventually
from tests.scenarios.test_healing import under_load

pytestmark = [pytest.mark.long, pytest.mark.scenario, pytest.mark.timeout(900)]


@pytest.mark.anywhere
def test_a_drained_cell_loses_no_request_and_is_replaced(fleet: AskedFleet) -> None:
    cells = fleet.cells(deployment="sim-70b", region="us-east-1")
    cell = next(iter(cells))

    def drain(_: object) -> None:
        fleet.post(f"cells/{cell}/drain")
        eventually(lambda: fleet.api(f"cells/{cell}")["state"] == "stopped")

    assert [answer for answer in under_load(fleet, drain) if answer.error] == []
    eventually(lambda: len(fleet.cells(deployment="sim-70b", region="us-east-1", state="ready")) == len(cells))


def test_scaling_down_and_up_again_follows_the_wanted_number(fleet: AskedFleet) -> None:
    for cells in (1, 2):
        fleet.scale("sim-70b", "us-west-2", cells)
