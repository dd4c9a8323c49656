"""Versions rendered for each role, and the fingerprint of the KV layout."""

from dataclasses import replace
from typing import Any

import pytest

from engine_agent.protocol.states import CellRole
from models_registry.instance_types.planner import InstanceShape
from models_registry.versions.planning.roles import apart_objection, kv_layout, read_roles, render_role, role_spec
from models_registry.versions.planning.spec import InvalidVersion, VersionSpec

MACHINE = InstanceShape("gpu.8", "nvidia", 8, 8, 640, 8)
SPEC = VersionSpec(
    model="llama",
    version="3",
    engine="vllm",
    artifact_uri="file:///srv/llama",
    artifact_digest="sha256:" + "a" * 64,
    context_length=8192,
    max_concurrency=32,
    ready_timeout_s=300,
    parallelism={"gpu.8": {"tp": 8}},
    engine_options={"block_size": 16},
    roles={
        "prefill": {"engine_options": {"max_num_batched_tokens": 8192}, "max_concurrency": 8},
        "decode": {"parallelism": {"gpu.8": {"tp": 4}}},
    },
)


def test_each_role_has_its_own_options_and_split() -> None:
    prefill, decode = (render_role(SPEC, role, MACHINE) for role in (CellRole.PREFILL, CellRole.DECODE))

    assert (prefill.degrees.tp, decode.degrees.tp) == (8, 4)
    assert (prefill.plan.max_concurrency, decode.plan.max_concurrency) == (8, 32)
    assert "--max-num-batched-tokens" in prefill.plan.args
    assert "--max-num-batched-tokens" not in decode.plan.args
    assert render_role(SPEC, CellRole.MIXED, MACHINE).degrees.tp == 8


def test_a_version_without_roles_is_the_same_in_each() -> None:
    plain = replace(SPEC, roles={})

    assert role_spec(plain, CellRole.DECODE, MACHINE.name) == plain


def test_cells_pair_within_one_instance_type() -> None:
    other = replace(MACHINE, name="gpu.8n")
    both = replace(SPEC, parallelism={"gpu.8": {"tp": 8}, "gpu.8n": {"tp": 8}}, roles={})
    assert kv_layout(both, MACHINE) != kv_layout(both, other)
    assert kv_layout(both, MACHINE) == kv_layout(both.on(MACHINE.name), MACHINE)


def test_a_role_may_be_another_on_one_instance_type() -> None:
    there = replace(SPEC, by_type={"gpu.8": {"roles": {"decode": {"max_concurrency": 4}}}})
    assert role_spec(there, CellRole.DECODE, "gpu.8").max_concurrency == 4
    assert role_spec(there, CellRole.PREFILL, "gpu.8").max_concurrency == SPEC.max_concurrency
    assert render_role(there, CellRole.DECODE, MACHINE).degrees.tp == 8


def test_the_layout_is_that_of_both_roles_and_of_what_is_handed_over() -> None:
    layout = kv_layout(SPEC, MACHINE)

    assert layout == kv_layout(replace(SPEC, version="4", max_concurrency=64, golden_waiver="none"), MACHINE)
    assert layout == kv_layout(replace(SPEC, engine_options={"block-size": 16}), MACHINE)


@pytest.mark.parametrize(
    "change",
    [
        {"artifact_digest": "sha256:" + "b" * 64},
        {"engine_options": {"block_size": 32}},
        {"engine_options": {"block_size": 16, "dtype": "float16"}},
        {"engine_options": {"block_size": 16, "kv_cache_dtype": "fp8"}},
        {"quantization": {"method": "fp8"}},
        {"parallelism": {"gpu.8": {"tp": 4}}},
        {"roles": {}},
    ],
)
def test_whatever_changes_what_is_handed_over_changes_the_layout(change: dict[str, Any]) -> None:
    assert kv_layout(replace(SPEC, **change), MACHINE) != kv_layout(SPEC, MACHINE)


def test_software_is_part_of_the_layout_where_it_is_known() -> None:
    assert kv_layout(SPEC, MACHINE, "vllm 0.32.0") != kv_layout(SPEC, MACHINE, "vllm 0.33.0")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"engine": "neuron", "roles": {}}, "engine neuron does not hand over, sim and vllm do"),
        ({"engine": "generic", "roles": {}}, "engine generic does not hand over"),
        ({"engine": "llama-cpp", "roles": {}}, "engine llama-cpp does not hand over"),
        ({"parallelism": {"gpu.8": {"nodes": 2, "tp": 2}}, "roles": {}}, "its cells have 2 nodes"),
        ({"parallelism": {"gpu.8": {"pp": 2, "tp": 4}}, "roles": {}}, "its cells have 2 pipeline stages"),
        ({"adapters": ({"name": "x", "artifact_uri": "file:///srv/x"},)}, "keep its cells mixed"),
        ({"speculation": {"method": "eagle", "model": "x"}}, "speculation.method is 'eagle'"),
        (
            {"roles": {"decode": {"parallelism": {"gpu.8": {"tp": 3}}}}},
            "tp of prefill cells is 8 and of decode cells 3",
        ),
    ],
)
def test_says_why_cells_cannot_be_told_apart(change: dict[str, Any], words: str) -> None:
    assert words in apart_objection(replace(SPEC, **change), MACHINE)


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        ({"prefil": {}}, "names 'prefil'; it must be one of prefill, decode"),
        ({"prefill": []}, "roles.prefill is []; it must be an object"),
        ({"prefill": {"options": {}}}, "roles.prefill names 'options'"),
        ({"decode": {"max_concurrency": 0}}, "roles.decode.max_concurrency is 0; it must be a whole number from 1"),
        ({"decode": {"engine_options": {"kv-cache-dtype": "fp8"}}}, "it must be equal in cells that hand over"),
        ({"decode": {"parallelism": {"gpu.9": {"tp": 2}}}}, "the version has no parallelism for it"),
        ({"decode": {"parallelism": {"gpu.8": {"nodes": 2, "tp": 2}}}}, "names 'nodes'"),
    ],
)
def test_names_what_is_wrong_with_roles(roles: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidVersion) as refused:
        read_roles(replace(SPEC, roles=roles))

    assert words in str(refused.value)
