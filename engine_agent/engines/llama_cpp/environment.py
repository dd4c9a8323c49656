"""Installs llama.cpp: `python -m engine_agent.engines.llama_cpp.environment install --cache DIR`. Run by the control
plane's Python, with only the standard library and uv. An environment counts as installed once its stamp is written,
last of all; one without the right stamp is removed and installed again. On a machine that cannot run llama.cpp it exits
with one sentence."""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from engine_agent.engines.artifacts import exclusively
from engine_agent.engines.uv_install import (
    CannotInstall,
    Say,
    UvProgram,
    cpu_flags,
    install_command,
    last_line,
    removed_on_failure,
)

NAME = "llama-cpp"
TITLE = "llama.cpp for CPU"
STAMP_NAME = "installed"
INSTALL_LIMIT_S = 900.0
"""Downloads of 34 MB, or 98 MB of weights, at 0.1 MB/s."""
QUERY_LIMIT_S = 120.0
MODULE = "xllamacpp"
LOCK = Path(__file__).with_name("requirements.lock")


def environment_folder(cache: Path) -> Path:
    return cache / "engines" / NAME


def installed_python(cache: Path) -> Path | None:
    """Returns the interpreter of the installed environment, or None if there is none for the current requirements."""
    folder = environment_folder(cache)
    try:
        stamp = (folder / STAMP_NAME).read_text()
    except OSError:
        return None
    python = folder / "bin" / "python"
    return python if stamp == _requirements_digest() and python.exists() else None


def install(cache: Path, say: Say) -> Path:
    """Installs the environment unless it is installed; returns its interpreter. Raises CannotInstall if this machine
    cannot run it, or a package cannot be installed."""
    python = installed_python(cache)
    if python is not None:
        return python
    reason = unsuitable(platform.system(), platform.machine(), cpu_flags())
    if reason is not None:
        raise CannotInstall(reason)
    folder = environment_folder(cache)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with exclusively(folder.with_suffix(".lock"), lambda: say(f"waiting for another process that installs {TITLE} …")):
        return installed_python(cache) or _install_anew(cache, folder, say)


def unsuitable(system: str, machine: str, flags: frozenset[str]) -> str | None:
    """Returns why a machine cannot run this build of llama.cpp; None if it can."""
    if system != "Linux" or machine != "x86_64":
        return f"{TITLE} is built for Linux on x86-64, and this is {system} on {machine}"
    if "avx2" not in flags:
        return f"{TITLE} needs a processor with AVX2, and this one has none"
    return None


def _install_anew(cache: Path, folder: Path, say: Say) -> Path:
    started = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    with removed_on_failure(folder):
        uv = UvProgram(say)
        uv.run(("venv", "--python", sys.executable, str(folder)), limit_s=QUERY_LIMIT_S)
        say(f"installing {TITLE} …")
        python = str(folder / "bin" / "python")
        uv.run(("pip", "install", "--python", python, *locked(LOCK)), limit_s=INSTALL_LIMIT_S)
        _check_module(python)
        unfinished = folder / f"{STAMP_NAME}.new"
        unfinished.write_text(_requirements_digest())
        os.replace(unfinished, folder / STAMP_NAME)
    say(f"installed {TITLE} in {time.monotonic() - started:.0f} s")
    return folder / "bin" / "python"


def locked(lock: Path) -> tuple[str, ...]:
    """Returns uv's arguments for the packages of a lock. Sources are not compiled."""
    return ("--no-deps", "--only-binary", ":all:", "--require-hashes", "-r", str(lock))


def _check_module(python: str) -> None:
    """Imports it, which fails if the C library is too old."""
    checked = subprocess.run(
        [python, "-c", f"import {MODULE}"], capture_output=True, text=True, timeout=QUERY_LIMIT_S, check=False
    )
    if checked.returncode != 0:
        raise CannotInstall(f"{MODULE} does not load: {last_line(checked.stderr)}")


def _requirements_digest() -> str:
    return hashlib.sha256(LOCK.read_bytes()).hexdigest()


def main(argv: Sequence[str]) -> int:
    return install_command("engine_agent.engines.llama_cpp.environment", __doc__, TITLE, install, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
