"""Installs the program `llama-cpp` of engine generic: `python -m engine_agent.engines.generic.environment install
--cache DIR`.

Run by the control plane's Python, with the standard library and uv alone. The program counts as installed once `serve`
is there, which is written last. PyPI has sources of llama-cpp-python alone: this compiles them, for some minutes.
"""

import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from engine_agent.engines.exclusive import exclusively
from engine_agent.engines.generic.programs import FOLDER, PREFIX, PROGRAM, installed_programs
from engine_agent.engines.install_command import CannotInstall, Say, install_command
from engine_agent.engines.uv_program import UvFailed, UvProgram

NAME = "llama-cpp"
INSTALL_LIMIT_S = 7200.0
"""Two hours: llama.cpp on two busy cores."""
QUERY_LIMIT_S = 120.0
LOCK = Path(__file__).with_name("requirements.lock")
SERVER = Path(__file__).with_name("llama_cpp_server.py")
SCRIPT = '#!/bin/sh\nhere=$(dirname "$0")\nexec "$here/bin/python" -I "$here/serve.py" "$@"\n'
NEEDED = ("cmake", "c++")


def install(cache: Path, say: Say) -> Path:
    """Make the program unless it is there; returns it.

    Raises:
        CannotInstall: there is no compiler, or a package cannot be had or built.
    """
    folder = cache / FOLDER / NAME
    folder.parent.mkdir(parents=True, exist_ok=True)
    with exclusively(folder.with_suffix(".lock"), lambda: say(f"waiting for another process that installs {NAME} …")):
        found = installed_programs(cache).get(PREFIX + NAME)
        if found is None:
            return _install_anew(folder, say)
        _refresh(folder)
        return found


def _refresh(folder: Path) -> None:
    """How the server is started may have changed since it was compiled."""
    ours, there = SERVER.read_bytes(), folder / "serve.py"
    if there.exists() and there.read_bytes() == ours:
        return
    fresh = folder / "serve.py.new"
    fresh.write_bytes(ours)
    fresh.replace(there)


def _install_anew(folder: Path, say: Say) -> Path:
    if missing := [name for name in NEEDED if shutil.which(name) is None]:
        raise CannotInstall(f"llama-cpp-python is compiled here, and there is no {' and no '.join(missing)}")
    began_s = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    try:
        uv = UvProgram(say)
        uv.run(("venv", "--python", sys.executable, str(folder)), limit_s=QUERY_LIMIT_S)
        say("compiling llama-cpp-python; this takes minutes …")
        python = str(folder / "bin" / "python")
        packages = ("--no-deps", "--require-hashes", "-r", str(LOCK))
        uv.run(("pip", "install", "--python", python, *packages), limit_s=INSTALL_LIMIT_S)
        shutil.copyfile(SERVER, folder / "serve.py")
        program = folder / PROGRAM
        program.write_text(SCRIPT)
        program.chmod(0o755)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, UvFailed):
            raise CannotInstall(str(error)) from error
        raise
    say(f"installed {NAME} in {time.monotonic() - began_s:.0f} s")
    return program


def main(argv: Sequence[str]) -> int:
    """Exit status of the command line."""
    return install_command("engine_agent.engines.generic.environment", __doc__, NAME, install, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
