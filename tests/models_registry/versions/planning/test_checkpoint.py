"""Checkpoints: dimensions by kind of attention, sizes from headers and from dimensions, and untrusted files."""

import json
from typing import Any

import pytest

from lab.checkpoints import CONFIGS, checkpoint_shapes, header_of
from models_registry.versions.planning.checkpoint import (
    Attention,
    Checkpoint,
    Tensors,
    UnreadableCheckpoint,
    computed_weights,
    read_checkpoint,
    read_shape,
    stated_modalities,
)

LLAMA_8B = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_70B = {
    **LLAMA_8B, "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "intermediate_size": 28672,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
    "num_key_value_heads": 128, "intermediate_size": 18432, "vocab_size": 129280, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 256,
    "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3, "tie_word_embeddings": False,
}  # fmt: skip


def read(config: dict[str, Any], *headers: bytes) -> Checkpoint:
    return read_checkpoint(json.dumps(config).encode(), headers)


@pytest.mark.parametrize(
    ("config", "attention", "values"),
    [
        (LLAMA_8B, Attention.GQA, 8_030_261_248),
        (LLAMA_70B, Attention.GQA, 70_553_706_496),
        (DEEPSEEK_V3, Attention.MLA, 671_026_279_424),
    ],
)
def test_dimensions_give_the_published_number_of_values(
    config: dict[str, Any], attention: Attention, values: int
) -> None:
    shape = read_shape(config)
    assert shape.attention is attention
    # DeepSeek publishes 671,026,419,200: norms of its latents and corrections of its router are not in the formula.
    assert computed_weights(shape).values == values


@pytest.mark.parametrize(
    ("kind", "attention"),
    [
        ("mha", Attention.MHA),
        ("gqa", Attention.GQA),
        ("tied", Attention.GQA),
        ("sliding", Attention.SLIDING),
        ("hybrid", Attention.HYBRID),
        ("mla", Attention.MLA),
    ],
)
def test_headers_and_dimensions_agree_for_each_kind_of_attention(kind: str, attention: Attention) -> None:
    config = dict(CONFIGS[kind])
    found = read(config, header_of(checkpoint_shapes(config))[8:])
    assert found.shape.attention is attention
    assert found.weights.from_headers
    assert found.weights.values == pytest.approx(computed_weights(found.shape).values, rel=1e-3)
    assert Checkpoint.from_json(json.loads(json.dumps(found.as_json()))) == found


def test_layers_that_keep_less_are_counted() -> None:
    gemma = read_shape(CONFIGS["hybrid"])
    assert (gemma.full_layers, gemma.sliding_layers, gemma.window) == (2, 10, 512)
    assert read_shape({**LLAMA_8B, "sliding_window": 4096, "use_sliding_window": False}).sliding_layers == 0
    qwen = {
        **LLAMA_8B, "layer_types": ["linear_attention"] * 24 + ["full_attention"] * 8, "linear_num_value_heads": 32,
        "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    }  # fmt: skip
    linear = read_shape(qwen)
    assert (linear.attention, linear.full_layers, linear.linear_layers) == (Attention.HYBRID, 8, 24)
    assert linear.state_values == 32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128)
    assert read_shape({**LLAMA_8B, "model_type": "jamba", "mamba_d_state": 16}).unsure


def test_the_text_decoder_of_a_model_with_pictures_counts() -> None:
    shape = read_shape({"model_type": "llava", "text_config": LLAMA_8B, "vision_config": {"hidden_size": 1}})
    assert (shape.layers, shape.hidden, shape.model_type) == (32, 4096, "llama")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, []),
        ({"vision_config": {"depth": 2}}, ["image"]),
        ({"vision_config": None, "audio_config": {}}, ["audio"]),
        ({"vision_config": {}, "audio_config": {}, "video_token_id": 7}, ["image", "audio", "video"]),
    ],
)
def test_parts_of_the_configuration_say_what_the_model_takes(config: dict[str, Any], expected: list[str]) -> None:
    assert stated_modalities(json.dumps(config).encode()) == expected


@pytest.mark.parametrize(
    ("stated", "method", "bits"),
    [
        ({"quant_method": "fp8"}, "fp8", 8),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq", 4.5),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8}}}}, "comp", 8),
        ({"quant_method": "compressed-tensors", "config_groups": []}, "comp", 0),
        ({"quant_method": 7}, "", 0),
    ],
)
def test_quantized_checkpoints_say_how_many_bits(stated: dict[str, Any], method: str, bits: float) -> None:
    shape = read_shape({**LLAMA_8B, "quantization_config": stated})
    assert (shape.quantization[:4], shape.bits) == (method[:4], bits)


def test_an_engine_loads_neither_guessing_layers_nor_a_tied_output() -> None:
    tensor = {"dtype": "BF16", "shape": [4, 4], "data_offsets": [0, 32]}
    packed = {"dtype": "F8_E4M3", "shape": [4, 4], "data_offsets": [0, 16]}
    names = ("lm_head.weight", "model.layers.32.q_proj.weight", "model.layers.31.self_attn.k_proj.weight")
    header = {**dict.fromkeys(names, tensor), "model.layers.0.mlp.up_proj.weight": packed, "__metadata__": {"a": "b"}}
    found = read({**LLAMA_8B, "tie_word_embeddings": True}, json.dumps(header).encode()).weights
    assert (found.head, found.kv, found.shared_out) == (Tensors(), Tensors(16), Tensors(fixed_bytes=16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": None}, "config.json has no num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be a whole number from 1 to 10000"),
        ({"hidden_size": 0}, "hidden_size is 0; it must be a whole number from 1"),
        ({"hidden_size": True}, "hidden_size is True; it must"),
        ({"vocab_size": "x" * 500}, "vocab_size is 'xxx"),
        ({"head_dim": [64]}, r"head_dim is \[64\]"),
    ],
)
def test_impossible_dimensions_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnreadableCheckpoint, match=message) as raised:
        read({**LLAMA_8B, **change})
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{" * 100,
        b'{"a": {"dtype": "F99", "shape": [1]}}',
        b'{"a": {"dtype": "F32", "shape": [-1]}}',
        b'{"a": {"dtype": "F32", "shape": "12"}}',
        b'{"a": {"dtype": "F32", "shape": [281474976710656]}}',
        b'{"a": {"dtype": ["F32"], "shape": [1]}}',
        b'{"a": 7}',
    ],
)
def test_a_broken_header_is_refused(header: bytes) -> None:
    with pytest.raises(UnreadableCheckpoint):
        read(LLAMA_8B, header)


@pytest.mark.parametrize(
    ("change", "longest"),
    [
        ({}, 8192),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 0),
        ({"rope_parameters": {"rope_type": "default"}}, 8192),
        ({"rope_scaling": None}, 8192),
    ],
)
def test_the_longest_context_is_known_unless_positions_are_scaled(change: dict[str, Any], longest: int) -> None:
    assert read_shape({**LLAMA_8B, "max_position_embeddings": 8192, **change}).longest == longest
