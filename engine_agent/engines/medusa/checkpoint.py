"""Writes trained heads as an artifact: a folder that vLLM loads as a Medusa checkpoint, with what they were judged by
beside it, under a manifest. A folder is there whole or not at all, and never changes."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine_agent.engines.artifact import describe_folder, write_manifest
from engine_agent.engines.medusa.heads import MedusaHeads
from engine_agent.protocol.manifest import DIGEST_PREFIX, Manifest

CALIBRATION_NAME = "calibration.json"


def write_heads(
    heads: MedusaHeads, whole_vocabulary: int, calibration: Mapping[str, Any], name: str, output: Path
) -> tuple[Path, Manifest]:
    """The artifact's folder, `<output>/<name>-<digest>`, and its manifest. `calibration` gets the digest of the weights
    that it is of, `heads_sha256`."""
    from safetensors.torch import save_file

    unfinished = output / f".unfinished-{name}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    tensors = {f"blocks.{number}.layers.0.weight": block.weight for number, block in enumerate(heads.blocks)}
    tensors |= {"lm_heads.0.weight": heads.lm_head, "token_map": heads.vocabulary}
    save_file(
        {key: value.detach().cpu().contiguous() for key, value in tensors.items()}, unfinished / "model.safetensors"
    )
    config = _config(heads, whole_vocabulary)
    (unfinished / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = describe_folder(unfinished, {}).files["model.safetensors"]
    (unfinished / CALIBRATION_NAME).write_text(json.dumps({**calibration, "heads_sha256": weights}, indent=1) + "\n")
    source = {"model": str(calibration["model"]), "trainer": "engine_agent.engines.medusa"}
    manifest = describe_folder(unfinished, source)
    write_manifest(unfinished, manifest)
    for path, mode in ((unfinished, 0o755), *((path, 0o644) for path in unfinished.iterdir())):
        path.chmod(mode)  # engines run as accounts of their own, and nothing of it is secret
    folder = output / f"{name}-{manifest.digest.removeprefix(DIGEST_PREFIX)[:12]}"
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(unfinished, folder)
    return folder, manifest


def _config(heads: MedusaHeads, whole_vocabulary: int) -> dict[str, Any]:
    """As vLLM's `MedusaConfig` reads it: it takes any key with "num" and "heads" in it for `num_heads`, so there must
    be no other."""
    return {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": heads.lm_head.shape[1],
        "vocab_size": whole_vocabulary,
        "truncated_vocab_size": len(heads.vocabulary),
        "original_lm_head": True,
        "num_heads": len(heads.blocks),
        "num_hidden_layers": 1,
    }
