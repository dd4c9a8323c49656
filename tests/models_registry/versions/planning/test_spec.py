"""One version on several instance types: its fields on each, and errors that name type and field."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine_agent.protocol.messages import Artifact
from models_registry.benchmarks.planning.workload import version_digest
from models_registry.instance_types.planner import INSTANCE_TYPES
from models_registry.versions.planning.engine_arguments import check_engine_options, render_version
from models_registry.versions.planning.lifecycle import artifacts_of, evaluate_version
from models_registry.versions.planning.spec import HeadCounts, InvalidVersion, VersionSpec

DIGEST = "sha256:" + "a" * 64
GGUF = "sha256:" + "c" * 64
GPU, CPU, INF2, TRN1, TRN2 = "p5.48xlarge", "local.cpu", "inf2.48xlarge", "trn1.32xlarge", "trn2.48xlarge"
EVERYWHERE = VersionSpec(
    model="llama",
    version="7",
    engine="vllm",
    artifact_uri="s3://models/llama-7",
    artifact_digest=DIGEST,
    context_length=4096,
    max_concurrency=64,
    ready_timeout_s=900.0,
    parallelism={GPU: {"tp": 4}, INF2: {"tp": 8}, TRN1: {"tp": 8}, TRN2: {"tp": 8}, CPU: {}},
    engine_options={"max_num_batched_tokens": 8192, "enforce_eager": True},
    engine_env={"VLLM_LOGGING_LEVEL": "WARNING"},
    golden_prompts=(("2 + 2 =", "4"),),
    heads=HeadCounts(attention=32, kv=8, layers=32),
    speculation={"method": "ngram", "tokens": 3},
    quantization={"method": "fp8"},
    by_type={
        INF2: {"engine": "neuron", "max_concurrency": 4, "ready_timeout_s": 3600},
        TRN1: {
            "engine": "neuron",
            "max_concurrency": 8,
            "ready_timeout_s": 3600,
            "quantization": {"dtype": "int8", "checkpoints_path": "/var/lib/weights/llama-7-int8"},
        },
        TRN2: {
            "engine": "neuron",
            "max_concurrency": 16,
            "artifact_uri": "s3://models/llama-7-neuron",
            "engine_options": {"neuron_target": "nxdi-2.29"},
        },
        CPU: {
            "engine": "llama-cpp",
            "artifact_uri": "s3://models/llama-7-gguf",
            "artifact_digest": GGUF,
            "max_concurrency": 2,
            "engine_options": {"threads": 4, "sleep_idle_seconds": 600},
        },
    },
)
GOLDEN = Path(__file__).parent / "golden_types"


def with_type(kind: str, **stated: Any) -> VersionSpec:
    return replace(EVERYWHERE, by_type={kind: stated})


@pytest.mark.parametrize("kind", EVERYWHERE.instance_types)
def test_one_version_is_rendered_for_each_of_its_instance_types(kind: str) -> None:
    """The golden files were checked against each engine's documentation; a change of one shows here."""
    rendering = render_version(EVERYWHERE, INSTANCE_TYPES[kind])
    rendered = {"degrees": rendering.degrees, "plan": rendering.plan, "notes": rendering.notes}
    assert json.loads(msgspec.json.encode(rendered)) == json.loads((GOLDEN / f"{kind}.json").read_text())


def test_an_instance_type_without_a_word_is_as_the_version_says() -> None:
    on_gpu = EVERYWHERE.on(GPU)
    assert on_gpu.instance_types == (GPU,)
    plain = replace(EVERYWHERE, by_type={}, parallelism={GPU: {"tp": 4}}, differs_on=GPU)
    assert on_gpu == plain


def test_what_belongs_to_an_engine_does_not_go_with_another() -> None:
    on_inf2 = EVERYWHERE.on(INF2)
    assert (on_inf2.engine_options, on_inf2.engine_env, on_inf2.speculation, on_inf2.quantization) == ({}, {}, {}, {})
    assert (on_inf2.artifact_uri, on_inf2.artifact_digest) == (EVERYWHERE.artifact_uri, DIGEST)
    assert on_inf2.golden_prompts == EVERYWHERE.golden_prompts


def test_options_of_the_same_engine_are_laid_over_and_null_takes_one_away() -> None:
    stated = {"max-num-batched-tokens": 2048, "enforce_eager": None, "seed": 1}
    on_gpu = with_type(GPU, engine_options=stated, speculation={}).on(GPU)
    assert on_gpu.engine_options == {"max-num-batched-tokens": 2048, "seed": 1}
    assert on_gpu.engine_env == EVERYWHERE.engine_env
    assert (on_gpu.speculation, on_gpu.quantization) == ({}, {"method": "fp8"})


def test_another_place_of_weights_has_another_digest() -> None:
    moved = with_type(GPU, artifact_uri="s3://models/elsewhere").on(GPU)
    assert (moved.artifact_uri, moved.artifact_digest) == ("s3://models/elsewhere", "")


def test_degrees_of_roles_are_those_of_the_instance_type() -> None:
    roles = {"decode": {"parallelism": {GPU: {"tp": 2}, TRN1: {"tp": 1}}}, "prefill": {"max_concurrency": 8}}
    apart = replace(EVERYWHERE, roles=roles).on(GPU)
    assert apart.roles == {"decode": {"parallelism": {GPU: {"tp": 2}}}, "prefill": {"max_concurrency": 8}}


def test_on_an_instance_type_it_is_no_other_version_there() -> None:
    on_trn2 = EVERYWHERE.on(TRN2)
    assert on_trn2.on(TRN2) == on_trn2
    with pytest.raises(InvalidVersion, match=r"no entry for instance type 'p5.48xlarge' \(it has: trn2.48xlarge\)"):
        on_trn2.on(GPU)


@pytest.mark.parametrize(
    ("by_type", "message"),
    [
        ({"p5e.48xlarge": {}}, r"by_type names 'p5e.48xlarge', which parallelism lacks.*did you mean p5.48xlarge"),
        ({GPU: 3}, r"by_type.p5.48xlarge is 3; it must be an object"),
        ({GPU: {"max_concurency": 3}}, r"by_type.p5.48xlarge names 'max_concurency'; .*did you mean max_concurrency"),
        ({GPU: {"context_length": 9}}, r"by_type.p5.48xlarge names 'context_length'; it must be one of engine, "),
        ({GPU: {"max_concurrency": 0}}, r"by_type.p5.48xlarge.max_concurrency is 0; it must be a whole number from 1"),
        ({GPU: {"ready_timeout_s": 1e6}}, r"ready_timeout_s is 1000000.0; it must be a number from 1 to 86400"),
        ({GPU: {"artifact_uri": ""}}, r"by_type.p5.48xlarge.artifact_uri is ''; it must be a text that is not empty"),
        ({GPU: {"engine_env": "A=1"}}, r"by_type.p5.48xlarge.engine_env is 'A=1'; it must be an object"),
        (
            {GPU: {"engine_options": {"max_model_len": 2048}}},
            r"makes max_model_len 2048 tokens, but elsewhere it is 4096; .* state context_length",
        ),
    ],
)
def test_what_cannot_be_read_is_named_by_type_and_field(by_type: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidVersion, match=message):
        replace(EVERYWHERE, by_type=by_type).on(GPU)


@pytest.mark.parametrize(
    ("kind", "stated", "message"),
    [
        (GPU, {"engine": "neuron"}, r"llama@7 on p5.48xlarge: engine is 'neuron'; p5.48xlarge has h100"),
        (INF2, {"max_concurrency": 4}, r"llama@7 on inf2.48xlarge: engine is 'vllm'; it does not run on inferentia2"),
        (
            INF2,
            {"engine": "neuron", "engine_options": {"neuron_target": "native-0.24"}},
            r"on inf2.48xlarge: engine_options.neuron_target is 'native-0.24'; inf2.48xlarge has inferentia2",
        ),
        (TRN1, {"engine": "neuron", "speculation": {"method": "ngram", "tokens": 2}}, r"on trn1.* on engine neuron"),
        (GPU, {"quantization": {"dtype": "int8"}}, r"on p5.48xlarge: quantization.method is None"),
        (CPU, {"engine": "generic"}, r"on local.cpu: engine_options.command is missing"),
    ],
)
def test_rules_are_those_of_the_instance_type(kind: str, stated: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidVersion, match=message):
        render_version(with_type(kind, **stated), INSTANCE_TYPES[kind])


def test_options_are_judged_by_the_engine_of_the_instance_type_and_what_admins_allow_it() -> None:
    stated = {"engine": "generic", "engine_options": {"command": "own"}, "engine_env": {"LD_PRELOAD": "x.so"}}
    version = with_type(CPU, **stated)
    with pytest.raises(InvalidVersion, match=r"on local.cpu: option --command is 'own'; an admin can allow it"):
        check_engine_options(version, CPU)
    with pytest.raises(InvalidVersion, match=r"on local.cpu: engine generic .*LD_PRELOAD"):
        check_engine_options(replace(version, allowances={"generic": ["--command"], "vllm": ["LD_PRELOAD"]}), CPU)
    check_engine_options(replace(version, allowances={"generic": ["--command", "LD_PRELOAD"]}), CPU)


def test_the_artifacts_of_a_version_are_those_of_all_instance_types() -> None:
    assert artifacts_of(EVERYWHERE) == (
        Artifact("s3://models/llama-7", DIGEST),
        Artifact("s3://models/llama-7-neuron", ""),
        Artifact("s3://models/llama-7-gguf", GGUF),
    )


def test_a_judgement_names_every_instance_type() -> None:
    broken = replace(EVERYWHERE, by_type={**EVERYWHERE.by_type, CPU: {"engine": "generic"}})
    judged = evaluate_version(broken, INSTANCE_TYPES)
    assert judged.objection == ""
    assert {kind for kind, problem in judged.problems.items() if problem} == {CPU}


def test_what_is_measured_depends_on_its_own_instance_type_alone() -> None:
    changed = replace(EVERYWHERE, by_type={**EVERYWHERE.by_type, TRN1: {"engine": "neuron", "max_concurrency": 2}})
    assert version_digest(changed, TRN1) != version_digest(EVERYWHERE, TRN1)
    for kind in (GPU, INF2, TRN2, CPU):
        assert version_digest(changed, kind) == version_digest(EVERYWHERE, kind)
