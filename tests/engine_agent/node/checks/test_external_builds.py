"""A build of the machine's image is found by the packages of its environments, and named if there is none."""

import os
from pathlib import Path
from typing import Any, cast

import pytest

from engine_agent.engines.base import EngineUnavailable
from engine_agent.engines.builds.store import host_facts
from engine_agent.node.builds import NodeBuilds
from engine_agent.node.checks.external_builds import environments, neuron_environment
from engine_agent.protocol.engine_builds import BadBuild, EngineBuild, external_facts, external_target
from engine_agent.protocol.neuron_targets import TARGETS

OF_2_28 = {"vllm_neuron": "0.4.1", "vllm": "0.13.0", "neuronx_distributed_inference": "0.8.16251", "torch": "2.9.1"}
OF_2_29 = {"vllm_neuron": "0.5.0", "vllm": "0.16.0", "neuronx_distributed_inference": "0.9.17334"}


def put(root: Path, name: str, packages: dict[str, str], python: str = "3.12") -> Path:
    """An environment of the image, with the files of these packages."""
    folder = root / "opt" / f"aws_neuronx_venv_{name}"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/python").touch()
    for package, version in packages.items():
        (folder / f"lib/python{python}/site-packages/{package}-{version}.dist-info").mkdir(parents=True)
    return folder / "bin/python"


def ordered(sdk: str) -> EngineBuild:
    uri = f"external://neuron-{sdk}"
    digest, facts = external_facts(uri)
    return EngineBuild(f"neuron-{sdk}", digest, uri, facts)


def builds(root: Path) -> NodeBuilds:
    host = host_facts()
    fits = type(host)("x86_64", host.cpu_flags, "2.34")
    return NodeBuilds(root / "cache/builds", cast(Any, None), lambda: fits, root=root)


def test_the_environment_of_the_named_release_is_run_and_its_versions_are_in_the_fingerprint(tmp_path: Path) -> None:
    put(tmp_path, "jax_0_7", {"jax": "0.7.0"})
    wanted = put(tmp_path, "pytorch_inference_vllm", OF_2_28)
    put(tmp_path, "pytorch_inference_vllm_0_16", OF_2_29)
    held = builds(tmp_path).obtain(ordered("2.28"))
    assert held is not None
    os.close(held.lock)
    assert held.program == wanted
    assert (held.stack["plugin"], held.stack["torch"]) == ("vllm_neuron 0.4.1", "torch 2.9.1")


def test_a_machine_without_it_says_what_it_has_instead(tmp_path: Path) -> None:
    put(tmp_path, "jax_0_7", {"jax": "0.7.0"})
    put(tmp_path, "vllm", OF_2_28)
    put(tmp_path, "vllm_mixed", {**OF_2_29, "vllm": "0.17.0"})
    put(tmp_path, "vllm_old", OF_2_29, python="3.10")
    with pytest.raises(EngineUnavailable) as refused:
        builds(tmp_path).obtain(ordered("2.29"))
    text = str(refused.value)
    assert "build neuron-2.29 is nxdi-2.29 (Neuron SDK 2.29" in text
    assert "aws_neuronx_venv_jax_0_7 has no vllm-neuron; " in text
    assert "aws_neuronx_venv_vllm is nxdi-2.28; " in text
    assert "aws_neuronx_venv_vllm_mixed is none: vllm is 0.17.0; vllm-neuron 0.5.0 needs 0.16.*" in text
    assert "aws_neuronx_venv_vllm_old has Python 3.10; 3.11 is needed" in text
    with pytest.raises(EngineUnavailable, match=r"has none: there is no /opt/aws_neuronx_venv_\*"):
        builds(tmp_path / "bare").obtain(ordered("2.29"))


def test_an_order_for_a_release_that_this_agent_does_not_know_is_refused(tmp_path: Path) -> None:
    later = EngineBuild("neuron-9.9", "sha256:" + "0" * 64, "external://neuron-9.9", ordered("2.29").facts)
    with pytest.raises(EngineUnavailable, match=r"is no external build; there are external://neuron-2\.28"):
        builds(tmp_path).obtain(later)


def test_doctor_examines_the_environment_of_its_target_else_any_with_the_plugin(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert neuron_environment(cache, root=tmp_path) is None
    jax = put(tmp_path, "jax_0_7", {"jax": "0.7.0"})
    assert neuron_environment(cache, root=tmp_path) == jax
    newer, older = put(tmp_path, "vllm_b", OF_2_29), put(tmp_path, "vllm_c", OF_2_28)
    assert neuron_environment(cache, "nxdi-2.28", root=tmp_path) == older
    assert neuron_environment(cache, "native-0.24", root=tmp_path) == newer
    (cache / "engines/neuron/bin").mkdir(parents=True)
    (cache / "engines/neuron/bin/python").touch()
    assert environments(cache, tmp_path)[0] == cache / "engines/neuron/bin/python"


def test_each_release_has_a_name_and_a_digest() -> None:
    assert len({external_facts(f"external://neuron-{target.sdk}")[0] for target in TARGETS}) == len(TARGETS)
    assert [external_target(f"external://neuron-{target.sdk}") for target in TARGETS] == list(TARGETS)
    with pytest.raises(BadBuild, match=r"there are external://neuron-2\.28, external://neuron-2\.29"):
        external_target("external://neuron-2.28/../../etc")
