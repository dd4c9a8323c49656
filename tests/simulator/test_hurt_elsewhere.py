"""Faults that hurt users of other systems: each has a test of its planners whose name states it, and a scenario.

`test_scenarios.py` runs the scenarios; `make simulate S=… SEEDS=200` runs each with many seeds.
"""

from importlib import import_module

import pytest

from simulator.scenarios import scenario_names

FLEET = "tests.fleet"
HURT = {
    "a new version that becomes ready and then fails": (
        f"{FLEET}.rollouts.test_whole_rollouts",
        "test_a_bad_version_touches_one_cell_and_is_rolled_back_while_the_others_serve",
        "bad_version_fails_after_ready",
    ),
    "a version that never starts, while healthy cells survive": (
        f"{FLEET}.rollouts.test_whole_rollouts",
        "test_a_bad_version_touches_one_cell_and_is_rolled_back_while_the_others_serve",
        "bad_version_never_starts",
    ),
    "a rollout without any spare": (
        f"{FLEET}.rollouts.test_whole_rollouts",
        "test_in_place_without_any_spare_ends_on_the_machines_that_there_are",
        "rollout_without_spares",
    ),
    "a rollout and a scale-up at once": (
        f"{FLEET}.rollouts.test_whole_rollouts",
        "test_a_rollout_and_a_scale_up_at_once_both_come_to_their_end",
        "rollout_and_scale_up",
    ),
    "all agents silent at once, and no action": (
        f"{FLEET}.reconcile.test_properties",
        "test_all_agents_silent_at_once_is_an_incident_and_no_action",
        "all_silent",
    ),
    "60 % of a zone silent, which freezes it": (
        f"{FLEET}.faults.test_guards",
        "test_sixty_percent_of_a_zone_silent_freezes_it_whoever_witnesses",
        "zone_silent",
    ),
    "one probe that fails for a moment, and no action": (
        f"{FLEET}.reconcile.test_properties",
        "test_one_failed_probe_changes_nothing",
        "probe_fails_for_a_moment",
    ),
    "a leader whose /health is 200 while its follower is dead": (
        f"{FLEET}.reconcile.test_properties",
        "test_a_leader_that_answers_200_does_not_hide_that_its_followers_engine_is_dead",
        "leader_200_follower_dead",
    ),
    "a worker that was told to start twice": (
        "tests.engine_agent.node.planning.test_converge",
        "test_a_worker_that_is_told_to_start_twice_starts_once",
        "told_to_start_twice",
    ),
    "stale verdicts after a node came back": (
        f"{FLEET}.reconcile.test_properties",
        "test_a_stale_verdict_does_nothing_to_a_node_that_came_back",
        "stale_verdicts",
    ),
}
"""The fault: the module and the name of the test, and the scenario."""


@pytest.mark.parametrize("hurt", HURT)
def test_it_has_a_test_and_a_scenario(hurt: str) -> None:
    module, test, scenario = HURT[hurt]

    assert callable(getattr(import_module(module), test))
    assert scenario in scenario_names()
