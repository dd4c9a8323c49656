"""Proposals: the cheapest that validates on each instance type, and why others do not fit."""

from dataclasses import replace

from lab.versions import P5, spec
from models_registry.instance_types.planner import INSTANCE_TYPES, InstanceShape
from models_registry.versions.planning.proposals import Proposal, propose
from models_registry.versions.planning.spec import HeadCounts
from tests.models_registry.versions.planning.test_checkpoint import DEEPSEEK_V3, LLAMA_8B, LLAMA_70B
from tests.models_registry.versions.planning.test_memory import SMOLLM2, checkpoint

VERSION = spec("vllm", P5, heads=HeadCounts(), context_length=8192)


def proposed(config: dict[str, object], **machines: InstanceShape) -> dict[str, Proposal]:
    return {each.instance_type: each for each in propose(VERSION, checkpoint(config), machines or INSTANCE_TYPES)}


def test_types_are_ranked_by_price_per_token_that_fits() -> None:
    found = list(proposed(LLAMA_70B).values())
    priced = [each for each in found if each.price]
    assert found[: len(priced)] == priced
    assert [each.price for each in priced] == sorted(each.price for each in priced)
    assert priced[0].instance_type == "g7e.48xlarge"
    assert priced[0].memory is not None
    assert priced[0].price == priced[0].price_per_hour / priced[0].memory.tokens * 1e6
    impossible = [each for each in found if each.problem]
    assert found[len(found) - len(impossible) :] == impossible
    assert "c7i.2xlarge" not in {each.instance_type for each in found}


def test_more_nodes_are_proposed_only_if_fewer_do_not_fit() -> None:
    found = proposed(LLAMA_8B)
    assert {found[name].degrees.nodes for name in ("g6e.xlarge", "p5.48xlarge", "trn2.48xlarge", "local.cpu")} == {1}
    assert (found["g6f.4xlarge"].problem, found["g6f.4xlarge"].degrees.nodes) == ("", 2)
    trn2 = proposed(DEEPSEEK_V3)["trn2.48xlarge"]
    assert (trn2.problem, trn2.degrees.nodes, trn2.degrees.tp) == ("", 2, 128)


def test_degrees_divide_the_heads_and_engines_follow_the_accelerator() -> None:
    found = proposed(SMOLLM2)
    assert found["p5.48xlarge"].degrees.tp == 3
    assert {each.engine for name, each in found.items() if name[:3] in ("trn", "inf")} == {"neuron"}
    assert "it runs on trainium" in found["inf1.xlarge"].problem
    assert found["g6.12xlarge"].quantization == "fp8"
    assert proposed({**LLAMA_8B, "quantization_config": {"quant_method": "awq"}})["g6.12xlarge"].quantization == ""


def test_a_type_that_does_not_fit_says_why_on_one_node_and_on_several() -> None:
    tiny = InstanceShape("tiny.gpu", "t4", 1, 1, 16, 0.5)
    found = proposed(DEEPSEEK_V3, tiny=tiny)["tiny.gpu"]
    assert found.problem.startswith("its weights need 1249.")
    assert "; with 8 nodes: its weights need 15" in found.problem


def test_a_cpu_of_unknown_size_is_proposed_with_its_note() -> None:
    found = proposed(LLAMA_70B)["local.cpu"]
    assert (found.problem, found.price) == ("", 0.0)
    assert found.memory is not None
    assert "stands for any host" in found.memory.notes[0]


def test_what_a_version_states_for_one_engine_does_not_reach_another() -> None:
    stated = replace(VERSION, engine_options={"gpu_memory_utilization": 0.5, "enforce_eager": True})
    half = {each.instance_type: each for each in propose(stated, checkpoint(LLAMA_8B), INSTANCE_TYPES)}
    whole = proposed(LLAMA_8B)
    for name, is_smaller in (("p5.48xlarge", True), ("trn1.32xlarge", False)):
        memory, before = half[name].memory, whole[name].memory
        assert memory is not None
        assert before is not None
        assert (memory.tokens < before.tokens) is is_smaller
