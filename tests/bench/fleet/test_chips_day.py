"""The day of 80,000 chips: its fleet in full, and a short day of few cells."""

from dataclasses import replace

import pytest

from bench.fleet.chips_day import cells_of, measured
from simulator.scenario import run
from simulator.scenarios import scenario_named
from simulator.scenarios.regions import CHIPS_PER_NODE, LARGEST, LOST_REGION, cells_by_deployment, day_of_regions

CELLS = 27


def test_the_scenario_has_80000_chips_in_5000_cells() -> None:
    fleet = scenario_named("day_80000_chips").fleet

    cells = {spec.name: sum(spec.cells.values()) for spec in fleet.deployments}
    nodes = sum(spec.size * cells[spec.name] for spec in fleet.deployments)

    assert (sum(cells.values()), nodes, nodes * fleet.devices) == (5000, 20_000, 80_000)
    assert fleet.devices == CHIPS_PER_NODE
    assert len(fleet.regions) == 3
    assert max(cells, key=lambda name: cells[name]) == LARGEST


@pytest.mark.parametrize("cells", [25, CELLS, 100, 4999])
def test_cells_are_spread_evenly_over_the_regions(cells: int) -> None:
    spread = cells_by_deployment(cells)

    by_region = [sum(regions[name] for regions in spread.values()) for name in next(iter(spread.values()))]

    assert sum(by_region) == cells
    assert max(by_region) - min(by_region) <= 2


@pytest.mark.slow
def test_a_lost_region_costs_its_cells_and_all_come_back() -> None:
    row = measured(day_of_regions(CELLS, hours=2.0), seed=1)

    lost = sum(regions[LOST_REGION] for regions in cells_by_deployment(CELLS).values())
    assert (row["broken"], row["back"], row["wanted"]) == (0, CELLS, CELLS)
    assert (CELLS - lost - 1) / CELLS <= row["worst_lost"] <= (CELLS - lost) / CELLS
    assert row["faults"] == 2
    assert cells_of(row)[1] == "27 of 27"


def test_a_region_that_stays_lost_fails_the_expectation() -> None:
    scenario = day_of_regions(CELLS, hours=2.0)

    outcome = run(replace(scenario, until_s=scenario.until_s / 2 + 100.0), seed=1)

    assert f"{LOST_REGION} is still lost" in outcome.failures
