"""The options and environment variables that an engine may get. The control plane checks them when a version is
written, and the agent checks them again before it starts an engine, so that no order can run another program. Pure.

An option is allowed only if none of its values names code to import, a file to read or write, or an address. `VALUES`
lists the harmless values of options that also have harmful ones. Any value that can be a path or a URL is rejected,
unless it is the location of an artifact of the plan. Admins may allow more names (`EnginePlan.widened`), except those
that the agent sets itself (`AGENTS_OWN`)."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from math import isfinite

from engine_agent.protocol.neuron_targets import NATIVE_KEYS, NATIVE_SETTINGS, SETTINGS
from engine_agent.protocol.strict_json import strict_loads

_VLLM_OPTIONS = """
    async-scheduling attention-backend block-size calculate-kv-scales cpu-offload-gb disable-cascade-attn
    disable-chunked-mm-input disable-custom-all-reduce disable-hybrid-kv-cache-manager disable-log-stats
    disable-sliding-window dtype enable-auto-tool-choice enable-chunked-prefill enable-expert-parallel
    enable-force-include-usage enable-prefix-caching enable-prompt-tokens-details enforce-eager
    expert-placement-strategy generation-config gpu-memory-utilization kv-cache-dtype kv-cache-memory-bytes
    language-model-only limit-mm-per-prompt load-format logprobs-mode long-prefill-token-threshold lora-dtype
    mamba-block-size mamba-cache-dtype mamba-ssm-cache-dtype max-cpu-loras max-cudagraph-capture-size max-logprobs
    max-long-partial-prefills max-loras
    max-model-len max-num-batched-tokens max-num-partial-prefills max-num-seqs mm-processor-cache-gb
    no-async-scheduling no-enable-chunked-prefill no-enable-prefix-caching num-gpu-blocks-override
    optimization-level override-generation-config performance-mode prefix-caching-hash-algo reasoning-parser
    return-tokens-as-token-ids scheduling-policy seed skip-mm-profiling stream-interval swap-space
    tokenizer-mode tool-call-parser tool-strict-level
"""
_RENDERED = """
    additional-config decode-context-parallel-size enable-lora max-lora-rank pipeline-parallel-size
    prefill-context-parallel-size quantization speculative-config tensor-parallel-size
"""
"""Options that a version states in its own fields, each checked where it is read."""
_LAUNCHER_OPTIONS = """
    batch-prompt-tokens kv-offloading-backend kv-offloading-size kv-store-size sleep-idle-seconds sleep-level
"""
"""Options of vLLM's launcher, and of vLLM on GPUs alone; the plugin for Neuron has its own scheduler and no offload."""
_SIM_OPTIONS = """
    base-ms batch-prompt-tokens decode-step-ms decode-step-per-seq-ms extension-s fault gb-per-s grace-s
    kv-capacity-tokens lease-s load-time-s max-model-len max-num-seqs mb-per-token prefill-chunk-tokens
    prefill-tokens-per-s prefix-block-tokens rendezvous-timeout-s renew-s seed step-jitter
"""
_GENERIC_OPTIONS = "command context-length seed"
"""Admins allow a program's other options by name, and the programs by `--command`."""
_EVERY_VARIABLE = "OMP_NUM_THREADS OMP_WAIT_POLICY"
_NCCL_VARIABLES = "CUDA_DEVICE_MAX_CONNECTIONS NCCL_DEBUG NCCL_IB_DISABLE NCCL_P2P_DISABLE PYTORCH_CUDA_ALLOC_CONF"
_CELL_VARIABLES = "SWITCHYARD_CELL_COLLECTIVES SWITCHYARD_CELL_HANG_S"
_VLLM_VARIABLES = """
    CUDA_DEVICE_MAX_CONNECTIONS NCCL_DEBUG NCCL_IB_DISABLE NCCL_P2P_DISABLE PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF
    TORCH_COMPILE_DISABLE TOKENIZERS_PARALLELISM VLLM_ALLOW_LONG_MAX_MODEL_LEN VLLM_ATTENTION_BACKEND
    VLLM_CPU_KVCACHE_SPACE VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_CPU_OMP_THREADS_BIND VLLM_ENGINE_ITERATION_TIMEOUT_S
    VLLM_FLASH_ATTN_VERSION VLLM_LOGGING_LEVEL VLLM_USE_FLASHINFER_SAMPLER
"""
_NEURON_VARIABLES = """
    FI_EFA_FORK_SAFE FI_EFA_USE_DEVICE_RDMA FI_PROVIDER NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS
    NEURON_RT_EXEC_TIMEOUT NEURON_RT_LOG_LEVEL NEURON_RT_NUM_CORES NEURON_RT_VIRTUAL_CORE_SIZE
    NEURON_RT_VISIBLE_CORES
"""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Numbers that an option may have, inclusive; `whole`: without a fraction."""

    least: float
    most: float
    whole: bool = True

    def problem(self, value: object) -> str:
        """Why this is no such number, given as one or as text; empty if it is."""
        number = _number(value)
        if number is not None and self.least <= number <= self.most and not (self.whole and number % 1):
            return ""
        return f"must be a {'whole ' if self.whole else ''}number from {self.least:g} to {self.most:g}"


@dataclass(frozen=True, slots=True)
class OneOf:
    names: tuple[str, ...]

    def problem(self, value: object) -> str:
        return "" if value in self.names else f"must be one of {', '.join(self.names)}"


@dataclass(frozen=True, slots=True)
class Switch:
    """An option without a value on a command line."""

    def problem(self, value: object) -> str:
        return "" if value is None or isinstance(value, bool) else "must be true or false"


_CACHE_TYPES = OneOf(("bf16", "f16", "f32", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0"))
LLAMA_CPP: Mapping[str, Bounds | OneOf | Switch] = {
    "batch-size": Bounds(1, 65_536),
    "cache-prompt": Switch(),
    "cache-ram": Bounds(0, 1_048_576),  # MiB
    "cache-type-k": _CACHE_TYPES,
    "cache-type-v": _CACHE_TYPES,
    "context-length": Bounds(1, 16_777_216),
    "embeddings": Switch(),
    "flash-attn": OneOf(("auto", "off", "on")),
    "gpu-layers": Bounds(0, 10_000),
    "kv-unified": Switch(),
    "min-p": Bounds(0, 1, whole=False),
    "parallel": Bounds(1, 256),
    "pooling": OneOf(("cls", "last", "mean")),
    "repeat-penalty": Bounds(0.1, 10, whole=False),
    "seed": Bounds(0, 2**32 - 1),
    "sleep-idle-seconds": Bounds(1, 86_400),
    "temperature": Bounds(0, 10, whole=False),
    "threads": Bounds(1, 512),
    "threads-batch": Bounds(1, 512),
    "top-k": Bounds(0, 1_000_000),
    "top-p": Bounds(0, 1, whole=False),
    "ubatch-size": Bounds(1, 65_536),
}
"""The options of engine `llama-cpp` with their values. Sampling options are defaults for requests without them."""

_NOT_IN_TRITON = ("cache-prompt", "cache-ram", "embeddings", "pooling", "sleep-idle-seconds")
TRITON: Mapping[str, Bounds | OneOf | Switch] = {
    name: allowed for name, allowed in LLAMA_CPP.items() if name not in _NOT_IN_TRITON
}
"""The options of engine `triton`, whose model computes with llama.cpp."""

SGLANG_QUANTIZATIONS = (
    *("auto-round", "awq", "awq_marlin", "compressed-tensors", "fp8", "gptq", "gptq_marlin", "modelopt"),
    *("modelopt_fp4", "modelopt_fp8", "moe_wna16", "mxfp4", "mxfp8", "petit_nvfp4", "w4afp8", "w8a8_fp8", "w8a8_int8"),
)
SGLANG: Mapping[str, Bounds | OneOf | Switch] = {
    "attention-backend": OneOf(
        (
            *("fa3", "fa4", "flashinfer", "flashmla", "torch_native", "triton"),
            *("trtllm_mha", "trtllm_mla"),
        )
    ),
    "chunked-prefill-size": Bounds(-1, 1_048_576),  # -1: off
    "context-length": Bounds(1, 16_777_216),
    "disable-cuda-graph": Switch(),
    "disable-overlap-schedule": Switch(),
    "disable-radix-cache": Switch(),
    "dtype": OneOf(("auto", "bfloat16", "float", "float16", "float32", "half")),
    "enable-cache-report": Switch(),
    "enable-hierarchical-cache": Switch(),
    "hicache-size": Bounds(1, 4096),  # GB of host memory per rank
    "kv-cache-dtype": OneOf(("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2")),
    "load-format": OneOf(("auto", "dummy", "safetensors")),
    "max-prefill-tokens": Bounds(1, 16_777_216),
    "max-running-requests": Bounds(1, 4096),
    "max-total-tokens": Bounds(1, 2**40),
    "mem-fraction-static": Bounds(0.05, 0.99, whole=False),
    "page-size": Bounds(1, 1024),
    "pp-size": Bounds(1, 1024),
    "quantization": OneOf(SGLANG_QUANTIZATIONS),
    "random-seed": Bounds(0, 2**31 - 1),
    "schedule-conservativeness": Bounds(0.01, 10, whole=False),
    "schedule-policy": OneOf(("dfs-weight", "fcfs", "lof", "lpm", "random")),
    "stream-interval": Bounds(1, 1024),
    "tp-size": Bounds(1, 4096),
    "watchdog-timeout": Bounds(1, 86_400),
}
"""The options of engine `sglang`: those of SGLang 0.5.9 and 0.5.23 that name no code, file or address."""

TENSORRT_LLM: Mapping[str, Bounds | OneOf | Switch] = {
    "enable-block-reuse": Switch(),
    "enable-chunked-prefill": Switch(),
    "fail-fast-on-attention-window-too-large": Switch(),
    "host-cache-gib": Bounds(1, 4096),
    "kv-cache-dtype": OneOf(("auto", "fp8")),
    "kv-cache-free-gpu-memory-fraction": Bounds(0.05, 0.99, whole=False),
    "max-batch-size": Bounds(1, 4096),
    "max-num-tokens": Bounds(1, 16_777_216),
    "max-seq-len": Bounds(1, 16_777_216),
    "pp-size": Bounds(1, 1024),
    "tp-size": Bounds(1, 4096),
}
"""The options of engine `tensorrt-llm`: of `trtllm-serve`, and `host-cache-gib`, `enable-block-reuse` and
`kv-cache-dtype` for its configuration file."""

VLLM_WARM: Mapping[str, Bounds | OneOf | Switch] = {
    "kv-offloading-backend": OneOf(("native",)),
    "kv-offloading-size": Bounds(0.1, 65_536, whole=False),  # GiB of host memory per cell
    "kv-store-size": Bounds(0.1, 1_048_576, whole=False),  # GiB of files per machine
    "sleep-idle-seconds": Bounds(1, 86_400),
    "sleep-level": Bounds(1, 2),
}
CHECKED: Mapping[str, Mapping[str, Bounds | OneOf | Switch]] = {
    "llama-cpp": LLAMA_CPP,
    "sglang": SGLANG,
    "tensorrt-llm": TENSORRT_LLM,
    "triton": TRITON,
    "vllm": VLLM_WARM,
}
"""Options whose values are checked here. Of the engines other than vLLM these are all options."""

OPTIONS: Mapping[str, frozenset[str]] = {
    "generic": frozenset(_GENERIC_OPTIONS.split()),
    **{engine: frozenset(options) for engine, options in CHECKED.items()},
    "vllm": frozenset((_VLLM_OPTIONS + _RENDERED + _LAUNCHER_OPTIONS).split()),
    "neuron": frozenset((_VLLM_OPTIONS + _RENDERED).split()),
    "sim": frozenset(_SIM_OPTIONS.split()),
}
VARIABLES: Mapping[str, frozenset[str]] = {
    "generic": frozenset(_EVERY_VARIABLE.split()),
    "llama-cpp": frozenset(_EVERY_VARIABLE.split()),
    "sglang": frozenset((_EVERY_VARIABLE + " " + _NCCL_VARIABLES).split()),
    "tensorrt-llm": frozenset((_EVERY_VARIABLE + " " + _NCCL_VARIABLES).split()),
    "vllm": frozenset((_EVERY_VARIABLE + " " + _CELL_VARIABLES + _VLLM_VARIABLES).split()),
    "neuron": frozenset((_EVERY_VARIABLE + " " + _CELL_VARIABLES + _VLLM_VARIABLES + _NEURON_VARIABLES).split()),
    "sim": frozenset(_EVERY_VARIABLE.split()),
    "triton": frozenset(_EVERY_VARIABLE.split()),
}
VALUES: Mapping[str, frozenset[str]] = {
    "command": frozenset(),
    "generation-config": frozenset({"auto", "vllm"}),
    "load-format": frozenset({"auto", "dummy", "safetensors"}),
    "tokenizer-mode": frozenset({"auto", "hf", "mistral", "slow"}),
}
"""Options whose other values are a path, a plugin or a format that may contain code (pickle)."""
KEYS: Mapping[str, frozenset[str]] = {
    "additional-config": frozenset({"max_prompt_length", *SETTINGS}),
    "speculative-config": frozenset(
        {
            *("max_model_len", "method", "model", "num_speculative_tokens", "num_speculative_tokens_per_batch_size"),
            *("prompt_lookup_max", "prompt_lookup_min"),
        }
    ),
}
"""Options that are JSON objects, with their allowed keys. Other keys name code or files."""
PLACE_KEYS = frozenset({"quantized_checkpoints_path"})
"""Keys of JSON options whose values are paths on a node: NxDI stores quantized weights there. A version states it in
`quantization`."""
_BY_ADMINS = "an admin can allow it (engine-allowances)"
_PLACE = re.compile(r"[/\\\\]|^~|^\.\.?$")
SPECULATION_METHODS = frozenset({"draft_model", "eagle", "eagle3", "medusa", "ngram"})
PRIORITY_SCHEDULING = ("--scheduling-policy", "priority")
"""vLLM's arguments that turn it on."""
BATCH_PROMPTS_UNLIMITED = ("--batch-prompt-tokens", "0")
"""Turns off the order of classes in an engine."""
READS_WHOLE_PROMPTS = frozenset({"--no-enable-chunked-prefill", "--disable-chunked-mm-input"})
"""With these vLLM cannot limit the prompt tokens of a step."""
SLEEP_OPTION, SLEEP_LEVEL_OPTION = "--sleep-idle-seconds", "--sleep-level"
"""With it llama.cpp and vLLM unload an idle model, until the next request."""
OFFLOAD_OPTION, STORE_OPTION = "--kv-offloading-size", "--kv-store-size"
"""vLLM keeps blocks of its KV cache in host memory, and in files of the machine."""
CACHE_PROMPT_OPTION = "--cache-prompt"
"""With it a slot of llama.cpp reads a prompt from where it differs from the last one, of whichever tenant."""
AGENTS_OWN = frozenset(
    {
        *("--config", "--distributed-executor-backend", "--host", "--model", "--model-tag", "--port"),
        *("--served-model-name", "--uds", "PYTHONPATH", "SPT_NOENV", "TMPDIR"),
    }
)
"""Names that cannot be allowed: the agent decides what is served where, and marks its processes."""
AGENTS_PREFIX = "SWITCHYARD_"
"""Prefix of variables that agents and engines identify each other by."""


@dataclass(frozen=True, slots=True)
class RefusedOption:
    """`name` as an admin would allow it (`--trust-remote-code`, `LD_PRELOAD`); `rule`: `allowed` or `value`."""

    name: str
    rule: str
    message: str


def option_name(name: str) -> str:
    """`trust_remote_code` in the spelling of engines: `--trust-remote-code`."""
    return "--" + name.removeprefix("--").replace("_", "-")


def is_agents_own(name: str) -> bool:
    """Whether only agents may set this option or variable."""
    in_cells = name in _CELL_VARIABLES.split()
    return name in AGENTS_OWN or (name.startswith(AGENTS_PREFIX) and not in_cells)


def refused_option(
    engine: str, name: str, value: object, widened: Iterable[str] = (), artifacts: Iterable[str] = ()
) -> RefusedOption | None:
    """Returns why an engine must not get this option, or None. Both spellings of the name are accepted.

    A value that looks like an option is rejected, because a command line would parse it as one.

    Args:
        artifacts: Locations of the artifacts of the plan."""
    flag = option_name(name)
    if (flag not in widened or is_agents_own(flag)) and flag[2:] not in OPTIONS.get(engine, ()):
        return RefusedOption(flag, "allowed", _not_allowed(engine, "option", flag, OPTIONS.get(engine, ())))
    if isinstance(value, str) and value.startswith("-") and not _is_number(value):
        return RefusedOption(flag, "value", f"option {flag} is {value!r}; a value cannot begin with -")
    harmless = VALUES.get(flag[2:])
    if harmless is not None and flag not in widened and not (isinstance(value, str) and value in harmless):
        allowed = f"engine {engine} may be given {', '.join(sorted(harmless))}" if harmless else _BY_ADMINS
        return RefusedOption(flag, "value", f"option {flag} is {value!r}; {allowed}")
    values = CHECKED.get(engine, {}).get(flag[2:])
    if values is not None and (wrong := values.problem(value)):
        return RefusedOption(flag, "value", f"option {flag} is {value!r:.80}; it {wrong}")
    if flag[2:] in KEYS and flag not in widened and (wrong := _wrong_part(flag[2:], value)):
        return RefusedOption(flag, "value", f"option {flag} {wrong}")
    places = (place for place in _places(value) if place not in artifacts)
    if flag not in widened and (place := next(places, None)) is not None:
        message = (
            f"option {flag} names the path or URL {place[:80]!r}; only places of the version's artifacts may be named"
        )
        return RefusedOption(flag, "value", message)
    return None


def refused_variable(engine: str, name: str, widened: Iterable[str] = ()) -> RefusedOption | None:
    """Returns why an engine must not get this environment variable, or None."""
    if (name in widened and not is_agents_own(name)) or name in VARIABLES.get(engine, ()):
        return None
    return RefusedOption(name, "allowed", _not_allowed(engine, "variable", name, VARIABLES.get(engine, ())))


def refused_in_plan(
    engine: str,
    args: Sequence[str],
    env: Mapping[str, str],
    widened: Iterable[str] = (),
    artifacts: Iterable[str] = (),
) -> RefusedOption | None:
    """Returns the first forbidden part of a rendered command line and environment, or None."""
    names = {name for name in widened if not is_agents_own(name)}
    for flag, value in given_options(args):
        if not flag:
            return RefusedOption(str(value), "allowed", f"engine {engine} takes {value!r} only as an option's value")
        if refused := refused_option(engine, flag, value, names, artifacts):
            return refused
    return next((refused for name in env if (refused := refused_variable(engine, name, names))), None)


def _wrong_part(option: str, value: object) -> str:
    try:
        stated = strict_loads(str(value))
    except ValueError:
        stated = None
    if not isinstance(stated, dict):
        return f"is {str(value)[:80]!r}; it must be a JSON object"
    if unknown := sorted(stated.keys() - KEYS[option]):
        return f"has the key {unknown[0]!r}; it may have {', '.join(sorted(KEYS[option]))}"
    native = stated.get(NATIVE_SETTINGS, {})
    if not isinstance(native, dict) or native.keys() - NATIVE_KEYS:
        wrong = sorted(native.keys() - NATIVE_KEYS)[0] if isinstance(native, dict) else native
        return f"has {wrong!r} in {NATIVE_SETTINGS}; it may have {', '.join(sorted(NATIVE_KEYS))}"
    method = stated.get("method", "ngram")
    if method not in SPECULATION_METHODS:
        return f"has the method {method!r}; it may be {', '.join(sorted(SPECULATION_METHODS))}"
    return ""


def _places(value: object, key: str = "") -> Iterator[str]:
    """Yields texts in an option's value, and in JSON within it, that can be a path, a repository name or a URL. The
    model for speculation is always one."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _places(part, str(name))
    elif isinstance(value, list):
        for part in value:
            yield from _places(part)
    elif isinstance(value, str) and value.startswith(("{", "[")):
        try:
            inner = strict_loads(value)
        except ValueError:
            yield value
        else:
            yield from _places(inner)
    elif isinstance(value, str) and key not in PLACE_KEYS and (_PLACE.search(value) or key == "model"):
        yield value


def given_options(args: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yields a command line's options with their values (None without a value). A value without an option has an empty
    name."""
    waiting = ""
    for arg in args:
        if arg.startswith("--"):
            if waiting:
                yield waiting, None
            name, equals, value = arg.partition("=")
            waiting = "" if equals else name
            if equals:
                yield name, value
        else:
            yield waiting, arg
            waiting = ""
    if waiting:
        yield waiting, None


def _not_allowed(engine: str, kind: str, name: str, allowed: Iterable[str]) -> str:
    known = [f"--{each}" if kind == "option" else each for each in allowed]
    near = get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"; the nearest that it may is {near[0]}" if near else ""
    if is_agents_own(name):
        return f"engine {engine} may not be given the {kind} {name}, which the agent sets itself{hint}"
    return f"engine {engine} may not be given the {kind} {name}{hint}; {_BY_ADMINS}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _number(value: object) -> float | None:
    """A finite number, given as one or as text."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (OverflowError, ValueError):
        return None
    return number if isfinite(number) else None
