"""Random checkpoints of every kind of attention, for tests and benches of memory: a `config.json` and one safetensors
file, written without torch. Their answers mean nothing."""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Shapes = dict[str, tuple[int, ...]]

_LLAMA: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 768,
    "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 12,
    "head_dim": 64, "vocab_size": 32000, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "rope_theta": 10000.0,
}  # fmt: skip
_MISTRAL = {**_LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "num_key_value_heads": 4}
_GEMMA = {
    **_LLAMA, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 64, "sliding_window": 512,
    "tie_word_embeddings": True, "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
    "rope_local_base_freq": 10000.0,
}  # fmt: skip
_DEEPSEEK = {
    **_LLAMA, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "kv_lora_rank": 512,
    "q_lora_rank": 384, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 8,
    "first_k_dense_replace": 12, "moe_layer_freq": 1, "head_dim": None,
}  # fmt: skip
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "mha": _LLAMA,
    "gqa": {**_LLAMA, "num_key_value_heads": 4},
    "tied": {**_LLAMA, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "sliding": {**_MISTRAL, "sliding_window": 512},
    "hybrid": _GEMMA,
    "mla": _DEEPSEEK,
}
"""Configurations by kind, of 0.1 to 0.2 billion values."""


def checkpoint_shapes(config: Mapping[str, Any]) -> Shapes:
    """The tensors of a configuration above."""
    size, vocabulary = config["hidden_size"], config["vocab_size"]
    shapes: Shapes = {"model.embed_tokens.weight": (vocabulary, size), "model.norm.weight": (size,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocabulary, size)
    for layer in range(config["num_hidden_layers"]):
        parts = {**_attention(config), **_around(config)}
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
    return shapes


def _attention(config: Mapping[str, Any]) -> Shapes:
    size, heads = config["hidden_size"], config["num_attention_heads"]
    if latent := config.get("kv_lora_rank"):
        rope, query = config["qk_rope_head_dim"], config["q_lora_rank"]
        plain, value = config["qk_nope_head_dim"], config["v_head_dim"]
        return {
            "self_attn.q_a_proj": (query, size),
            "self_attn.q_a_layernorm": (query,),
            "self_attn.q_b_proj": (heads * (plain + rope), query),
            "self_attn.kv_a_proj_with_mqa": (latent + rope, size),
            "self_attn.kv_a_layernorm": (latent,),
            "self_attn.kv_b_proj": (heads * (plain + value), latent),
            "self_attn.o_proj": (size, heads * value),
        }
    width = config["head_dim"]
    kept = config["num_key_value_heads"] * width
    found: Shapes = {
        "self_attn.q_proj": (heads * width, size),
        "self_attn.k_proj": (kept, size),
        "self_attn.v_proj": (kept, size),
        "self_attn.o_proj": (size, heads * width),
    }
    if config["model_type"] == "gemma3_text":
        found |= {"self_attn.q_norm": (width,), "self_attn.k_norm": (width,)}
    return found


def _around(config: Mapping[str, Any]) -> Shapes:
    size, inner = config["hidden_size"], config["intermediate_size"]
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config["model_type"] == "gemma3_text":
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    return {
        "mlp.gate_proj": (inner, size),
        "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
        **dict.fromkeys(norms, (size,)),
    }


def header_of(shapes: Shapes) -> bytes:
    """The start of a safetensors file (https://huggingface.co/docs/safetensors) of bfloat16 tensors."""
    header, at = dict[str, Any](), 0
    for name, shape in shapes.items():
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + 2 * count]}
        at += 2 * count
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_checkpoint(folder: Path, config: Mapping[str, Any], *, weights: bool = True) -> Path:
    """Writes `config.json` and, with `weights`, random ones; otherwise only the header of a safetensors file."""
    folder.mkdir(parents=True)
    kept = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    shapes = checkpoint_shapes(config)
    some = random.Random(1).randbytes(1 << 20)
    # The exponent of bfloat16 is in the second byte: 0x3d and 0xbd are values of about 0.05.
    small = bytes(byte if at % 2 == 0 else 0x3D | (byte & 0x80) for at, byte in enumerate(some))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header_of(shapes))
        left = sum(2 * shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes.values()) if weights else 0
        while left:
            left -= file.write(small[:left])
    return folder
