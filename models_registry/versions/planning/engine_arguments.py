"""Renders a model version into the engine plan that agents run. The same version always gives the same plan. The
agent's engine adapter adds values that only a node knows: ports, rank, paths. Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine_agent.protocol.engine_builds import EngineBuild
from engine_agent.protocol.engine_options import (
    RefusedOption,
    is_agents_own,
    option_name,
    refused_option,
    refused_variable,
)
from engine_agent.protocol.messages import Artifact, EnginePlan, GoldenPrompt
from engine_agent.protocol.neuron_targets import NATIVE_SETTINGS, NeuronTarget
from engine_agent.protocol.request_bodies import Modality
from models_registry.instance_types.planner import InstanceShape
from models_registry.versions.planning.known_options import OPTION_FIELDS, known_options
from models_registry.versions.planning.machines import (
    Degrees,
    check_degrees,
    degrees_on,
    stated_degrees,
    stated_within,
)
from models_registry.versions.planning.memory import default_batched_tokens, whole_option
from models_registry.versions.planning.neuron_configuration import (
    additional_config,
    native_configuration,
    neuron_configuration,
    prefix_caching,
    sampling_notes,
)
from models_registry.versions.planning.nxdi_rules import NEURON_TARGET_OPTION, check_target, target_note, target_on
from models_registry.versions.planning.spec import (
    InvalidVersion,
    NeuronQuantization,
    Quantization,
    VersionAdapter,
    VersionSpec,
    VllmQuantization,
    one_of,
    read_adapters,
    read_quantization,
    vllm_adapter_options,
)
from models_registry.versions.planning.speculation import (
    GUESSES_FROM_TEXT,
    Draft,
    Medusa,
    Method,
    Ngram,
    Speculation,
    read_speculation,
)

ENGINES = ("generic", "llama-cpp", "neuron", "sglang", "sim", "tensorrt-llm", "triton", "vllm")
WITH_WEIGHTS = ("generic", "llama-cpp", "neuron", "sglang", "tensorrt-llm", "triton", "vllm")
STATED_ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "nnodes"), "parallelism"),
    **dict.fromkeys(("decode_context_parallel_size", "prefill_context_parallel_size"), "parallelism"),
    "speculative_config": "speculation",
    "quantization": "quantization",
    "additional_config": "engine_options.neuron_config",
    **dict.fromkeys(("enable_lora", "lora_modules", "max_lora_rank"), "adapters"),
}
"""Options of vLLM that have their own field of a version -> that field."""
SCHEDULING_POLICIES = ("fcfs", "priority")
"""Policies of vLLM. With `priority` the cell proxy sends the priority of each request's serving class to the engine."""
LEAST_BATCH_PROMPT_TOKENS = 16
"""Per step: a block of vLLM's cache. A smaller number would need a step for every few words."""
NEURON_OWN_OPTIONS = ("neuron_config", NEURON_TARGET_OPTION, "enable_prefix_caching", "block_size")
MEDUSA_UNSERVED = (
    "vLLM's Neuron plugins load Medusa and crash at the first request, so it is not supported; it must be "
    "eagle or eagle3"
)


@dataclass(frozen=True, slots=True)
class Rendering:
    """A version rendered for one instance type. `notes`: warnings about allowed settings."""

    degrees: Degrees
    plan: EnginePlan
    notes: tuple[str, ...]


def nodes_per_cell(spec: VersionSpec, instance_type: str) -> int:
    """Number of nodes of this instance type per cell. Raises InvalidVersion if the version does not name this instance
    type, or its degrees are invalid."""
    return stated_degrees(spec.reference, spec.parallelism, instance_type).get("nodes", 1)


def network_nodes_shared(spec: VersionSpec, instance_type: str) -> int:
    """How many network nodes, counted from the widest, all nodes of a cell must share; 0: any. Raises InvalidVersion if
    the version's value is invalid."""
    return stated_within(spec.reference, spec.parallelism, instance_type)


def render_engine_plan(spec: VersionSpec, machine: InstanceShape) -> EnginePlan:
    """The engine plan of a version for cells of these machines, the same on every rank. Raises InvalidVersion as
    `render_version` does."""
    return render_version(spec, machine).plan


def render_version(spec: VersionSpec, machine: InstanceShape) -> Rendering:
    """Check a version for cells of these machines and render it. Raises InvalidVersion if it does not name them;
    engine, degrees, speculation, quantization or an option's type are not supported. The text names field, value and
    rule."""
    spec = spec.on(machine.name)
    if spec.engine not in ENGINES:
        raise InvalidVersion(f"{spec.reference}: engine is {spec.engine!r}; {one_of(ENGINES, spec.engine)}")
    if spec.engine in WITH_WEIGHTS and not spec.artifact_uri:
        raise InvalidVersion(f"{spec.reference}: engine {spec.engine} needs artifact_uri, the location of the weights")
    degrees = degrees_on(spec.reference, spec.parallelism, machine)
    notes = check_degrees(spec, degrees, machine)
    if spec.engine == "vllm":
        _check_cpu_options(spec, machine)
        _check_vllm_values(spec, degrees, machine)
        _check_warm_capacity(spec, degrees)
    target = target_on(spec, machine) if spec.engine == "neuron" else None
    speculation = read_speculation(spec.reference, spec.engine, spec.speculation)
    quantization = read_quantization(spec.reference, spec.engine, spec.quantization)
    if target is not None:
        check_target(spec, degrees, machine, target)
        notes = (*notes, *sampling_notes(spec, degrees, target), target_note(target))
    adapters = adapters_of(spec)
    _check_adapters(spec, adapters, degrees)
    plan = EnginePlan(
        engine=spec.engine,
        served_model=spec.model,
        max_concurrency=spec.max_concurrency,
        ready_timeout_s=spec.ready_timeout_s,
        artifact=Artifact(uri=spec.artifact_uri, digest=spec.artifact_digest) if spec.artifact_uri else None,
        draft=speculation.artifact if isinstance(speculation, Draft) else None,
        args=tuple(_flags(_options(spec, degrees, target, speculation, quantization, adapters), spec.reference)),
        env={name: str(value) for name, value in spec.engine_env.items()},
        golden=tuple(GoldenPrompt(prompt, expect) for prompt, expect in spec.golden_prompts),
        widened=_used_allowances(spec),
        adapters=tuple(adapter.planned for adapter in adapters),
        build=EngineBuild(spec.engine_build) if spec.engine_build else None,  # orders add the rest
        modalities=_modalities(spec),
    )
    if isinstance(speculation, Medusa):  # last, because other errors are more specific
        raise InvalidVersion(f"{spec.reference}: speculation.method is 'medusa'; {MEDUSA_UNSERVED}")
    return Rendering(degrees, plan, notes)


WITH_MEDIA = ("generic", "sim", "vllm")
"""Engines that serve more than text. The other ones would load an image from any address in a request."""


def _modalities(spec: VersionSpec) -> tuple[Modality, ...]:
    if unknown := next((name for name in spec.modalities if name not in set(Modality)), None):
        raise InvalidVersion(f"{spec.reference}: modalities has {unknown!r}; {one_of(tuple(Modality), unknown)}")
    if spec.modalities and spec.engine not in WITH_MEDIA:
        stated = ", ".join(spec.modalities)
        raise InvalidVersion(
            f"{spec.reference}: modalities is {stated}; cells of engine {spec.engine} serve text alone, so leave it out"
        )
    return tuple(Modality(name) for name in sorted(set(spec.modalities)))


NOT_ON_CPU: Mapping[str, str] = {
    "kv_offloading_size": "vLLM offloads its KV cache only from GPUs (kv_store_size works on a CPU)",
    "kv_offloading_backend": "vLLM offloads its KV cache only from GPUs (kv_store_size works on a CPU)",
    "enable_sleep_mode": "vLLM sleeps only on GPUs",
    "sleep_idle_seconds": "vLLM sleeps only on GPUs (llama-cpp sleeps on a CPU)",
}
"""Options that vLLM's parser or its workers reject there."""


def _check_cpu_options(spec: VersionSpec, machine: InstanceShape) -> None:
    if machine.accelerator != "cpu":
        return
    has_store = any(spec.engine_options.get(name) is not None for name in ("kv_store_size", "kv-store-size"))
    for name, value in spec.engine_options.items():
        if has_store and name.replace("-", "_") == "kv_offloading_size":
            continue  # of the store, whose blocks are copied without a GPU
        if value not in (None, False) and (why := NOT_ON_CPU.get(name.replace("-", "_"))):
            raise InvalidVersion(f"{spec.reference}: engine_options.{name} is {value!r}; {why}, so leave it out")


NEEDS = {"kv_offloading_backend": "kv_offloading_size", "sleep_level": "sleep_idle_seconds"}


def _check_warm_capacity(spec: VersionSpec, degrees: Degrees) -> None:
    """Raises InvalidVersion if idle sleep or an offloaded KV cache is incomplete, or not possible in such cells."""
    options = {name.replace("-", "_"): value for name, value in spec.engine_options.items()}
    place = f"{spec.reference}: engine_options"
    for name, needed in NEEDS.items():
        if options.get(name) is not None and options.get(needed) is None:
            raise InvalidVersion(f"{place}.{name} is {options[name]!r}; it needs engine_options.{needed}")
    if options.get("kv_offloading_backend") == "lmcache":
        raise InvalidVersion(
            f"{place}.kv_offloading_backend is 'lmcache'; it needs an LMCache server next to the engine, which agents "
            "do not start: use native"
        )
    for name in ("kv_offloading_size", "kv_store_size", "sleep_idle_seconds"):
        if options.get(name) is not None and degrees.nodes > 1:
            raise InvalidVersion(
                f"{place}.{name} is {options[name]!r}; it needs cells of one node, and cells there have {degrees.nodes}"
            )
    if options.get("kv_store_size") is not None:
        _check_store(spec, options, f"{place}.kv_store_size is {options['kv_store_size']!r}")


STORE_HASHES = ("sha256", "sha256_cbor")
"""Others begin with a random value in each process, and may collide between tenants."""


def _check_store(spec: VersionSpec, options: Mapping[str, Any], place: str) -> None:
    method, hashing = spec.speculation.get("method"), options.get("prefix_caching_hash_algo", STORE_HASHES[0])
    if options.get("no_enable_prefix_caching") or options.get("enable_prefix_caching") is False:
        raise InvalidVersion(f"{place}; a store needs the prefix cache, which the version turns off")
    if hashing not in STORE_HASHES:
        raise InvalidVersion(
            f"{place}; prefix_caching_hash_algo is {hashing!r}, and a store needs {' or '.join(STORE_HASHES)}"
        )
    if method not in (None, GUESSES_FROM_TEXT):
        raise InvalidVersion(
            f"{place}; speculation.method is {method!r}, which has its own KV cache, and a store does not support "
            f"that: use {GUESSES_FROM_TEXT}"
        )


VLLM_DTYPES = ("auto", "bfloat16", "float", "float16", "float32", "half")


def _check_vllm_values(spec: VersionSpec, degrees: Degrees, machine: InstanceShape) -> None:
    """Values that vLLM's configuration refuses: `tests/engine_agent/engines/vllm/test_valid_versions.py` asks it."""
    options = {name.replace("-", "_"): value for name, value in spec.engine_options.items()}
    place = f"{spec.reference}: engine_options"
    dtype, share = options.get("dtype", "auto"), options.get("gpu_memory_utilization", 1)
    if dtype not in VLLM_DTYPES:
        raise InvalidVersion(f"{place}.dtype is {dtype!r}; {one_of(VLLM_DTYPES, str(dtype))}")
    if isinstance(share, int | float) and not 0 < share <= 1:
        raise InvalidVersion(f"{place}.gpu_memory_utilization is {share!r}; it must be over 0 and at most 1")
    stated = whole_option(options, "max_num_batched_tokens")
    requests = whole_option(options, "max_num_seqs") or spec.max_concurrency
    if stated is not None and stated < requests:
        raise InvalidVersion(
            f"{place}.max_num_batched_tokens is {stated}; it must be at least {requests}, the concurrent requests"
        )
    default = default_batched_tokens(machine, degrees)
    if stated is None and machine.memory_gib and default < requests:
        raise InvalidVersion(
            f"{spec.reference}: max_concurrency is {requests}; it must be at most {default}, the tokens of a step on "
            f"{machine.name}, or engine_options.max_num_batched_tokens at least {requests}"
        )
    if stated is not None and options.get("no_enable_chunked_prefill") and stated < spec.max_model_len:
        raise InvalidVersion(
            f"{place}.max_num_batched_tokens is {stated}; without chunked prefill it must be at least the context, "
            f"{spec.max_model_len}"
        )


def adapters_of(spec: VersionSpec) -> tuple[VersionAdapter, ...]:
    """The adapters of a version. Raises InvalidVersion as `read_adapters` does."""
    loads_weights = spec.engine in WITH_WEIGHTS
    return read_adapters(spec.reference, spec.engine, spec.adapters, loads_weights=loads_weights)


def _check_adapters(spec: VersionSpec, adapters: tuple[VersionAdapter, ...], degrees: Degrees) -> None:
    """vLLM sends an adapter to its workers as a path on the leader, which may differ on other nodes."""
    if adapters and spec.engine == "vllm" and degrees.nodes > 1:
        raise InvalidVersion(
            f"{spec.reference}: adapters has {len(adapters)}, and cells there have {degrees.nodes} nodes; "
            "adapters need cells of one node"
        )


def refused_engine_option(spec: VersionSpec) -> tuple[str, RefusedOption] | None:
    """The field with the first disallowed option or variable, and why it is disallowed; None if all are allowed.

    Rendering does not check this: a version from before a list became shorter keeps running until its agent restarts
    it."""
    for name, value in spec.engine_options.items():
        if (spec.engine == "neuron" and name in NEURON_OWN_OPTIONS) or _stated_elsewhere(name):
            continue  # rendering reads or rejects it
        if refused := refused_option(spec.engine, name, value, spec.widened):
            return f"engine_options.{name}", refused
    for name in spec.engine_env:
        if refused := refused_variable(spec.engine, name, spec.widened):
            return f"engine_env.{name}", refused
    return None


def check_engine_options(spec: VersionSpec, instance_type: str) -> None:
    """Check the engine's options and variables on this instance type against the lists. Raises InvalidVersion if one is
    not allowed (the text suggests the closest allowed name), or the version does not name the instance type."""
    spec = spec.on(instance_type)
    if refused := refused_engine_option(spec):
        raise InvalidVersion(f"{spec.reference}: {refused[1].message}")


def _stated_elsewhere(name: str) -> str:
    """The field that states this option in any spelling; empty if none does."""
    return STATED_ELSEWHERE.get(name.replace("-", "_"), "")


def _used_allowances(spec: VersionSpec) -> tuple[str, ...]:
    used = {option_name(name) for name in spec.engine_options} | set(spec.engine_env)
    return tuple(name for name in spec.widened if name in used and not is_agents_own(name))


def _options(
    spec: VersionSpec,
    degrees: Degrees,
    target: NeuronTarget | None,
    speculation: Speculation | None,
    quantization: Quantization | None,
    adapters: tuple[VersionAdapter, ...],
) -> dict[str, Any]:
    _check_batch_prompt_tokens(spec)
    if spec.engine == "sim":
        return {"max_num_seqs": spec.max_concurrency, **spec.engine_options}
    if spec.engine == "generic":
        return _generic_options(spec)
    if spec.engine in OPTION_FIELDS:
        return known_options(spec, degrees, quantization)
    for name, value in spec.engine_options.items():
        if field := _stated_elsewhere(name):
            raise InvalidVersion(f"{spec.reference}: engine_options.{name} is {value!r}; state it in {field}")
    policy = spec.engine_options.get("scheduling_policy", SCHEDULING_POLICIES[0])
    if policy not in SCHEDULING_POLICIES:
        rule = one_of(SCHEDULING_POLICIES, str(policy))
        raise InvalidVersion(f"{spec.reference}: engine_options.scheduling_policy is {policy!r}; {rule}")
    own: dict[str, Any] = {"max_num_seqs": spec.max_concurrency, "max_model_len": spec.context_length}
    if speculation is not None and not isinstance(speculation, Medusa):
        own["speculative_config"] = _json(speculative_config(spec, speculation))
    if target is None:
        return {**own, **_vllm_options(degrees, quantization), **vllm_adapter_options(adapters), **spec.engine_options}
    if target.settings == NATIVE_SETTINGS:
        return own | _native_options(spec, degrees)
    nxdi = quantization if isinstance(quantization, NeuronQuantization) else None
    own |= _neuron_options(spec, degrees)
    override = neuron_configuration(spec, degrees, speculation, nxdi, target)
    own["additional_config"] = _json(additional_config(spec, override))
    return own | {name: value for name, value in spec.engine_options.items() if name not in NEURON_OWN_OPTIONS}


def _native_options(spec: VersionSpec, degrees: Degrees) -> dict[str, Any]:
    """vLLM's own flags for caches, blocks and degrees, which the plugin without NxDI uses."""
    stated = {
        name: value for name, value in spec.engine_options.items() if name not in ("neuron_config", "neuron_target")
    }
    settings = native_configuration(spec, degrees)
    return {
        "tensor_parallel_size": degrees.tp,
        **({"additional_config": _json({NATIVE_SETTINGS: settings})} if settings else {}),
        **stated,
    }


def _generic_options(spec: VersionSpec) -> dict[str, Any]:
    """Raises InvalidVersion if the command is missing."""
    if not spec.engine_options.get("command"):
        raise InvalidVersion(
            f"{spec.reference}: engine_options.command is missing; engine generic needs the name of a program "
            "on the nodes"
        )
    return {"context_length": spec.context_length, **spec.engine_options}


def _check_batch_prompt_tokens(spec: VersionSpec) -> None:
    """Raises InvalidVersion if it is not a valid number of tokens, or the engine does not receive priorities."""
    if (tokens := spec.engine_options.get("batch_prompt_tokens")) is None:
        return
    place = f"{spec.reference}: engine_options.batch_prompt_tokens is {tokens!r}"
    if type(tokens) is not int or (tokens != 0 and tokens < LEAST_BATCH_PROMPT_TOKENS):
        raise InvalidVersion(f"{place}; it must be a whole number of {LEAST_BATCH_PROMPT_TOKENS} or more, or 0 for off")
    if spec.engine == "vllm" and spec.engine_options.get("scheduling_policy") != "priority":
        raise InvalidVersion(f"{place}; it needs engine_options.scheduling_policy to be priority")


def _vllm_options(degrees: Degrees, quantization: Quantization | None) -> dict[str, Any]:
    return {
        "enable_prompt_tokens_details": True,  # otherwise usage does not report cached tokens
        **({"tensor_parallel_size": degrees.tp} if degrees.tp > 1 else {}),
        **({"pipeline_parallel_size": degrees.pp} if degrees.pp > 1 else {}),
        **({"quantization": quantization.method} if isinstance(quantization, VllmQuantization) else {}),
    }


def _neuron_options(spec: VersionSpec, degrees: Degrees) -> dict[str, Any]:
    """Flags of the Neuron plugin.

    vLLM's block count must equal the compiled one, which is one block per sequence without prefix caching. On several
    nodes vLLM itself stays at degree 1: the plugin has one worker per node, and a larger world size would make its
    platform replace the executor."""
    flags: dict[str, Any] = {"tensor_parallel_size": degrees.tp} if degrees.nodes == 1 and degrees.tp > 1 else {}
    cached = prefix_caching(spec)
    if cached is None:
        return {**flags, "no_enable_prefix_caching": True, "num_gpu_blocks_override": spec.max_concurrency}
    block, blocks = cached
    return {**flags, "enable_prefix_caching": True, "block_size": block, "num_gpu_blocks_override": blocks}


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _flags(options: Mapping[str, Any], reference: str) -> list[str]:
    """`{"max_num_seqs": 16, "enforce_eager": True}` -> `["--enforce-eager", "--max-num-seqs", "16"]`, sorted."""
    flags: list[str] = []
    for name, value in sorted(options.items()):
        flag = "--" + name.replace("_", "-")
        if value is True:
            flags.append(flag)
        elif value is False or value is None:
            continue
        elif isinstance(value, str | int | float):
            flags += [flag, str(value)]
        else:
            raise InvalidVersion(
                f"{reference}: engine_options.{name} is {type(value).__name__}; it must be text, a number or true/false"
            )
    return flags


# Renders a version's speculation for vLLM: its option `--speculative-config`.

GUESSED_ON_THE_HOST = (Method.NGRAM, Method.MEDUSA)
"""Methods whose guesses wait for the sampled tokens on the host, so vLLM cannot schedule their next step ahead."""


def speculative_config(spec: VersionSpec, speculation: Ngram | Draft) -> dict[str, Any]:
    """vLLM's option `--speculative-config`. A draft model is at its URI; the agent replaces the path of a fetched one.
    Raises InvalidVersion if another option of the version conflicts with it."""
    config = _method(spec, speculation)
    if config["method"] in GUESSED_ON_THE_HOST and spec.engine_options.get("async_scheduling"):
        raise InvalidVersion(
            f"{spec.reference}: engine_options.async_scheduling is true; vLLM does not start with it and "
            f"speculation.method {config['method']}, leave it out"
        )
    if speculation.by_batch:
        config["num_speculative_tokens_per_batch_size"] = [list(each) for each in speculation.by_batch]
    return config


def _method(spec: VersionSpec, speculation: Ngram | Draft) -> dict[str, Any]:
    if isinstance(speculation, Ngram):
        return {
            "method": Method.NGRAM.value,
            "num_speculative_tokens": speculation.tokens,
            "prompt_lookup_min": speculation.lookup_min,
            "prompt_lookup_max": speculation.lookup_max,
        }
    return {
        "method": speculation.method.value,
        "model": speculation.artifact.uri.removeprefix("file://"),
        "num_speculative_tokens": speculation.tokens,
        "max_model_len": spec.context_length,
    }
