"""Finds third-party programs for engine `generic`, and installs one: `python -m
engine_agent.engines.generic.environment install --cache DIR` compiles `llama-cpp`.

`<cache>/engines/generic/NAME/serve` is an executable that serves OpenAI's API on loopback. It is started as `serve
--model PATH --alias NAME --host 127.0.0.1 --port N --context-length N`, followed by the version's options. It must
answer `GET /v1/models` with 200 once it can serve, `POST /v1/completions` and `POST /v1/chat/completions` with `usage`,
and exit on SIGTERM. PyPI has only sources of llama-cpp-python, so the installation compiles them, which takes minutes.
"""

import os
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from engine_agent.engines.artifacts import exclusively
from engine_agent.engines.uv_install import CannotInstall, Say, UvProgram, install_command, removed_on_failure

NAME = "llama-cpp"
INSTALL_LIMIT_S = 7200.0
"""Two hours: llama.cpp on two busy cores."""
QUERY_LIMIT_S = 120.0
LOCK = Path(__file__).with_name("requirements.lock")
SERVER = Path(__file__).with_name("llama_cpp_server.py")
SCRIPT = '#!/bin/sh\nhere=$(dirname "$0")\nexec "$here/bin/python" -I "$here/serve.py" "$@"\n'
NEEDED = ("cmake", "c++")


def install(cache: Path, say: Say) -> Path:
    """Installs the program unless it exists, and returns it. `serve` is written last and marks it as installed. Raises
    CannotInstall if there is no compiler, or a package cannot be downloaded or built."""
    folder = cache / FOLDER / NAME
    folder.parent.mkdir(parents=True, exist_ok=True)
    with exclusively(folder.with_suffix(".lock"), lambda: say(f"waiting for another process that installs {NAME} …")):
        found = installed_programs(cache).get(PREFIX + NAME)
        if found is None:
            return _install_anew(folder, say)
        _refresh(folder)
        return found


def _refresh(folder: Path) -> None:
    """Updates the script that starts the server, which may be newer than the compiled program."""
    ours, there = SERVER.read_bytes(), folder / "serve.py"
    if there.exists() and there.read_bytes() == ours:
        return
    fresh = folder / "serve.py.new"
    fresh.write_bytes(ours)
    fresh.replace(there)


def _install_anew(folder: Path, say: Say) -> Path:
    if missing := [name for name in NEEDED if shutil.which(name) is None]:
        raise CannotInstall(f"llama-cpp-python needs a compiler, and this machine has no {' and no '.join(missing)}")
    began_s = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    with removed_on_failure(folder):
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
    say(f"installed {NAME} in {time.monotonic() - began_s:.0f} s")
    return program


def main(argv: Sequence[str]) -> int:
    return install_command("engine_agent.engines.generic.environment", __doc__, NAME, install, argv)


FOLDER = "engines/generic"
PROGRAM = "serve"
HEALTH_PATH = "/v1/models"
PREFIX = "generic/"
"""Of a program's name among the engines of a machine."""
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")


def installed_programs(cache: Path) -> Mapping[str, Path]:
    """Returns `generic/NAME` -> its executable. Other files and folders are ignored."""
    found = {}
    for program in sorted((cache / FOLDER).glob(f"*/{PROGRAM}")):
        if _NAME.fullmatch(program.parent.name) and program.is_file() and os.access(program, os.X_OK):
            found[PREFIX + program.parent.name] = program
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
