"""Each supported Neuron stack has a list of packages, which installs what its agent then accepts."""

from pathlib import Path

import pytest
from packaging.requirements import Requirement

from engine_agent.engines.neuron import serve
from engine_agent.protocol.neuron_targets import PLUGIN, TARGETS, NeuronTarget, installed_target

FOLDER = Path(serve.__file__).parent
INDEX = "--extra-index-url https://pip.repos.neuron.amazonaws.com"


def packages(target: NeuronTarget) -> dict[str, str]:
    """The version of each package in a target's list, by its name."""
    lines = (FOLDER / f"requirements-{target.name}.txt").read_text().splitlines()
    assert INDEX in lines
    stated = [Requirement(line) for line in lines if line and not line.startswith(("#", "--"))]
    return {each.name: _version(each) for each in stated}


def _version(requirement: Requirement) -> str:
    if requirement.url is not None:
        return requirement.url.rpartition("@")[2]
    (pin,) = requirement.specifier
    assert pin.operator == "=="
    return pin.version


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_the_list_of_a_target_installs_what_the_adapter_accepts(target: NeuronTarget) -> None:
    assert installed_target(packages(target).get) == target


def test_there_is_one_list_for_each_target() -> None:
    assert {path.name for path in FOLDER.glob("requirements*")} == {f"requirements-{it.name}.txt" for it in TARGETS}


def test_nxdi_comes_with_the_framework_that_it_runs_on_and_the_native_plugin_without() -> None:
    with_torch = {target.name for target in TARGETS if "torch-neuronx" in packages(target)}
    assert with_torch == {target.name for target in TARGETS if "neuronx-distributed-inference" in target.distributions}
    assert all(PLUGIN in packages(target) for target in TARGETS)
