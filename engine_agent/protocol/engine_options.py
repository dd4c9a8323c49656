"""Which options and variables an engine may be given. The control plane checks them when a version is written, the
agent again before it starts an engine, so that an order of any age and origin runs no program but the engine. Pure.

An option is listed only if no value of it names code to import, a file to read or write, or an address to listen on or
connect to. Where some values do, the harmless ones are listed (`VALUES`). Whatever the option, a value that can be a
path or a URL is refused, unless it is where an artifact of the plan lies. Admins may widen the lists by name
(`EnginePlan.widened`), except by what the agent sets itself (`AGENTS_OWN`).
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

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
"""What a version states in fields of its own, each checked where it is read."""
_LAUNCHER_OPTIONS = "batch-prompt-tokens"
"""Of the engine's launcher, which makes of it what vLLM knows; the plugin for Neuron has a scheduler of its own."""
_SIM_OPTIONS = """
    base-ms batch-prompt-tokens decode-step-ms decode-step-per-seq-ms extension-s fault gb-per-s grace-s
    kv-capacity-tokens lease-s load-time-s max-model-len max-num-seqs mb-per-token prefill-chunk-tokens
    prefill-tokens-per-s prefix-block-tokens rendezvous-timeout-s renew-s seed step-jitter
"""
_GENERIC_OPTIONS = "command context-length n-batch n-threads n-threads-batch n-ubatch seed"
"""Of `llama-cpp`. What other programs take, an admin allows by name, and the programs themselves by `--command`."""
_EVERY_VARIABLE = "OMP_NUM_THREADS OMP_WAIT_POLICY"
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

OPTIONS: Mapping[str, frozenset[str]] = {
    "generic": frozenset(_GENERIC_OPTIONS.split()),
    "vllm": frozenset((_VLLM_OPTIONS + _RENDERED + _LAUNCHER_OPTIONS).split()),
    "neuron": frozenset((_VLLM_OPTIONS + _RENDERED).split()),
    "sim": frozenset(_SIM_OPTIONS.split()),
}
VARIABLES: Mapping[str, frozenset[str]] = {
    "generic": frozenset(_EVERY_VARIABLE.split()),
    "vllm": frozenset((_EVERY_VARIABLE + " " + _CELL_VARIABLES + _VLLM_VARIABLES).split()),
    "neuron": frozenset((_EVERY_VARIABLE + " " + _CELL_VARIABLES + _VLLM_VARIABLES + _NEURON_VARIABLES).split()),
    "sim": frozenset(_EVERY_VARIABLE.split()),
}
VALUES: Mapping[str, frozenset[str]] = {
    "command": frozenset({"llama-cpp"}),
    "generation-config": frozenset({"auto", "vllm"}),
    "load-format": frozenset({"auto", "dummy", "safetensors"}),
    "tokenizer-mode": frozenset({"auto", "hf", "mistral", "slow"}),
}
"""Options of which other values are a path, a plugin or a format that may hold code (pickle)."""
KEYS: Mapping[str, frozenset[str]] = {
    "additional-config": frozenset({"max_prompt_length", *SETTINGS}),
    "speculative-config": frozenset(
        {
            *("max_model_len", "method", "model", "num_speculative_tokens", "num_speculative_tokens_per_batch_size"),
            *("prompt_lookup_max", "prompt_lookup_min"),
        }
    ),
}
"""Options that are JSON objects, of which other keys name code or files."""
PLACE_KEYS = frozenset({"quantized_checkpoints_path"})
"""Keys of JSON options whose values are places on a node: NxDI keeps quantized weights there. The version states it in
`quantization`."""
_PLACE = re.compile(r"[/\\\\]|^~|^\.\.?$")
SPECULATION_METHODS = frozenset({"draft_model", "eagle", "eagle3", "medusa", "ngram"})
PRIORITY_SCHEDULING = ("--scheduling-policy", "priority")
"""The arguments of vLLM that turn it on."""
BATCH_PROMPTS_UNLIMITED = ("--batch-prompt-tokens", "0")
"""The order of classes in an engine, turned off."""
READS_WHOLE_PROMPTS = frozenset({"--no-enable-chunked-prefill", "--disable-chunked-mm-input"})
"""With these vLLM cannot limit a prompt's tokens in a step."""
AGENTS_OWN = frozenset(
    {
        *("--config", "--distributed-executor-backend", "--host", "--model", "--model-tag", "--port"),
        *("--served-model-name", "--uds", "PYTHONPATH", "SPT_NOENV", "TMPDIR"),
    }
)
"""What nobody may widen: the agent decides what is served where, and what its processes are known by."""
AGENTS_PREFIX = "SWITCHYARD_"
"""Of variables by which agents and engines know each other."""


@dataclass(frozen=True, slots=True)
class RefusedOption:
    """`name`: as it would be widened, `--trust-remote-code` or `LD_PRELOAD`; `rule`: `allowed` or `value`."""

    name: str
    rule: str
    message: str


def option_name(name: str) -> str:
    """`trust_remote_code` as engines spell it: `--trust-remote-code`."""
    return "--" + name.removeprefix("--").replace("_", "-")


def is_agents_own(name: str) -> bool:
    """Whether this is an option or variable that only agents set."""
    in_cells = name in _CELL_VARIABLES.split()
    return name in AGENTS_OWN or (name.startswith(AGENTS_PREFIX) and not in_cells)


def refused_option(
    engine: str, name: str, value: object, widened: Iterable[str] = (), artifacts: Iterable[str] = ()
) -> RefusedOption | None:
    """Why an engine must not be given this option, which may be spelled either way; None if it may. `artifacts`: where
    those of the plan lie.

    A value that looks like an option is refused wherever it stands: a command line would take it for one.
    """
    flag = option_name(name)
    if (flag not in widened or is_agents_own(flag)) and flag[2:] not in OPTIONS.get(engine, ()):
        return RefusedOption(flag, "allowed", _not_allowed(engine, "option", flag, OPTIONS.get(engine, ())))
    if isinstance(value, str) and value.startswith("-") and not _is_number(value):
        return RefusedOption(flag, "value", f"option {flag} is {value!r}; a value cannot begin with -")
    harmless = VALUES.get(flag[2:])
    if harmless is not None and flag not in widened and not (isinstance(value, str) and value in harmless):
        allowed = ", ".join(sorted(harmless))
        return RefusedOption(flag, "value", f"option {flag} is {value!r}; engine {engine} may be given {allowed}")
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
    """Why an engine must not be given this environment variable; None if it may."""
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
    """The first thing that a rendered command line and environment must not hold; None if all of it may be."""
    names = {name for name in widened if not is_agents_own(name)}
    for flag, value in _given(args):
        if not flag:
            return RefusedOption(str(value), "allowed", f"engine {engine} takes {value!r} only as an option's value")
        if refused := refused_option(engine, flag, value, names, artifacts):
            return refused
    return next((refused for name in env if (refused := refused_variable(engine, name, names))), None)


def _wrong_part(option: str, value: object) -> str:
    """What a JSON option holds that it may not; empty if nothing."""
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
    """Texts in an option's value, also inside its JSON, that can be a path, the name of a repository or a URL, and the
    model that speculation loads, whatever it looks like."""
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


def _given(args: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Options with their values, None where there is none. What follows no option comes with an empty name."""
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
    return f"engine {engine} may not be given the {kind} {name}{hint}; an admin can allow it (engine-allowances)"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
