"""What operators do through the API, on the running fleet."""

import pytest

from tests.scenarios.running_fleet import RunningFleet, eventually
from tests.scenarios.test_healing import under_load

pytestmark = [pytest.mark.scenario, pytest.mark.timeout(900)]


def test_a_drained_cell_loses_no_request_and_is_replaced(fleet: RunningFleet) -> None:
    cell = next(iter(fleet.cells(deployment="sim-70b", region="us-east-1")))

    def drain(_: object) -> None:
        fleet.post(f"cells/{cell}/drain")
        eventually(lambda: fleet.api(f"cells/{cell}")["state"] == "stopped")

    assert [answer for answer in under_load(fleet, drain) if answer.error] == []
    eventually(lambda: len(fleet.cells(deployment="sim-70b", region="us-east-1", state="ready")) == 2)


def test_scaling_down_and_up_again_follows_the_wanted_number(fleet: RunningFleet) -> None:
    def scale(cells: int) -> None:
        fleet.patch("deployments/sim-70b", {"regions": [{"region": "us-west-2", "cells": cells}]})
        eventually(
            lambda: (
                len(fleet.cells(deployment="sim-70b", region="us-west-2", state="ready")) == cells
                and len(fleet.cells(deployment="sim-70b", region="us-west-2")) == cells
            )
        )

    scale(1)
    scale(2)


def test_a_second_start_continues_from_the_stored_state(fleet: RunningFleet) -> None:
    before = fleet.cells()
    fleet.down()
    assert fleet.processes() == []
    fleet.up()
    after = fleet.cells()
    assert {name: [n["id"] for n in cell["nodes"]] for name, cell in after.items()} == {
        name: [n["id"] for n in cell["nodes"]] for name, cell in before.items()
    }
    assert all(after[name]["generation"] == cell["generation"] + 1 for name, cell in before.items())
