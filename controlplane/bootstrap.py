"""Makes the checkout's virtual environment: `python3 controlplane/bootstrap.py [--dev]`.

Runs before anything is installed, so it uses the standard library only, and it starts under whatever `python3` is, so
everything above the version check must run on an old one. It writes inside the checkout only: `.venv`, with the command
`.venv/bin/switchyard` (with --dev also `lab`), and one log."""

import os
import shutil
import sys

OLDEST = (3, 11)


def _continue_with_a_newer_python() -> None:
    for minor in range(20, OLDEST[1] - 1, -1):
        newer = shutil.which("python3.%d" % minor)  # noqa: UP031
        if newer:
            os.execv(newer, [newer] + sys.argv)  # noqa: S606, RUF005 - the same command again, by a newer Python
    sys.exit("Switchyard needs Python 3.11 or newer and this is %d.%d: install one." % sys.version_info[:2])  # noqa: UP031


if sys.version_info < OLDEST:
    _continue_with_a_newer_python()

import argparse
import fcntl
import hashlib
import importlib.util
import shlex
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TextIO

CHECKOUT = Path(__file__).resolve().parent.parent
VENV = CHECKOUT / ".venv"
PYTHON = VENV / "bin" / "python"
COMMANDS = {"switchyard": "controlplane.cli.main"}
DEV_COMMANDS = {**COMMANDS, "lab": "lab.hosts.cli"}
"""Name -> the module whose `main` it is."""
LOG = Path(os.environ.get("SWITCHYARD_CACHE") or CHECKOUT / ".cache").expanduser().resolve() / "bootstrap.log"

_COMMAND_WITHIN_S = 1800
"""Half an hour: 60 packages by pip over a slow line."""


class CannotBootstrap(Exception):
    pass


def main(arguments: list[str]) -> int:
    """Make `.venv` hold what the lock names; nothing to do when it does already."""
    parser = argparse.ArgumentParser(description="Make the virtual environment of this checkout.")
    parser.add_argument("--dev", action="store_true", help="also what `make test` and `make check` need")
    dev = parser.parse_args(arguments).dev
    try:
        if not is_current(dev=dev):
            with _alone():
                if not is_current(dev=dev):
                    install(dev=dev)
        for name, module in (DEV_COMMANDS if dev else COMMANDS).items():
            put_command(name, module)
    except CannotBootstrap as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except OSError as error:
        sys.stderr.write(f"Cannot write the environment in {CHECKOUT} ({error}).\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def lock_file(*, dev: bool) -> Path:
    """The file that says what to install: every package, with its version and hashes (controlplane/lock.py)."""
    return CHECKOUT / f"requirements{'-dev' if dev else ''}.lock"


def stamp(*, dev: bool) -> Path:
    """The file that says which lock `.venv` was made from."""
    return VENV / f"requirements{'-dev' if dev else ''}.stamp"


def digest(*, dev: bool) -> str:
    """The text of the stamp of a current `.venv`: the lock's digest and the interpreter's version."""
    content = lock_file(dev=dev).read_bytes()
    return f"{hashlib.sha256(content).hexdigest()} python {sys.version_info.major}.{sys.version_info.minor}"


def is_current(*, dev: bool) -> bool:
    """Whether `.venv` was made from the lock as it is now, by a Python that is still there."""
    try:
        return PYTHON.exists() and stamp(dev=dev).read_text() == digest(dev=dev)
    except OSError:
        return False


def install(*, dev: bool) -> None:
    """Make the environment and install what the lock names into it. Raises CannotBootstrap if a step failed; the log
    has the whole story."""
    LOG.parent.mkdir(parents=True, exist_ok=True)
    with LOG.open("w") as log:
        if not _works():
            with _step("virtual environment .venv"):
                _make_environment(log)
        with _step("uv, the installer"):
            has_uv = _have_uv(log)
        lock = lock_file(dev=dev)
        with _step(f"packages of {lock.name}"):
            _install_locked(lock, log, has_uv=has_uv)
    for kind in {False, dev}:  # the development lock holds the versions of the other one
        stamp(dev=kind).write_text(digest(dev=kind))


def put_command(name: str, module: str) -> None:
    """Make `.venv/bin/NAME`, which works from any folder and through links."""
    path = VENV / "bin" / name
    wanted = command_text(module)
    if path.is_file() and path.read_text() == wanted and os.access(path, os.X_OK):
        return
    fresh = path.with_name(f"{name}.{os.getpid()}.new")
    fresh.write_text(wanted)
    fresh.chmod(0o755)
    fresh.replace(path)


def command_text(module: str) -> str:
    """A program for both sh and Python: the path of a first line may neither be long nor hold spaces."""
    return f"""#!/bin/sh
'''exec' {shlex.quote(str(PYTHON))} "$0" "$@"
' '''
import sys

sys.path[0] = {str(CHECKOUT)!r}

from {module} import main

sys.exit(main(sys.argv[1:]))
"""


def _works() -> bool:
    """Whether there is an environment of this version of Python that runs."""
    wanted = f"{sys.version_info.major}.{sys.version_info.minor}"
    try:
        answer = subprocess.run(
            [PYTHON, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return answer.stdout.strip() == wanted


def _make_environment(log: TextIO) -> None:
    command = [sys.executable, "-m", "venv", "--clear"]
    if _succeeds([*command, str(VENV)], log):
        return
    # Debian ships Python without ensurepip; a pip outside of the environment can install into it.
    if _succeeds([*command, "--without-pip", str(VENV)], log) and _succeeds([*_pip(), "--version"], log):
        return
    raise CannotBootstrap(
        f"{sys.executable} cannot make a virtual environment with pip (on Debian and Ubuntu: apt install "
        f"python3-venv); the whole story is in {LOG}."
    )


def _pip() -> list[str]:
    """How to run a pip that installs into `.venv`: its own, else the one of this Python."""
    own = [str(PYTHON), "-m", "pip"]
    if subprocess.run([*own, "--version"], capture_output=True, check=False).returncode == 0:
        return own
    return [sys.executable, "-m", "pip", "--python", str(PYTHON)]


def _have_uv(log: TextIO) -> bool:
    uv = [str(PYTHON), "-m", "uv", "--version"]
    if _succeeds(uv, log):
        return True
    only_uv = LOG.with_name("uv.lock")
    only_uv.write_text(_uv_pin())
    return _succeeds([*_pip(), "install", "--quiet", "--require-hashes", "-r", str(only_uv)], log) and _succeeds(
        uv, log
    )


def _uv_pin() -> str:
    """What the lock says of uv: its version and hashes."""
    text = lock_file(dev=False).read_text()
    lines = iter(text[text.find("\nuv==") + 1 :].splitlines())
    pin = [next(lines)]
    while pin[-1].endswith("\\"):
        pin.append(next(lines))
    return "\n".join(pin) + "\n"


def _install_locked(lock: Path, log: TextIO, *, has_uv: bool) -> None:
    """Install by uv, which takes seconds; where it cannot, by pip, which takes a minute or two and knows every setup.
    Raises CannotBootstrap if neither could."""
    if has_uv:
        uv = [str(PYTHON), "-m", "uv", "pip", "install", "--python", str(PYTHON)]
        if _succeeds([*uv, "--require-hashes", "-r", str(lock)], log, _uv_environment(log)):
            return
        print("bootstrap: uv could not, trying pip, which is slower ...", flush=True)
    if not _succeeds([*_pip(), "install", "--require-hashes", "-r", str(lock)], log):
        raise CannotBootstrap(f"Cannot install {lock.name}: {_last_error()}; the whole story is in {LOG}.")


def _uv_environment(log: TextIO) -> dict[str, str]:
    """This process's environment, with what pip's configuration means for uv."""
    uv_install = _load(CHECKOUT / "engine_agent" / "engines" / "uv_install.py")
    environment, warnings = uv_install.uv_environment_here()
    log.writelines(f"{warning}\n" for warning in warnings)
    return dict(environment)


def _load(path: Path) -> ModuleType:
    """A module by its file: importing its package would need what is not installed yet."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise CannotBootstrap(f"{path} is missing: this checkout is not whole.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _succeeds(command: list[str], log: TextIO, environment: dict[str, str] | None = None) -> bool:
    log.write(f"$ {' '.join(command)}\n")
    log.flush()
    try:
        status = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            timeout=_COMMAND_WITHIN_S,
            check=False,
        ).returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        log.write(f"{error}\n")
        return False
    return status == 0


def _last_error() -> str:
    lines = LOG.read_text(errors="replace").splitlines()
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["no output"])[-1].removeprefix("ERROR: ").rstrip(".")


@contextmanager
def _step(what: str) -> Iterator[None]:
    print(f"bootstrap: {what} ...", flush=True)
    began = time.monotonic()
    yield
    print(f"bootstrap: {what}: done in {time.monotonic() - began:.1f} s", flush=True)


@contextmanager
def _alone() -> Iterator[None]:
    """Wait for another bootstrap of this checkout to end."""
    LOG.parent.mkdir(parents=True, exist_ok=True)
    with LOG.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
