"""Medusa heads that guess at random, written without torch: what they guess is wrong, what is served must not be."""

import json
import random
from array import array
from pathlib import Path

from engine_agent.engines.artifact import describe_folder, write_manifest
from engine_agent.protocol.messages import Artifact

HEADS = 2
VOCABULARY = 64


def random_heads(folder: Path, model: Path) -> Artifact:
    """Heads of a vocabulary of their own, as the trainer writes them.

    The format of their weights: https://huggingface.co/docs/safetensors, a header in JSON before the tensors.
    """
    config = json.loads((model / "config.json").read_text())
    size, source = config["hidden_size"], random.Random(1)
    shapes = {f"blocks.{head}.layers.0.weight": (size, size) for head in range(HEADS)}
    shapes["lm_heads.0.weight"] = (VOCABULARY, size)
    header, floats = {}, array("f")
    for name, shape in shapes.items():
        begin = 4 * len(floats)
        floats.extend(source.gauss(0, 0.05) for _ in range(shape[0] * shape[1]))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": (begin, 4 * len(floats))}
    tokens = array("q", range(100, 100 + VOCABULARY))
    end = 4 * len(floats)
    header["token_map"] = {"dtype": "I64", "shape": (VOCABULARY,), "data_offsets": (end, end + 8 * VOCABULARY)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    folder.mkdir()
    weights = len(text).to_bytes(8, "little") + text + floats.tobytes() + tokens.tobytes()
    (folder / "model.safetensors").write_bytes(weights)
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
    (folder / "config.json").write_text(json.dumps(stated))
    manifest = describe_folder(folder, {})
    write_manifest(folder, manifest)
    return Artifact(f"file://{folder}", manifest.digest)
