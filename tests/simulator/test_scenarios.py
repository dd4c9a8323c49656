"""Every scenario meets its expectations for some seeds; `make simulate` tries many more."""

import os
import subprocess
import sys

import pytest

from simulator.scenario import run
from simulator.scenarios import UnknownScenario, scenario_named, scenario_names

pytestmark = pytest.mark.processes

LARGE = {"region_2500_rollout", "day_10000_nodes", "day_80000_chips"}
SMALL = tuple(name for name in scenario_names() if name not in LARGE)


@pytest.mark.parametrize("name", SMALL)
def test_scenario_holds(name: str) -> None:
    outcome = run(scenario_named(name), seed=1)

    assert outcome.failures == (), f"python -m simulator {name} --first-seed 1 -v"


@pytest.mark.long
def test_a_run_repeats_itself() -> None:
    scenario = scenario_named("rollout_and_scale_up")

    first, second = run(scenario, 5).world, run(scenario, 5).world

    assert first.timeline.entries == second.timeline.entries
    assert first.queue.done == second.queue.done


def test_a_run_repeats_itself_in_another_process() -> None:
    """Sets of names have another order there."""
    command = [sys.executable, "-m", "simulator", "rollout_under_faults", "--first-seed", "43", "-v"]
    outputs = [
        subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": order}, capture_output=True, text=True, check=True
        ).stdout.rpartition(" in ")[0]
        for order in ("1", "2")
    ]

    assert "last seed 43" in outputs[0]
    assert outputs[0] == outputs[1]


def test_an_unknown_scenario_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownScenario, match=r"'nothing'.*zone_silent"):
        scenario_named("nothing")
