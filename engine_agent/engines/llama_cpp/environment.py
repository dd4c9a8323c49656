"""Installs llama.cpp: `python -m engine_agent.engines.llama_cpp.environment install --cache DIR`. Run by the control
plane's Python, with only the standard library and uv. On a machine that cannot run llama.cpp it exits
with one sentence."""

import sys
from collections.abc import Sequence
from pathlib import Path

from engine_agent.engines.uv_install import EngineEnvironment, Say, UvProgram, check_import, install_command

INSTALL_LIMIT_S = 900.0
"""Downloads of 34 MB, or 98 MB of weights, at 0.1 MB/s."""
LOCK = Path(__file__).with_name("requirements.lock")


def locked(lock: Path) -> tuple[str, ...]:
    """Returns uv's arguments for the packages of a lock. Sources are not compiled."""
    return ("--no-deps", "--only-binary", ":all:", "--require-hashes", "-r", str(lock))


def _fill(uv: UvProgram, folder: Path, say: Say) -> None:
    say(f"installing {ENVIRONMENT.title} …")
    python = folder / "bin" / "python"
    uv.run(("pip", "install", "--python", str(python), *locked(LOCK)), limit_s=INSTALL_LIMIT_S)
    check_import(python, "xllamacpp")


ENVIRONMENT = EngineEnvironment("llama-cpp", "llama.cpp for CPU", (LOCK,), _fill)
install, installed_python = ENVIRONMENT.install, ENVIRONMENT.installed_python


def main(argv: Sequence[str]) -> int:
    return install_command("engine_agent.engines.llama_cpp.environment", __doc__, ENVIRONMENT.title, install, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
