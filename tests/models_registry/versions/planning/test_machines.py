"""Degrees: defaults of machines, and the errors of unsupported splits."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.versions import INF2, LOCAL, P5, TRN1, spec
from models_registry.instance_types.planner import INSTANCE_TYPES, InstanceShape
from models_registry.versions.planning.engine_arguments import render_version
from models_registry.versions.planning.machines import NAMES, NEURON_RANKS_PER_NODE, Degrees
from models_registry.versions.planning.spec import HeadCounts, InvalidVersion

SMOLLM2 = HeadCounts(attention=9, kv=3, layers=30)
NGRAM = {"method": "ngram", "tokens": 3, "lookup_max": 3, "lookup_min": 1}


@pytest.mark.parametrize(("machine", "degree"), [(TRN1, 32), (INF2, 24), (P5, 8), (LOCAL, 1)])
def test_a_machine_has_the_degree_that_the_table_says(machine: InstanceShape, degree: int) -> None:
    engine = "neuron" if machine in {TRN1, INF2} else "vllm"
    found = render_version(spec(engine, machine), machine)
    assert found.degrees == Degrees(tp=degree)
    assert (f"--tensor-parallel-size {degree}" in " ".join(found.plan.args)) == (degree > 1)


def test_the_default_counts_over_the_whole_cell_and_leaves_room_for_stages() -> None:
    two = render_version(spec("neuron", TRN1, {"nodes": 2}), TRN1)
    assert (two.degrees.tp, two.degrees.ranks_per_node) == (64, 32)
    staged = render_version(spec("vllm", P5, {"pp": 2}), P5)
    assert (staged.degrees.tp, staged.degrees.world_size) == (4, 8)
    assert staged.plan.args[-4:] == ("--pipeline-parallel-size", "2", "--tensor-parallel-size", "4")


@pytest.mark.parametrize(
    ("degrees", "found"),
    [
        ({"nodes": 2}, Degrees(2, tp=16)),
        ({"nodes": 2, "pp": 2}, Degrees(2, tp=8, pp=2)),
        ({"nodes": 4, "tp": 8, "pp": 2}, Degrees(4, tp=8, pp=2)),
        ({"nodes": 2, "tp": 2, "pp": 4}, Degrees(2, tp=2, pp=4)),
    ],
    ids=["tensor-parallel across all", "a stage per node", "a stage on two nodes", "two stages on a node"],
)
def test_a_vllm_cell_of_several_nodes_uses_several_devices_of_each(degrees: dict[str, int], found: Degrees) -> None:
    rendering = render_version(spec("vllm", P5, degrees), P5)
    assert rendering.degrees == found
    stages = f"--pipeline-parallel-size {found.pp} " if found.pp > 1 else ""
    assert f"{stages}--tensor-parallel-size {found.tp}" in " ".join(rendering.plan.args)


@pytest.mark.parametrize(
    ("engine", "machine", "degrees", "changes", "message"),
    [
        ("vllm", P5, {"tp": 16}, {}, r"p5.48xlarge.tp is 16; .* = 16 ranks on 1 x 8 cores .* at most 8, or nodes = 2$"),
        ("vllm", P5, {"nodes": 2, "tp": 1}, {}, r"tp is 1; every node has .* a multiple of nodes = 2"),
        ("vllm", P5, {"nodes": 4, "tp": 2, "pp": 6}, {}, r"tp is 2; over several nodes .* divide the 3 ranks of"),
        ("vllm", P5, {"nodes": 2, "tp": 8, "pp": 2}, {"speculation": NGRAM}, r"pp is 2; .* stages with speculation"),
        ("vllm", LOCAL, {"nodes": 2, "tp": 4}, {}, r"tp is 4; .* = 4 ranks on 2 x 1 cores .* at most 2, or nodes = 4$"),
        ("vllm", P5, {"tp": 2}, {"heads": SMOLLM2}, r"tp is 2; it must divide 9 attention heads: use one of 1, 3"),
        ("vllm", P5, {"tp": 4}, {"heads": HeadCounts(12, 6)}, r"it must divide 6 KV heads .* use one of 1, 2, 3, 6"),
        ("vllm", LOCAL, {"nodes": 2}, {"heads": SMOLLM2}, r"tp is 2; .* no value fits 2 nodes; pad the heads"),
        ("vllm", P5, {"tp": 1, "pp": 8}, {"heads": HeadCounts(layers=4)}, r"pp is 8; .* it must be at most 4"),
        ("vllm", P5, {"cp": 2}, {}, r"cp is 2; context parallelism needs engine neuron; on engine vllm it must be 1"),
        ("vllm", P5, {"dp": 2}, {}, r"dp is 2; engine vllm supports 1: add cells"),
        ("vllm", TRN1, {}, {}, r"engine is 'vllm'; it does not run on trainium of trn1.32xlarge, engine neuron does"),
        ("neuron", P5, {}, {}, r"engine is 'neuron'; p5.48xlarge has h100, and it runs on trainium, trainium2, infer"),
        ("neuron", TRN1, {"tp": 4}, {}, r"that is 4 ranks per node, .* trainium support 1, 2, 8, 16, 32"),
        ("neuron", INF2, {"nodes": 2, "tp": 32}, {}, r"16 ranks per node, .* inferentia2 support 1, 2, 4, 8, 24"),
        ("neuron", TRN1, {"cp": 3}, {}, r"cp is 3; it must divide tp = 32"),
        ("neuron", TRN1, {"dp": 5}, {}, r"dp is 5; it must divide tp = 32"),
        ("neuron", TRN1, {"dp": 2}, {"max_concurrency": 1}, r"dp is 2; .* max_concurrency must be over 1, not 1"),
        ("neuron", TRN1, {"dp": 8}, {"max_concurrency": 12}, r"dp is 8; it must divide max_concurrency = 12"),
        ("neuron", TRN1, {"cp": 4, "dp": 8}, {}, r"dp is 8; if both are over 1 it must divide cp = 4"),
        ("neuron", TRN1, {"tp": 8, "dp": 2}, {}, r"dp is 2; each rank has 2 of 8 KV heads in decode and 1 .*less"),
        ("neuron", TRN1, {"cp": 16, "dp": 8}, {}, r"dp is 8; with a different cp, .* at least 8.*; it is 4"),
        ("neuron", TRN1, {}, {"heads": SMOLLM2}, r"tp is 32; the model has 9 .* heads; more ranks would be idle"),
        ("neuron", TRN1, {"tpp": 2}, {}, r"names .tpp.; it must be one of nodes, tp, cp, dp, pp, within \(did"),
        ("neuron", TRN1, {"tp": True}, {}, r"tp is True; it must be a whole number from 1"),
        ("neuron", TRN1, {"tp": "32"}, {}, r"tp is '32'; it must be a whole number from 1"),
        ("neuron", TRN1, {"pp": 0}, {}, r"pp is 0; it must be a whole number from 1"),
        ("neuron", TRN1, {"within": "any"}, {}, r"within is 'any'; it must be a whole number from 1"),
        ("neuron", TRN1, {"within": 9}, {}, r"within is 9; it must be from 1 to 8, or left out if nodes may be an"),
    ],
)  # fmt: skip
def test_a_split_that_cannot_run_is_refused_with_field_value_and_rule(
    engine: str, machine: InstanceShape, degrees: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidVersion, match=message):
        render_version(spec(engine, machine, degrees, **changes), machine)


def test_neuron_pads_and_copies_heads_and_says_so() -> None:
    *notes, target = render_version(spec("neuron", INF2), INF2).notes
    assert notes == [
        "tp = 24 does not divide 64 attention heads: NxDI pads them to 72",
        "8 KV heads on tp = 24: NxDI keeps 3 copies of each",
    ]
    assert target.startswith("rendered for nxdi-2.28 (Neuron SDK 2.28: vllm-neuron 0.4.*, vllm 0.13.*")
    odd = render_version(spec("neuron", TRN1, heads=HeadCounts(64, 6)), TRN1).notes
    assert odd[:-1] == ("tp = 32 is not a multiple of 6 KV heads: NxDI gives every attention head its own copy",)
    fewer = render_version(spec("neuron", TRN1, {"tp": 2}), TRN1).notes
    assert fewer[:-1] == ("tp = 2 is not a multiple of 8 KV heads: NxDI gives every attention head its own copy",)
    assert render_version(spec("neuron", TRN1, {"tp": 8}), TRN1).notes == (target,)


def test_what_nobody_stated_is_not_checked() -> None:
    unknown = InstanceShape("own.gpu", "l4", tensor_parallel_degree=3)
    assert render_version(spec("vllm", unknown, heads=HeadCounts()), unknown).degrees.tp == 3


def test_the_simulator_takes_any_degrees() -> None:
    assert render_version(spec("sim", LOCAL, {"nodes": 2, "tp": 7}), LOCAL).degrees == Degrees(nodes=2, tp=7)


@given(
    degrees=st.dictionaries(st.sampled_from(NAMES), st.integers(1, 70), max_size=5),
    name=st.sampled_from(sorted(INSTANCE_TYPES)),
    engine=st.sampled_from(["vllm", "neuron"]),
    batch=st.integers(1, 64),
)
def test_whatever_is_accepted_fits_the_cores_and_divides(
    degrees: dict[str, int], name: str, engine: str, batch: int
) -> None:
    machine = INSTANCE_TYPES[name]
    try:
        found = render_version(spec(engine, machine, degrees, max_concurrency=batch), machine).degrees
    except InvalidVersion:
        return
    assert found.world_size <= found.nodes * machine.cores
    assert found.world_size % found.nodes == 0
    assert found.tp % found.cp == found.tp % found.dp == batch % found.dp == 0
    if engine == "neuron":
        assert found.ranks_per_node in NEURON_RANKS_PER_NODE[machine.accelerator]
    else:
        assert 64 % found.tp == 0
        assert (found.cp, found.dp) == (1, 1)
