"""Draft models with random weights, written without torch: their guesses are wrong, and the served text must not be."""

import json
import random
from array import array
from collections.abc import Mapping
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from engine_agent.engines.artifacts import describe_folder, write_manifest
from engine_agent.protocol.messages import Artifact

HEADS = 2
VOCABULARY = 64
FIRST_TOKEN = 100
NUMBERS = 8191
"""Numbers of random weights that repeat: a prime, so that no two rows of a matrix are alike."""

Shapes = dict[str, tuple[int, ...]]


def random_heads(folder: Path, model: Path) -> Artifact:
    """Medusa heads with a reduced vocabulary, as the trainer writes them."""
    config = _config(model)
    size = config["hidden_size"]
    shapes: Shapes = {f"blocks.{head}.layers.0.weight": (size, size) for head in range(HEADS)}
    shapes["lm_heads.0.weight"] = (VOCABULARY, size)
    stated = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": size,
        "vocab_size": config["vocab_size"],
        "truncated_vocab_size": VOCABULARY,
        "original_lm_head": True,
        "num_heads": HEADS,
        "num_hidden_layers": 1,
    }
    tokens = array("q", range(FIRST_TOKEN, FIRST_TOKEN + VOCABULARY))
    return _written(folder, stated, shapes, {"token_map": tokens})


def random_eagle(folder: Path, model: Path) -> Artifact:
    """A layer on the model's last features (EAGLE), which shares the model's embeddings and LM head."""
    config = _config(model)
    size = config["hidden_size"]
    shapes = {"fc.weight": (size, 2 * size), **_layer(config, "layers.0", size)}
    return _written(folder, {**config, "num_hidden_layers": 1}, shapes, {})


def random_eagle3(folder: Path, model: Path) -> Artifact:
    """A layer on features of three layers of the model (EAGLE 3), with a reduced vocabulary: `d2t` is the difference
    between a token's number in the model and here."""
    config = _config(model)
    size = config["hidden_size"]
    shapes = {
        "fc.weight": (size, 3 * size),
        **_layer(config, "midlayer", 2 * size),
        **{f"midlayer.{name}.weight": (size,) for name in ("input_layernorm", "hidden_norm")},
        "norm.weight": (size,),
        "lm_head.weight": (VOCABULARY, size),
    }
    own = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": VOCABULARY}
    offsets = array("q", [FIRST_TOKEN] * VOCABULARY)
    return _written(folder, {**config, **own, "tie_word_embeddings": False}, shapes, {"d2t": offsets})


def _config(model: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    return config


def _layer(config: Mapping[str, Any], name: str, reads: int) -> Shapes:
    """A Llama layer whose attention reads so many features."""
    size, inner, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    own, shared = (width * config[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
    shapes: Shapes = {
        "self_attn.q_proj": (own, reads),
        "self_attn.k_proj": (shared, reads),
        "self_attn.v_proj": (shared, reads),
        "self_attn.o_proj": (size, own),
        "mlp.gate_proj": (inner, size),
        "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
        "post_attention_layernorm": (size,),
    }
    return {f"{name}.{part}.weight": shape for part, shape in shapes.items()}


def _written(folder: Path, config: Mapping[str, Any], shapes: Shapes, numbers: Mapping[str, "array[int]"]) -> Artifact:
    """The format of weights: https://huggingface.co/docs/safetensors, a header in JSON before the tensors."""
    source = random.Random(1)
    some = array("f", (source.gauss(0, 0.05) for _ in range(NUMBERS)))
    header: dict[str, Any] = {}
    content = bytearray()
    for name, shape in shapes.items():
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        values = array("f", islice(cycle(some), count)) if len(shape) > 1 else array("f", [1.0]) * count
        _add(header, content, name, "F32", shape, values.tobytes())
    for name, whole in numbers.items():
        _add(header, content, name, "I64", (len(whole),), whole.tobytes())
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + content)
    (folder / "config.json").write_text(json.dumps(config))
    manifest = describe_folder(folder, {})
    write_manifest(folder, manifest)
    return Artifact(f"file://{folder}", manifest.digest)


def _add(
    header: dict[str, Any], content: bytearray, name: str, kind: str, shape: tuple[int, ...], values: bytes
) -> None:
    begin = len(content)
    content += values
    header[name] = {"dtype": kind, "shape": shape, "data_offsets": (begin, len(content))}
