"""Reads a model's dimensions from the `config.json` of its checkpoint, and the sizes of its tensors from the headers of
its safetensors files or, without headers, from the dimensions. Pure. The files are untrusted: each number is
bounded, and a checkpoint that cannot be read raises UnreadableCheckpoint, which never stops a version."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from math import prod
from typing import Any, Self

from kernel.decoding import decode_json

CONFIG_NAME = "config.json"
CONFIG_BYTES_MAX = 1024**2
HEADER_BYTES_MAX = 8 * 1024**2
"""Of one safetensors file; the format allows 100 MB. A shard of 5 GB has about 100 KiB."""
HEADER_LENGTH_BYTES = 8
FILES_MAX = 2_000
SIZE_MAX = 2**24
LAYERS_MAX = 10_000
FLOAT_BYTES: Mapping[str, int] = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
TENSOR_BYTES: Mapping[str, float] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2,
    "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F4": 0.5,
}  # fmt: skip
FLOATS = ("F64", "F32", "F16", "BF16")
"""Tensors that an engine converts to its own type at load; others keep their size."""
TIED_UNLESS_STATED = ("gemma", "gpt2", "bloom", "falcon", "cohere", "t5")
"""Model types, by prefix, whose configuration class ties the output to the embedding by default."""


class UnreadableCheckpoint(ValueError):
    """The text names file or field, value and rule."""


class Attention(StrEnum):
    """How most layers of a model keep earlier tokens."""

    MHA = "multi-head"
    GQA = "grouped-query"
    MLA = "latent"
    SLIDING = "sliding window"
    HYBRID = "hybrid"
    LINEAR = "linear"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Dimensions of a decoder. `latent`: values per token and layer that latent attention keeps, 0 without.
    `sliding_layers` and `linear_layers` of `layers` keep at most `window` tokens, or a state of `state_values` values
    per request. `experts` 0: dense; `dense_layers` layers have no experts. `bits`: of quantized weights, 0 without.
    `longest`: context,
    0 if unknown. `unsure`: what this reading leaves out."""

    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool = False
    dtype: str = "bfloat16"
    longest: int = 0
    latent: int = 0
    query_latent: int = 0
    rope_dim: int = 0
    value_dim: int = 0
    sliding_layers: int = 0
    linear_layers: int = 0
    window: int = 0
    state_values: int = 0
    experts: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    dense_layers: int = 0
    quantization: str = ""
    bits: float = 0.0
    unsure: str = ""

    @property
    def attention(self) -> Attention:
        if self.latent:
            return Attention.MLA
        if self.linear_layers:
            return Attention.LINEAR if self.linear_layers == self.layers else Attention.HYBRID
        if self.sliding_layers:
            return Attention.SLIDING if self.sliding_layers == self.layers else Attention.HYBRID
        return Attention.MHA if self.kv_heads == self.heads else Attention.GQA

    @property
    def full_layers(self) -> int:
        return self.layers - self.sliding_layers - self.linear_layers


@dataclass(frozen=True, slots=True)
class Tensors:
    """Values that an engine keeps in its own floating-point type, and bytes that it keeps as they are."""

    values: int = 0
    fixed_bytes: int = 0

    def __add__(self, other: "Tensors") -> "Tensors":
        return Tensors(self.values + other.values, self.fixed_bytes + other.fixed_bytes)


@dataclass(frozen=True, slots=True)
class Weights:
    """Sizes by how an engine shares them out: `embedding` and `head` by vocabulary, `kv` by KV heads, `shared_out` by
    tensor-parallel ranks; every rank keeps all of `on_every_rank`. `from_headers`: exact, not computed."""

    embedding: Tensors = Tensors()
    head: Tensors = Tensors()
    kv: Tensors = Tensors()
    shared_out: Tensors = Tensors()
    on_every_rank: Tensors = Tensors()
    from_headers: bool = False

    @property
    def values(self) -> int:
        """Number of floating-point values."""
        return sum(getattr(self, name).values for name in GROUPS)


GROUPS = ("embedding", "head", "kv", "shared_out", "on_every_rank")


def _weights(groups: Mapping[str, Tensors], *, from_headers: bool) -> Weights:
    embedding, head, kv, shared_out, on_every_rank = (groups[name] for name in GROUPS)
    return Weights(embedding, head, kv, shared_out, on_every_rank, from_headers)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The facts of one artifact that decide what it needs."""

    shape: ModelShape
    weights: Weights

    def as_json(self) -> dict[str, Any]:
        return {"shape": asdict(self.shape), "weights": asdict(self.weights)}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """Reads what `as_json` wrote."""
        weights = stored["weights"]
        groups = {name: Tensors(**weights[name]) for name in GROUPS}
        return cls(ModelShape(**stored["shape"]), _weights(groups, from_headers=bool(weights["from_headers"])))


def read_checkpoint(config: bytes, headers: Iterable[bytes]) -> Checkpoint:
    """`headers`: the JSON header of each safetensors file; none for other formats. Raises UnreadableCheckpoint if the
    configuration does not describe a decoder, or a header is broken."""
    shape = read_shape(_object(config, CONFIG_NAME))
    tensors = dict[str, tuple[str, int]]()
    for header in headers:
        tensors |= read_header(_object(header, "a safetensors header"))
    return Checkpoint(shape, weigh_tensors(shape, tensors) if tensors else computed_weights(shape))


def _object(text: bytes, name: str) -> Mapping[str, Any]:
    try:
        value = decode_json(text)
    except ValueError as error:
        raise UnreadableCheckpoint(f"{name} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise UnreadableCheckpoint(f"{name} is not an object")
    return value


class _Config:
    """One configuration; of models with several parts, that of the text decoder."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        parts = (config.get(name) for name in ("text_config", "llm_config", "language_config"))
        self.top, self.text = config, next((part for part in parts if isinstance(part, dict)), config)

    def given(self, *names: str) -> Any:
        """The first value that is neither missing nor null."""
        stated = (part[name] for part in (self.text, self.top) for name in names if part.get(name) is not None)
        return next(stated, None)

    def whole(self, *names: str, default: int | None = None, most: int = SIZE_MAX) -> int:
        value = self.given(*names)
        if value is None and default is not None:
            return default
        if value is None:
            raise UnreadableCheckpoint(f"{CONFIG_NAME} has no {names[0]}")
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            shown = repr(value)[:60]
            raise UnreadableCheckpoint(
                f"{CONFIG_NAME}: {names[0]} is {shown}; it must be a whole number from 1 to {most}"
            )
        return value

    def optional(self, *names: str) -> int:
        """A whole number, or 0 if it is missing or 0."""
        return 0 if self.given(*names) in (0, False) else self.whole(*names, default=0)

    def text_of(self, *names: str) -> str:
        value = self.given(*names)
        return value[:60] if isinstance(value, str) else ""


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The dimensions in a parsed `config.json`. Raises UnreadableCheckpoint if one is missing or impossible."""
    read = _Config(config)
    layers = read.whole("num_hidden_layers", "n_layer", "num_layers", most=LAYERS_MAX)
    hidden = read.whole("hidden_size", "n_embd", "d_model")
    heads = read.whole("num_attention_heads", "n_head", "num_heads")
    model_type = read.text_of("model_type")
    tied = read.given("tie_word_embeddings")
    plain = ModelShape(
        model_type=model_type,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=read.whole("num_key_value_heads", "num_kv_heads", default=heads),
        head_dim=read.whole("head_dim", default=max(1, hidden // heads)),
        intermediate=read.whole("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden),
        vocabulary=read.whole("vocab_size"),
        tied=tied if isinstance(tied, bool) else model_type.startswith(TIED_UNLESS_STATED),
        dtype=_dtype(read),
        longest=0 if _is_rope_scaled(read) else read.optional("max_position_embeddings", "n_positions"),
    )
    return _with_quantization(read, _with_experts(read, _with_attention(read, plain)))


_PARTS_OF: Mapping[str, tuple[str, ...]] = {
    "image": ("vision_config", "vision_tower", "mm_vision_tower", "visual", "image_token_id", "image_token_index"),
    "audio": ("audio_config", "audio_token_id", "audio_token_index"),
    "video": ("video_token_id", "video_token_index"),
}
"""Modality -> members of a configuration that only models with it have."""


def stated_modalities(config: bytes) -> list[str]:
    """What the model takes in addition to text, by the parts in its `config.json`. Raises UnreadableCheckpoint."""
    stated = _object(config, CONFIG_NAME)
    return [name for name, parts in _PARTS_OF.items() if any(stated.get(part) is not None for part in parts)]


def _dtype(read: _Config) -> str:
    stated = read.text_of("torch_dtype", "dtype").removeprefix("torch.")
    return stated if stated in FLOAT_BYTES else "float32" if not stated else "bfloat16"


def _is_rope_scaled(read: _Config) -> bool:
    """Scaled positions reach further than the configuration says, by rules of each engine."""
    stated = [read.given(name) for name in ("rope_scaling", "rope_parameters")]
    kinds = [each.get("rope_type", each.get("type", "default")) for each in stated if isinstance(each, dict)]
    return any(kind != "default" for kind in kinds)


_SLIDING = ("sliding_attention", "chunked_attention", "local_attention")
_STATE_SPACE = ("mamba", "ssm_cfg", "hybrid_override_pattern", "attn_layer_period", "mamba_d_state", "ssm_state_size")


def _with_attention(read: _Config, shape: ModelShape) -> ModelShape:
    if latent := read.optional("kv_lora_rank"):
        rope = read.whole("qk_rope_head_dim", default=64)
        return replace(
            shape,
            latent=latent + rope,
            rope_dim=rope,
            head_dim=read.whole("qk_nope_head_dim", default=128) + rope,
            value_dim=read.whole("v_head_dim", default=128),
            query_latent=read.optional("q_lora_rank"),
        )
    if any(name in read.text for name in _STATE_SPACE) or "mamba" in shape.model_type:
        return replace(shape, unsure="the states of its state-space layers, which only the engine knows")
    window = read.optional("sliding_window", "attention_chunk_size", "window_size")
    kinds = read.given("layer_types")
    if isinstance(kinds, list):
        kinds = kinds[: shape.layers]
        linear = sum(kind == "linear_attention" for kind in kinds)
        sliding = sum(kind in _SLIDING for kind in kinds) if window else 0
        states = _state_values(read) if linear else 0
        unsure = "" if states or not linear else "the states of its linear attention, which only the engine knows"
        return replace(
            shape, window=window if sliding else 0, sliding_layers=sliding, linear_layers=linear, state_values=states,
            unsure=unsure,
        )  # fmt: skip
    if not window or read.given("use_sliding_window") is False:
        return shape
    every = read.optional("sliding_window_pattern") or (2 if shape.model_type == "gemma2" else 0)
    sliding = shape.layers - shape.layers // every if every else shape.layers
    return replace(shape, window=window, sliding_layers=sliding)


def _state_values(read: _Config) -> int:
    """Of one layer of gated delta nets (Qwen3-Next): its recurrent state, and the last inputs of its convolution."""
    if not read.optional("linear_num_value_heads"):
        return 0
    keys = read.whole("linear_num_key_heads") * read.whole("linear_key_head_dim")
    values = read.whole("linear_num_value_heads") * read.whole("linear_value_head_dim")
    convolved = (read.whole("linear_conv_kernel_dim", default=4) - 1) * (2 * keys + values)
    return values * read.whole("linear_key_head_dim") + convolved


def _with_experts(read: _Config, shape: ModelShape) -> ModelShape:
    experts = read.optional("n_routed_experts", "num_local_experts", "num_experts")
    if experts < 2:
        return shape
    one = read.whole("moe_intermediate_size", default=shape.intermediate)
    return replace(
        shape,
        experts=experts,
        expert_intermediate=one,
        shared_intermediate=read.optional("shared_expert_intermediate_size") or read.optional("n_shared_experts") * one,
        dense_layers=min(shape.layers, read.optional("first_k_dense_replace")),
    )


_METHOD_BITS: Mapping[str, float] = {"fp8": 8, "fbgemm_fp8": 8, "mxfp4": 4.25, "awq": 4.5, "gptq": 4.5}
"""Bits per value with scales: one of 8 bits for 32 values (mxfp4), or 16 + 4 to 16 for a group of 128."""


def _with_quantization(read: _Config, shape: ModelShape) -> ModelShape:
    stated = read.given("quantization_config", "compression_config")
    if not isinstance(stated, dict) or not isinstance(stated.get("quant_method"), str):
        return shape
    method, bits = stated["quant_method"][:60], stated.get("bits") or stated.get("w_bit")
    if method == "compressed-tensors":
        groups = stated.get("config_groups")
        first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
        kept = first.get("weights") if isinstance(first, dict) else None
        bits = kept.get("num_bits") if isinstance(kept, dict) else None
    if isinstance(bits, int) and not isinstance(bits, bool) and 1 <= bits <= 16:
        return replace(shape, quantization=method, bits=bits + 0.5 if bits < 8 else float(bits))
    return replace(shape, quantization=method, bits=_METHOD_BITS.get(method, 0.0))


def read_header(header: Mapping[str, Any]) -> dict[str, tuple[str, int]]:
    """Type and number of values of each tensor of a safetensors file. Raises UnreadableCheckpoint for a type that the
    format lacks, or an impossible shape."""
    tensors: dict[str, tuple[str, int]] = {}
    for name, stated in header.items():
        if name == "__metadata__":
            continue
        kind = stated.get("dtype") if isinstance(stated, dict) else None
        sizes = stated.get("shape") if isinstance(stated, dict) else None
        if not isinstance(kind, str) or kind not in TENSOR_BYTES:
            raise UnreadableCheckpoint(f"safetensors: tensor {name[:80]!r} has no valid dtype")
        if not isinstance(sizes, list) or not all(type(size) is int for size in sizes):
            raise UnreadableCheckpoint(f"safetensors: tensor {name[:80]!r} has no valid shape")
        if len(sizes) > 8 or not all(0 <= size < 2**48 for size in sizes):
            raise UnreadableCheckpoint(f"safetensors: tensor {name[:80]!r} has an impossible shape")
        tensors[name] = (kind, prod(sizes))
    return tensors


_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d{1,6})\.")
_EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|wte|word_embeddings|embed_in|tok_embeddings)\.")
_HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out)\.")
_KV = re.compile(r"\.(?:k_proj|v_proj)\.")
_EVERY_RANK = re.compile(
    r"norm|\.ln_|(?:^|\.)wpe\.|\.(?:q_a_proj|kv_a_proj_with_mqa)\.|(?:mlp|block_sparse_moe)\.(?:gate|router)\."
    r"|\.(?:o_proj|down_proj)\.bias$"
)


def weigh_tensors(shape: ModelShape, tensors: Mapping[str, tuple[str, int]]) -> Weights:
    """Sorts the tensors that an engine loads: not those of layers beyond the last one (which guess tokens), nor an
    output matrix that is tied to the embedding."""
    sizes = dict.fromkeys(GROUPS, Tensors())
    for name, (kind, count) in tensors.items():
        layer = _LAYER.search(name)
        group = _group(name)
        if (layer and int(layer[1]) >= shape.layers) or (group == "head" and shape.tied):
            continue
        is_float = kind in FLOATS
        sizes[group] += Tensors(count if is_float else 0, 0 if is_float else int(count * TENSOR_BYTES[kind]))
    return _weights(sizes, from_headers=True)


def _group(name: str) -> str:
    for group, pattern in (("on_every_rank", _EVERY_RANK), ("embedding", _EMBEDDING), ("head", _HEAD), ("kv", _KV)):
        if pattern.search(name):
            return group
    return "shared_out"


def computed_weights(shape: ModelShape) -> Weights:
    """Sizes from the dimensions alone, for gated MLPs without biases, as most decoders have."""
    vocabulary = Tensors(shape.vocabulary * shape.hidden)
    groups = {name: values * shape.layers for name, values in _attention_values(shape).items()}
    expert_layers = shape.layers - shape.dense_layers if shape.experts else 0
    routed = shape.experts * shape.expert_intermediate + shape.shared_intermediate
    mlp = 3 * shape.hidden * (shape.intermediate * (shape.layers - expert_layers) + routed * expert_layers)
    norms = shape.hidden * (2 * shape.layers + 1) + shape.hidden * shape.experts * expert_layers
    found = {
        "embedding": vocabulary,
        "head": Tensors() if shape.tied else vocabulary,
        "kv": _packed(groups.get("kv", 0), shape.bits),
        "shared_out": _packed(groups["shared_out"] + mlp, shape.bits),
        "on_every_rank": Tensors(groups.get("on_every_rank", 0) + norms),
    }
    return _weights(found, from_headers=False)


def _attention_values(shape: ModelShape) -> dict[str, int]:
    """Of one layer, by group."""
    hidden, heads = shape.hidden, shape.heads
    if not shape.latent:
        return {
            "shared_out": 2 * hidden * heads * shape.head_dim,
            "kv": 2 * hidden * shape.kv_heads * shape.head_dim,
        }
    query = heads * shape.head_dim * (shape.query_latent or hidden)
    from_latent = (shape.latent - shape.rope_dim) * heads * (shape.head_dim - shape.rope_dim + shape.value_dim)
    return {
        "shared_out": query + from_latent + heads * shape.value_dim * hidden,
        "on_every_rank": hidden * (shape.query_latent + shape.latent),
    }


def _packed(values: int, bits: float) -> Tensors:
    """Of linear layers, which are quantized if any layer is; embeddings, output and norms keep their type."""
    return Tensors(fixed_bytes=int(values * bits / 8)) if bits else Tensors(values)
