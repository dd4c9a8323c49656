"""Installs Triton: `python -m engine_agent.engines.triton.environment install --cache DIR`. Run by the control plane's
Python, with only the standard library and uv. On a machine that cannot run Triton it exits with one sentence."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from engine_agent.engines.llama_cpp.environment import locked
from engine_agent.engines.uv_install import (
    QUERY_LIMIT_S,
    CannotInstall,
    EngineEnvironment,
    Say,
    UvProgram,
    check_import,
    install_command,
    last_line,
)

INSTALL_LIMIT_S = 1800.0
"""Downloads of 110 MB at 0.1 MB/s."""
LOCK = Path(__file__).with_name("requirements.lock")
SERVER = Path("pytriton/tritonserver")
"""Triton among the packages of a Python."""
PROGRAM = SERVER / "bin" / "tritonserver"
BACKENDS = SERVER / "backends"
STUB = "triton_python_backend_stub"
"""Runs a model in one version of Python; the backend looks for it in its own folder."""


def _fill(uv: UvProgram, folder: Path, say: Say) -> None:
    say(f"installing {ENVIRONMENT.title} …")
    python = folder / "bin" / "python"
    uv.run(("pip", "install", "--python", str(python), *locked(LOCK)), limit_s=INSTALL_LIMIT_S)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / f"python{version}" / "site-packages"
    stub = packages / SERVER / "python_backend_stubs" / version / STUB
    if not stub.exists():
        known = ", ".join(sorted(each.parent.name for each in stub.parents[1].glob(f"*/{STUB}")))
        raise CannotInstall(f"Triton's Python backend runs Python {known}, and this is Python {version}")
    shutil.copy2(stub, packages / BACKENDS / "python" / STUB)
    check_import(python, "numpy, xllamacpp, uvicorn, msgspec")
    _check_server(packages / PROGRAM)


def _check_server(program: Path) -> None:
    """Raises CannotInstall if a system library is missing or too old for the server. `--help` exits with 1."""
    try:
        shown = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=QUERY_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotInstall(f"{program} cannot be run: {error}") from None
    if "--model-repository" not in shown.stdout + shown.stderr:
        raise CannotInstall(f"{program} does not start: {last_line(shown.stderr)}")


ENVIRONMENT = EngineEnvironment("triton", "Triton Inference Server", (LOCK,), _fill)
install, installed_python = ENVIRONMENT.install, ENVIRONMENT.installed_python


def main(argv: Sequence[str]) -> int:
    return install_command("engine_agent.engines.triton.environment", __doc__, ENVIRONMENT.title, install, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
