"""What we render for Neuron is what its documentation shows, and every bit of it is held by a golden file."""

import pytest

from engine_agent.protocol.neuron_targets import NXDI_SETTINGS
from lab.versions import EXAMPLES, NOT_SERVED, configured, example, rendered


@pytest.mark.parametrize("name", EXAMPLES)
def test_everything_that_the_documentation_shows_is_rendered(name: str) -> None:
    given = example(name)
    ours = rendered(given)
    assert given.documented["flags"].items() <= ours.items()
    settings = given.documented.get("settings", NXDI_SETTINGS)
    override = ours["--additional-config"][settings]
    shown = given.documented[settings]
    assert {key: override.get(key) for key in shown} == shown
    speculative = given.documented.get("speculative_config", {})
    assert speculative.items() <= ours.get("--speculative-config", {}).items()


@pytest.mark.parametrize("name", EXAMPLES)
def test_nothing_else_is_rendered_than_the_golden_file_has(name: str) -> None:
    given = example(name)
    assert rendered(given) == given.rendered


def test_nxdi_is_configured_for_medusa_as_its_documentation_shows() -> None:
    given = example(NOT_SERVED)
    assert configured(given) == given.rendered["--additional-config"]["override_neuron_config"]
    shown = given.documented["override_neuron_config"]
    assert {key: configured(given).get(key) for key in shown} == shown


def test_the_examples_cover_what_a_version_can_state() -> None:
    assert {*EXAMPLES, NOT_SERVED} == {
        "buckets", "prefix_caching", "eagle", "context_and_data_parallel", "int8", "medusa", "two_nodes",
        "inf2", "native_buckets", "native_eagle3", "trn2",
    }  # fmt: skip
