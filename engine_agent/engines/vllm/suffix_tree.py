"""The suffix trees of vLLM's method `suffix`, built here from source into a folder of their own beside the engine's
environment (`python -m engine_agent.engines.vllm.suffix_tree install --cache DIR`).

vLLM takes them from `arctic_inference`, which is published as source alone; its requirements for building are those of
a GPU's stack. The trees are C++ and need none of that: a compiler, half a minute of one core. Nothing else of it is
kept, least of all what it would change in vLLM. Run by the control plane's Python, with the standard library and uv
alone; a cell that guesses otherwise needs none of it.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from engine_agent.engines.install_command import CannotInstall, Say, install_command
from engine_agent.engines.uv_program import UvProgram
from engine_agent.engines.vllm.environment import installed_python
from engine_agent.engines.vllm.packages_beside import install_beside

NAME = "vllm-suffix-tree"
METHOD = "suffix"
PACKAGE = "arctic_inference"
USE = "whose suffix trees guess"
HOW = "run python -m engine_agent.engines.vllm.suffix_tree install --cache DIR"
LOCK = Path(__file__).with_name("requirements-suffix-tree.lock")
BUILD_LOCK = Path(__file__).with_name("requirements-suffix-tree-build.lock")
KEPT = ("__init__.py", "suffix_decoding")
"""Of the package."""
INSTALL_LIMIT_S = 1800.0
"""A download of 33 MB at 40 kB/s, and a build that takes half a minute of a core that is free."""
QUERY_LIMIT_S = 120.0
COMPILERS = ("c++", "g++", "clang++")


def install(cache: Path, say: Say) -> Path:
    """Build the trees unless they are there; returns their folder.

    Raises:
        CannotInstall: the engine's environment, a compiler, Python's headers or a package is missing.
    """
    python = installed_python(cache)
    if python is None:
        raise CannotInstall(
            "vLLM's environment is not in this cache; run python -m engine_agent.engines.vllm.environment install first"
        )
    headers = Path(_said_by(python, "import sysconfig; print(sysconfig.get_path('include'))"))
    stamp = hashlib.sha256(LOCK.read_bytes() + str(headers).encode()).hexdigest()

    def fill(folder: Path) -> None:
        reason = unable(headers)
        if reason is not None:
            raise CannotInstall(reason)
        _build(python, folder, say)

    return install_beside(cache, NAME, stamp, fill, say)


def unable(headers: Path) -> str | None:
    """Why this machine cannot compile for a Python with these headers; None: it can."""
    if not any(map(shutil.which, filter(None, (os.environ.get("CXX"), *COMPILERS)))):
        return "there is no C++ compiler here (g++ or clang++), and the trees are published as source alone"
    if not (headers / "Python.h").exists():
        return f"{headers} has no Python.h; install the headers of this Python (python3-dev)"
    return None


def _build(python: Path, folder: Path, say: Say) -> None:
    tools = folder.with_name(f"{folder.name}-tools")
    shutil.rmtree(tools, ignore_errors=True)
    uv = UvProgram(say)
    try:
        uv.run(("venv", "--python", str(python), str(tools)), limit_s=QUERY_LIMIT_S)
        builder = tools / "bin" / "python"
        locked = ("--no-deps", "--require-hashes", "-r")
        uv.run(("pip", "install", "--python", str(builder), *locked, str(BUILD_LOCK)), limit_s=INSTALL_LIMIT_S)
        # Its setup.py imports torch.
        purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
        Path(_said_by(builder, purelib), "engine.pth").write_text(_said_by(python, purelib) + "\n")
        say(f"building {NAME} …")
        into = ("--python", str(builder), "--target", str(folder), "--no-build-isolation")
        uv.run(("pip", "install", *into, *locked, str(LOCK)), limit_s=INSTALL_LIMIT_S)
    finally:
        shutil.rmtree(tools, ignore_errors=True)
    _keep_trees(folder)


def _keep_trees(folder: Path) -> None:
    """Remove all else: metadata, too, for vLLM would load the package as a plugin by it."""
    for found in folder.iterdir():
        if found.name != PACKAGE:
            _remove(found)
    for found in (folder / PACKAGE).iterdir():
        if found.name not in KEPT:
            _remove(found)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _said_by(python: Path, program: str) -> str:
    asked = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=QUERY_LIMIT_S, check=True)
    return asked.stdout.strip()


def main(argv: Sequence[str]) -> int:
    """Exit status of the command line."""
    return install_command("engine_agent.engines.vllm.suffix_tree", __doc__, NAME, install, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
