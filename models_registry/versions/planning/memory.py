"""The memory of a version per device on an instance type, line by line, and what fits: weights, KV cache by kind of
attention, overhead, tokens and requests. Pure. Every number has its source; a refusal rests only on tables and on the
checkpoint's files, never on an estimate. Follows vLLM 0.32 (`v1/kv_cache_interface.py`, `v1/core/kv_cache_utils.py`),
whose log `python -m bench memory_estimate` compares; NxDI allocates its KV cache for all requests at its start."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from models_registry.instance_types.planner import LOCAL_CPU, InstanceShape
from models_registry.versions.planning.checkpoint import FLOAT_BYTES, Checkpoint, ModelShape, Tensors, Weights
from models_registry.versions.planning.known_options import FREE_SHARE, FREE_SHARE_DEFAULT, NAMES
from models_registry.versions.planning.machines import Degrees
from models_registry.versions.planning.spec import HeadCounts, InvalidVersion, VersionSpec

GIB = 1024**3
CONTEXT_BYTES = GIB
"""Per device: the CUDA context, NCCL's buffers and CUDA graphs take 0.5 to 1.5 GiB."""
CPU_PROCESS_BYTES = 674 * 2**20
"""Resident memory of a worker on a CPU without its weights, by `python -m bench memory_estimate`."""
ALLOWS_LONGER = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
OVERHEADS = ("process", "overhead")
ENGINES_WITH_ARITHMETIC = ("neuron", "sglang", "tensorrt-llm", "vllm")
LIMITED_BY_MODEL = ("sglang", "vllm")
"""Engines that do not start with a longer context than the model's."""


class Source(StrEnum):
    """Where a number comes from."""

    READ = "read"
    STATED = "stated"
    RATED = "rated"
    MEASURED = "measured"
    ESTIMATED = "estimated"

    @property
    def meaning(self) -> str:
        return {
            "read": "from the checkpoint's files",
            "stated": "by the version, or the engine's default",
            "rated": "from the table of instance types",
            "measured": "by a bench of this project",
            "estimated": "by a formula that was not measured on this device",
        }[self.value]


@dataclass(frozen=True, slots=True)
class Line:
    """One step of the arithmetic: `value` in `unit` (bytes, tokens or requests), and `how` it was computed."""

    name: str
    value: float
    unit: str
    source: Source
    how: str


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Per device, which runs one rank; of the stage that needs most. `tokens` and `requests` fit at the same time.
    `shortfall`: why the version cannot start, empty if it can; `is_certain`: by tables and files, not by an estimate.
    `notes`: what this arithmetic leaves open."""

    lines: tuple[Line, ...]
    weights_bytes: int
    kv_bytes_per_token: int
    kv_bytes: int
    tokens: int
    requests: float
    shortfall: str = ""
    is_certain: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Options that decide about memory. `kv_bytes` None: what is left. `in_flight`: tokens that a step may add."""

    engine: str
    longest: int
    requests: int
    value_bytes: int
    kv_value_bytes: int
    utilization: float
    kv_bytes: int | None
    block: int
    in_flight: int
    method: str
    is_hybrid: bool


def estimate_memory(
    spec: VersionSpec, checkpoint: Checkpoint, degrees: Degrees, machine: InstanceShape
) -> MemoryEstimate:
    """`spec`: the version on these machines (`VersionSpec.on`), for an engine with arithmetic."""
    settings = _settings(spec, checkpoint.shape, degrees, machine)
    return _Arithmetic(spec, checkpoint, degrees, machine, settings).estimate()


def check_fits(spec: VersionSpec, checkpoint: Checkpoint, degrees: Degrees, machine: InstanceShape) -> None:
    """Raises InvalidVersion if the model certainly needs more memory than a device has, or its context is shorter than
    the version's; the text shows why. Memory of unknown machines, and of the local host's CPU, is not checked."""
    longest = checkpoint.shape.longest
    if spec.engine in LIMITED_BY_MODEL and 0 < longest < spec.max_model_len and ALLOWS_LONGER not in spec.engine_env:
        raise InvalidVersion(
            f"{spec.reference}: context_length is {spec.max_model_len}; it must be at most {longest}, the model's "
            "max_position_embeddings" + (f", unless engine_env.{ALLOWS_LONGER} is 1" if spec.engine == "vllm" else "")
        )
    found = estimate_memory(spec, checkpoint, degrees, machine)
    if found.is_certain:
        raise InvalidVersion(f"{spec.reference}: {found.shortfall}")


def with_heads(spec: VersionSpec, checkpoint: Checkpoint) -> VersionSpec:
    """The version with the counts of its checkpoint, against which its degrees are then checked."""
    shape = checkpoint.shape
    kv = shape.heads if shape.latent else shape.kv_heads  # latent attention has no KV heads to divide
    return replace(spec, heads=HeadCounts(shape.heads, kv, shape.layers))


def device_memory_bytes(machine: InstanceShape) -> int:
    """Memory of one rank; 0 if unknown."""
    return int(machine.memory_gib * GIB / machine.cores) if machine.cores and machine.memory_gib else 0


_KV_BYTES: Mapping[str, int] = {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp8_inc": 1, "int8": 1, **FLOAT_BYTES}
_CPU_BLOCK, _BLOCK = 128, 16


def _settings(spec: VersionSpec, shape: ModelShape, degrees: Degrees, machine: InstanceShape) -> EngineSettings:
    options = {name.replace("-", "_"): value for name, value in spec.engine_options.items()}
    is_cpu = machine.accelerator == "cpu"
    value_bytes = _value_bytes(options.get("dtype"), shape, spec.engine)
    latent_on_cpu = is_cpu and bool(shape.latent)
    names = NAMES[spec.engine]
    batched = whole_option(options, names.batched) or default_batched_tokens(machine, degrees)
    kv_space = str(spec.engine_env.get("VLLM_CPU_KVCACHE_SPACE", ""))
    kv_bytes = whole_option(options, "kv_cache_memory_bytes")
    if is_cpu and kv_space.isdecimal() and len(kv_space) < 8:
        kv_bytes = int(kv_space) * GIB
    block = whole_option(options, names.block) or (_CPU_BLOCK if is_cpu else names.usual_block)
    stated = options.get(names.share)
    return EngineSettings(
        engine=spec.engine,
        longest=spec.max_model_len,
        requests=spec.max_concurrency,
        value_bytes=value_bytes,
        kv_value_bytes=_KV_BYTES.get(str(options.get("kv_cache_dtype", "auto")), value_bytes),
        utilization=float(stated) if isinstance(stated, int | float) and 0 < stated <= 1 else names.usual_share,
        kv_bytes=kv_bytes,
        block=_BLOCK if latent_on_cpu else block,
        in_flight=batched if is_cpu or options.get("no_async_scheduling") or names.usual_share == 1 else 2 * batched,
        method=str(spec.quantization.get("method") or spec.quantization.get("dtype") or ""),
        is_hybrid=not options.get("disable_hybrid_kv_cache_manager"),
    )


def whole_option(options: Mapping[str, Any], name: str) -> int | None:
    value = options.get(name)
    text = str(value)
    return int(text) if not isinstance(value, bool) and text.isdecimal() and 0 < len(text) < 16 and int(text) else None


def _value_bytes(dtype: Any, shape: ModelShape, engine: str) -> int:
    """vLLM loads a checkpoint in float32 as bfloat16 unless told otherwise; NxDI computes in bfloat16."""
    if isinstance(dtype, str) and dtype in FLOAT_BYTES and engine != "neuron":
        return FLOAT_BYTES[dtype]
    return 2


def default_batched_tokens(machine: InstanceShape, degrees: Degrees) -> int:
    """vLLM's default of `--max-num-batched-tokens` for a server."""
    if machine.accelerator == "cpu":
        return 2048 * degrees.world_size
    memory = device_memory_bytes(machine)
    return 16384 if memory >= 160 * GIB else 8192 if memory >= 70 * GIB and machine.accelerator != "a100" else 2048


_ONLINE_BYTES: Mapping[str, float] = {"fp8": 1, "f8e4m3": 1, "int8": 1, "bitsandbytes": 0.5625}
"""Bytes per value of linear layers, by methods that an engine applies itself while it loads."""


class _Arithmetic:
    def __init__(
        self,
        spec: VersionSpec,
        checkpoint: Checkpoint,
        degrees: Degrees,
        machine: InstanceShape,
        settings: EngineSettings,
    ) -> None:
        self.spec, self.shape, self.weights = spec, checkpoint.shape, checkpoint.weights
        self.degrees, self.machine, self.settings = degrees, machine, settings
        self.lines: list[Line] = []
        self.notes: list[str] = []
        self.stage_share = -(-self.shape.layers // degrees.pp) / self.shape.layers

    def say(self, name: str, value: float, unit: str, source: Source, how: str) -> None:
        self.lines.append(Line(name, value, unit, source, how))

    def estimate(self) -> MemoryEstimate:
        weights = self._weights()
        per_token = self._kv_per_token()
        usable = self._usable()
        kv_bytes = self._kv_space(usable, weights)
        one = self._one_request()
        requests, tokens = self._fitting(kv_bytes, one)
        shortfall, is_certain = self._shortfall(usable, weights, one)
        left_out = [self.shape.unsure] if self.shape.unsure else []
        left_out += ["its adapters"] if self.spec.adapters else []
        left_out += ["its draft model or heads"] if self.spec.speculation.get("draft_uri") else []
        if left_out:
            self.notes.append(f"not counted: {', '.join(left_out)}")
        return MemoryEstimate(
            lines=tuple(self.lines),
            weights_bytes=weights,
            kv_bytes_per_token=per_token,
            kv_bytes=kv_bytes,
            tokens=tokens,
            requests=requests,
            shortfall=shortfall,
            is_certain=is_certain,
            notes=tuple(self.notes),
        )

    def _weights(self) -> int:
        """Of the largest rank: the first stage has the embedding, the last the output; tied, both have the former."""
        weights, degrees, tp = self.weights, self.degrees, self.degrees.tp
        source = Source.READ if weights.from_headers else Source.ESTIMATED
        per_rank = self._bytes(weights.shared_out, is_linear=True) / tp
        kv_copies = max(1, tp // self.shape.kv_heads) if not self.shape.latent else 1
        per_rank += self._bytes(weights.kv, is_linear=True) * kv_copies / tp
        layers = per_rank + self._bytes(weights.on_every_rank)
        ends = [self._bytes(weights.embedding) / tp, self._bytes(weights.head) / tp]
        end = sum(ends) if degrees.pp == 1 else max(ends)
        total = int(layers * self.stage_share + end)
        held = "headers of its files" if weights.from_headers else "dimensions in its configuration"
        split = f"linear layers, experts and vocabulary over tp = {tp}, norms on every rank"
        stages = f", {-(-self.shape.layers // degrees.pp)} of {self.shape.layers} layers" if degrees.pp > 1 else ""
        values = f"{weights.values:,} values of {self.settings.value_bytes} bytes"
        fixed = sum(getattr(weights, name).fixed_bytes for name in ("shared_out", "kv", "on_every_rank"))
        packed = f" and {fixed:,} bytes of quantized tensors" if fixed else ""
        online = f", linear layers quantized to {self.settings.method}" if self._online() else ""
        self.say("weights", total, "bytes", source, f"{held}: {values}{packed}{online}; {split}{stages}")
        return total

    def _online(self) -> float:
        """Bytes per value, 0 if the checkpoint is loaded as it is."""
        return 0 if self.shape.quantization else _ONLINE_BYTES.get(self.settings.method, 0)

    def _bytes(self, tensors: Tensors, *, is_linear: bool = False) -> float:
        per_value = (self._online() if is_linear else 0) or self.settings.value_bytes
        return tensors.values * per_value + tensors.fixed_bytes

    def _layer_bytes(self) -> int:
        """KV cache of one token in one layer."""
        shape, size = self.shape, self.settings.kv_value_bytes
        return shape.latent * size if shape.latent else self._kv_heads() * 2 * shape.head_dim * size

    def _kv_heads(self) -> int:
        kv, tp = self.shape.kv_heads, self.degrees.tp
        return -(-kv // tp) if self.settings.engine == "neuron" else max(1, kv // tp)

    def _stage_layers(self, layers: int) -> int:
        return -(-layers // self.degrees.pp)

    def _kv_per_token(self) -> int:
        shape, size = self.shape, self.settings.kv_value_bytes
        layers = self._stage_layers(shape.full_layers + shape.sliding_layers)
        total = layers * self._layer_bytes()
        if shape.latent:
            how = f"{layers} layers x {shape.latent} latent values x {size} bytes, not divided by tp"
        else:
            heads = f"max(1, {shape.kv_heads} KV heads / tp {self.degrees.tp}) = {self._kv_heads()}"
            how = f"{layers} layers x {heads} x 2 x head size {shape.head_dim} x {size} bytes"
        self.say("KV cache per token", total, "bytes", Source.READ, f"{shape.attention} attention: {how}")
        return total

    def _usable(self) -> int:
        memory, share = device_memory_bytes(self.machine), self.settings.utilization
        if not memory:
            self.notes.append(f"the memory of {self.machine.name} is unknown, so nothing is checked against it")
            return 0
        cores = f"{self.machine.memory_gib:g} GiB of {self.machine.name} / {self.machine.cores}"
        self.say("memory of a device", memory, "bytes", Source.RATED, cores)
        if self.machine.name == LOCAL_CPU:
            self.notes.append(
                f"{LOCAL_CPU} stands for any host, which may have more or less than {memory / GIB:g} GiB: not checked"
            )
        if self.settings.engine == "neuron":
            return memory
        if share == 1 and NAMES[self.settings.engine].usual_share == 1:
            return memory
        usable = int(memory * share)
        how = f"{NAMES[self.settings.engine].share} {share:g} of it"
        self.say("usable by the engine", usable, "bytes", Source.STATED, how)
        return usable

    def _overhead(self) -> int:
        if self.machine.accelerator == "cpu":
            self.say(OVERHEADS[0], CPU_PROCESS_BYTES, "bytes", Source.MEASURED, "a worker on a CPU without its weights")
            return CPU_PROCESS_BYTES
        shape, settings = self.shape, self.settings
        batched = settings.longest if settings.engine == "neuron" else settings.in_flight
        batched = batched // 2 if settings.engine == "vllm" else batched
        widest = 4 * shape.hidden + 2 * max(shape.intermediate, shape.shared_intermediate) // self.degrees.tp
        step = batched * widest * settings.value_bytes
        logits = settings.requests * shape.vocabulary * 8
        total = CONTEXT_BYTES + step + logits
        how = (
            f"1 GiB for context, collectives and graphs, {batched:,} tokens x {widest:,} activations x "
            f"{settings.value_bytes} bytes, and logits of {settings.requests:,} requests"
        )
        self.say(OVERHEADS[1], total, "bytes", Source.ESTIMATED, how)
        return total

    def _kv_space(self, usable: int, weights: int) -> int:
        if self.settings.kv_bytes is not None:
            self.say("KV cache", self.settings.kv_bytes, "bytes", Source.STATED, "the size that the version states")
            return self.settings.kv_bytes
        if not usable:
            return 0
        if self.settings.engine == "sglang" and self.settings.utilization < 1:
            left = max(0, usable - weights)  # SGLang's share is of weights and cache alone
            self.say("KV cache", left, "bytes", Source.ESTIMATED, "usable - weights")
            return left
        left = max(0, usable - weights - self._overhead())
        if self.settings.engine == "tensorrt-llm":
            stated = {name.replace("-", "_"): value for name, value in self.spec.engine_options.items()}.get(FREE_SHARE)
            share = stated if isinstance(stated, int | float) and 0 < stated <= 1 else FREE_SHARE_DEFAULT
            how = f"{FREE_SHARE} {share:g} of what is free"
            self.say("KV cache", int(left * share), "bytes", Source.ESTIMATED, how)
            return int(left * share)
        self.say("KV cache", left, "bytes", Source.ESTIMATED, "usable - weights - overhead")
        return left

    def _groups(self) -> list[tuple[int, bool]]:
        """Layer groups as vLLM forms them, each with the number of its layers that it pages together, and whether they
        slide."""
        full, sliding = self._stage_layers(self.shape.full_layers), self._stage_layers(self.shape.sliding_layers)
        if not self.settings.is_hybrid and full:
            full, sliding = full + sliding, 0
        if not (full and sliding):
            return [(full or sliding, bool(sliding))] if full or sliding else []
        least, most = min(full, sliding), max(full, sliding)
        size = most if most < 1.5 * least else least
        return [(size, False)] * -(-full // size) + [(size, True)] * -(-sliding // size)

    def _one_request(self) -> int:
        """KV cache of one request at its maximum length, in whole blocks."""
        settings, shape = self.settings, self.shape
        total, parts = 0, list[str]()
        page = self._layer_bytes() * settings.block
        for layers, slides in self._groups():
            held = settings.longest
            if slides:
                held = min(held, shape.window - 1 + settings.in_flight)
            blocks = -(-held // settings.block) + slides
            total += blocks * layers * page
            parts.append(f"{blocks} blocks of {layers} layers" + (" that slide" if slides else ""))
        if shape.state_values:
            states = self._stage_layers(shape.linear_layers) * shape.state_values * 4 // self.degrees.tp
            total += states
            parts.append(f"states of {self._stage_layers(shape.linear_layers)} linear layers")
        how = f"{' + '.join(parts) or 'nothing'} for {settings.longest:,} tokens, {settings.block} tokens in a block"
        source = Source.ESTIMATED if shape.state_values or shape.unsure else Source.READ
        self.say("KV cache of one request", total, "bytes", source, how)
        return total

    def _fitting(self, kv_bytes: int, one: int) -> tuple[float, int]:
        if not one or not kv_bytes:
            return 0.0, 0
        layers = max((size for size, _ in self._groups()), default=1)
        block = layers * self._layer_bytes() * self.settings.block
        requests = kv_bytes // block * block / one
        tokens = int(requests * self.settings.longest)
        source = Source.ESTIMATED if self.settings.kv_bytes is None else self.lines[-1].source
        self.say("tokens that fit", tokens, "tokens", source, f"requests that fit x {self.settings.longest:,} tokens")
        self.say("requests that fit", requests, "requests", source, "KV cache / KV cache of one request")
        if requests < self.settings.requests:
            self.notes.append(
                f"{requests:.1f} requests of {self.settings.longest:,} tokens fit at the same time; max_concurrency is "
                f"{self.settings.requests:,}, so long requests wait or are preempted"
            )
        return requests, tokens

    def _shortfall(self, usable: int, weights: int, one: int) -> tuple[str, bool]:
        """What does not fit, and whether that is certain: without any estimate."""
        settings = self.settings
        certain = self.weights.from_headers and not self.shape.unsure and self.machine.name != LOCAL_CPU
        if settings.kv_bytes is not None and one > settings.kv_bytes:
            return (
                f"one request of {settings.longest:,} tokens needs {_gib(one)} of KV cache, and the version states "
                f"{_gib(settings.kv_bytes)}; state more, or lower context_length",
                not self.shape.unsure,
            )
        if not usable:
            return "", False
        device = f"a device of {self.machine.name} has {_gib(usable)}"
        if settings.engine != "neuron" and settings.utilization < 1:
            whole = _gib(device_memory_bytes(self.machine))
            device += f" ({whole} x {NAMES[settings.engine].share} {settings.utilization:g})"
        degrees = f"tp = {self.degrees.tp}" + (f", pp = {self.degrees.pp}" if self.degrees.pp > 1 else "")
        if weights > usable:
            return (
                f"its weights need {_gib(weights)} per device with {degrees}, and {device}; {self._larger()}",
                certain,
            )
        requests = settings.requests if settings.engine == "neuron" else 1
        overhead = next((int(line.value) for line in self.lines if line.name in OVERHEADS), 0)
        cache = requests * one
        if weights + cache + overhead <= usable:
            return "", False
        # With data parallelism or prefix caching NxDI sizes its cache otherwise.
        is_other_cache = self.degrees.dp > 1 or bool(self.spec.engine_options.get("enable_prefix_caching"))
        certain = certain and weights + cache > usable and not (settings.engine == "neuron" and is_other_cache)
        whose = "one request" if requests == 1 else f"max_concurrency = {requests} requests"
        parts = f"weights of {_gib(weights)}, {_gib(cache)} of KV cache for {whose} of {settings.longest:,} tokens"
        parts += "" if certain else f" and an estimated overhead of {_gib(overhead)}"
        less = "lower max_concurrency or context_length" if requests > 1 else "lower context_length"
        return f"{parts} do not fit with {degrees}: {device}; {less}, or {self._larger()}", certain

    def _larger(self) -> str:
        ranks = self.degrees.nodes * self.machine.cores
        higher = ranks > self.degrees.world_size
        return "raise tp, or use larger devices" if higher else "use more nodes, larger devices or quantized weights"


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"


__all__ = ["Line", "MemoryEstimate", "Source", "Weights", "check_fits", "estimate_memory", "with_heads"]
