"""What we render for Neuron is what its documentation shows, and every bit of it is held by a golden file."""

import pytest

from tests.models_registry.planning.documented import EXAMPLES, example, rendered


@pytest.mark.parametrize("name", EXAMPLES)
def test_everything_that_the_documentation_shows_is_rendered(name: str) -> None:
    given = example(name)
    ours = rendered(given)
    assert given.documented["flags"].items() <= ours.items()
    override = ours["--additional-config"]["override_neuron_config"]
    shown = given.documented["override_neuron_config"]
    assert {key: override.get(key) for key in shown} == shown
    speculative = given.documented.get("speculative_config", {})
    assert speculative.items() <= ours.get("--speculative-config", {}).items()


@pytest.mark.parametrize("name", EXAMPLES)
def test_nothing_else_is_rendered_than_the_golden_file_has(name: str) -> None:
    given = example(name)
    assert rendered(given) == given.rendered


def test_the_examples_cover_what_a_version_can_state() -> None:
    assert set(EXAMPLES) == {
        "buckets", "prefix_caching", "eagle", "context_and_data_parallel", "int8", "medusa", "two_nodes",
    }  # fmt: skip
