"""SmolLM2 with its first layers only, written without torch: what two engines make of a prompt can be compared whatever
the model says, and a quarter of the layers computes it in a fraction of the time."""

import json
import re
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from engine_agent.engines.artifacts import describe_folder, write_manifest
from engine_agent.protocol.messages import Artifact

LAYERS = 8
"""EAGLE-3 takes the features of three, which vLLM counts from both ends and the middle: with fewer they coincide."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_WEIGHTS = "model.safetensors"


def first_layers(artifact: Artifact, folder: Path) -> Artifact:
    """The same with `LAYERS` layers, in a new folder.

    The format of its weights: https://huggingface.co/docs/safetensors, a header in JSON before the tensors.
    """
    whole = Path(urlparse(artifact.uri).path)
    folder.mkdir()
    for file in whole.iterdir():
        if file.name not in {_WEIGHTS, "config.json", "manifest.json"}:
            shutil.copy(file, folder)
    config = json.loads((whole / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": LAYERS}))
    _copy_weights(whole / _WEIGHTS, folder / _WEIGHTS)
    manifest = describe_folder(folder, {})
    write_manifest(folder, manifest)
    return Artifact(f"file://{folder}", manifest.digest)


def _copy_weights(source: Path, target: Path) -> None:
    with source.open("rb") as read, target.open("wb") as written:
        size = int.from_bytes(read.read(8), "little")
        header: dict[str, Any] = json.loads(read.read(size))
        kept = {name: each for name, each in header.items() if name != "__metadata__" and _is_kept(name)}
        end, places = 0, {}
        for name, each in kept.items():
            begin, end = end, end + each["data_offsets"][1] - each["data_offsets"][0]
            places[name] = {**each, "data_offsets": (begin, end)}
        text = json.dumps(places).encode()
        text += b" " * (-len(text) % 8)
        written.write(len(text).to_bytes(8, "little") + text)
        for each in kept.values():
            first, after = each["data_offsets"]
            read.seek(8 + size + first)
            written.write(read.read(after - first))


def _is_kept(name: str) -> bool:
    layer = _LAYER.match(name)
    return layer is None or int(layer[1]) < LAYERS
