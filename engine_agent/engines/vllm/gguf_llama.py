"""Converts a Llama model in GGUF to the Hugging Face folder that vLLM loads: weights, configuration, tokenizer. The
output contains only what the GGUF file states, plus heads of zeros where the ranks of a cell could not share its heads
evenly. So the same file gives the same bytes. Runs in the engine's Python, which has numpy, gguf, safetensors and
tokenizers."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import safetensors
from gguf import GGMLQuantizationType, GGUFReader, TokenType
from gguf.quants import dequantize, quantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine_agent.protocol.manifest import BadArtifact

LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


@dataclass(frozen=True)
class Heads:
    """Attention heads of the model and of the written weights: the additional ones hold zeros. A head of zeros has zero
    values, and its columns of the output projection are zeros, so it adds nothing."""

    query: int
    key_value: int
    written_query: int
    written_key_value: int


def padded_heads(query: int, key_value: int, ranks: int) -> Heads:
    """Returns the fewest heads that `ranks` can share evenly, with the same number of query heads for each key-value
    head."""
    written_key_value = -(-key_value // ranks) * ranks
    return Heads(query, key_value, written_key_value * (query // key_value), written_key_value)


def convert(gguf_path: Path, folder: Path, ranks: int = 1) -> None:
    """Writes config.json, generation_config.json, the tokenizer's files and model.safetensors (bfloat16) to `folder`.
    The heads are padded so that `ranks` tensor-parallel ranks can share them. Raises BadArtifact if the file is not a
    Llama model with a byte-level BPE tokenizer of the SmolLM kind."""
    reader = GGUFReader(gguf_path)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    for key, known in (("general.architecture", "llama"), ("tokenizer.ggml.pre", "smollm")):
        if metadata.get(key) != known:
            raise BadArtifact(f"{gguf_path} has {key} = {metadata.get(key)!r}; only {known!r} can be converted")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    heads = padded_heads(metadata["llama.attention.head_count"], metadata["llama.attention.head_count_kv"], ranks)
    _write_json(folder / "config.json", _model_config(metadata, heads, tied="output.weight" not in tensors))
    _write_json(folder / "generation_config.json", _token_ids(metadata))
    _write_tokenizer(metadata, folder)
    _write_weights({_tensor_name(name): _weight(tensor, heads) for name, tensor in tensors.items()}, folder)


def _model_config(metadata: dict[str, Any], heads: Heads, *, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads.written_query,
        "num_key_value_heads": heads.written_key_value,
        "head_dim": metadata["llama.embedding_length"] // heads.query,
        "max_position_embeddings": metadata["llama.context_length"],
        # float32 in GGUF; six digits restore the number that the model was trained with.
        "rms_norm_eps": float(f"{metadata['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_parameters": {"rope_type": "default", "rope_theta": metadata["llama.rope.freq_base"]},
        # For transformers 4, which vLLM 0.16 and NxDI use: it would silently take 10,000.
        "rope_theta": metadata["llama.rope.freq_base"],
        "tie_word_embeddings": tied,
        "vocab_size": metadata["llama.vocab_size"],
        **_token_ids(metadata),
    }


def _token_ids(metadata: dict[str, Any]) -> dict[str, int]:
    return {
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }


def _write_tokenizer(metadata: dict[str, Any], folder: Path) -> None:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # llama.cpp's "smollm": every digit is a token, then GPT-2's byte-level split.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    config: dict[str, Any] = {name: tokens[metadata[f"tokenizer.ggml.{key}_token_id"]] for name, key in names.items()}
    config |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", config)
    (folder / "chat_template.jinja").write_text(metadata["tokenizer.chat_template"])


def _tensor_name(gguf_name: str) -> str:
    if gguf_name in TOP_TENSORS:
        return TOP_TENSORS[gguf_name]
    match gguf_name.split("."):
        case ["blk", layer, tensor, "weight"] if tensor in LAYER_TENSORS:
            return f"model.layers.{layer}.{LAYER_TENSORS[tensor]}.weight"
    raise BadArtifact(f"unknown tensor {gguf_name}")


def _weight(tensor: Any, heads: Heads) -> Any:
    values = dequantize(tensor.data, tensor.tensor_type)
    more_query, more_key_value = heads.written_query / heads.query, heads.written_key_value / heads.key_value
    match tensor.name.split("."):
        case ["blk", _, "attn_q", _]:
            values = _padded(_rotary_halves(values, heads.query), 0, more_query)
        case ["blk", _, "attn_k", _]:
            values = _padded(_rotary_halves(values, heads.key_value), 0, more_key_value)
        case ["blk", _, "attn_v", _]:
            values = _padded(values, 0, more_key_value)
        case ["blk", _, "attn_output", _]:
            values = _padded(values, 1, more_query)
    return numpy.ascontiguousarray(quantize(values, GGMLQuantizationType.BF16)).view(numpy.uint16)


def _write_weights(weights: dict[str, Any], folder: Path) -> None:
    # safetensors reads the bytes through the pointers, so `weights` must live until it returns.
    specs = {
        name: safetensors.TensorSpec(
            dtype="bfloat16", shape=list(array.shape), data_ptr=array.ctypes.data, data_len=array.nbytes
        )
        for name, array in weights.items()
    }
    safetensors.serialize_file(specs, folder / "model.safetensors", {"format": "pt"})


def _rotary_halves(rows: Any, heads: int) -> Any:
    """Undoes llama.cpp's row order, which interleaves each head's rotary pairs, to halves as in Hugging Face's
    format."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _padded(values: Any, axis: int, times: float) -> Any:
    zeros = [(0, 0), (0, 0)]
    zeros[axis] = (0, round(values.shape[axis] * (times - 1)))
    return numpy.pad(values, zeros)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
