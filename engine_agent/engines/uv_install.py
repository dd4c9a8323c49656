"""Installs engine environments with uv: its command lines, its errors in one sentence, and pip's configuration as uv's.
uv ignores pip's configuration, but machines behind a mirror or with a folder of wheels have configured pip. Imports
only the standard library, because it runs before requirements are installed (`controlplane/bootstrap.py`)."""

import argparse
import ast
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from urllib.parse import unquote, urlsplit

Say = Callable[[str], None]
STAMP_NAME = "installed"
QUERY_LIMIT_S = 120.0


class CannotInstall(Exception):
    """Why the installation failed, in one sentence."""


def say_on_stdout(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def install_command(
    module: str, description: str | None, title: str, install: Callable[[Path, Say], Path], argv: Sequence[str]
) -> int:
    """Runs an installer's command line. Returns 0 with the result on the last line of standard output, or 1 with the
    reason.

    Args:
        module: for the usage line.
        description: of what is installed.
        title: of what is installed, in a word.
        install: the installer; it gets the cache.
        argv: the words of the command line."""
    parser = argparse.ArgumentParser(prog=module, description=description)
    install_parser = parser.add_subparsers(required=True).add_parser("install", help=f"install {title}")
    install_parser.add_argument("--cache", type=Path, required=True, help="folder that holds engines/")
    options = parser.parse_args(argv)
    try:
        with stopping_on_signals():
            say_on_stdout(str(install(options.cache.resolve(), say_on_stdout)))
    except (CannotInstall, OSError) as error:
        sys.stderr.write(f"cannot install {title}: {error}\n")
        return 1
    return 0


def cpu_flags() -> frozenset[str]:
    """Returns the features of this machine's processor, in the kernel's words; empty if it does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "it gave no reason"


@dataclass(frozen=True)
class EngineEnvironment:
    """A virtual environment at `<cache>/engines/NAME`. It counts as installed once its stamp, the digest of
    `requirements`, is written, last of all; one without the right stamp is removed and installed again. `fill` installs
    the packages into the new environment and checks them."""

    name: str
    title: str
    requirements: tuple[Path, ...]
    fill: Callable[["UvProgram", Path, Say], None]

    def folder(self, cache: Path) -> Path:
        return cache / "engines" / self.name

    def installed_python(self, cache: Path) -> Path | None:
        """Returns the interpreter, or None if nothing is installed for the current requirements."""
        folder = self.folder(cache)
        try:
            stamp = (folder / STAMP_NAME).read_text()
        except OSError:
            return None
        python = folder / "bin" / "python"
        return python if stamp == self.digest() and python.exists() else None

    def install(self, cache: Path, say: Say) -> Path:
        """Installs the environment unless it is installed; returns its interpreter. Raises CannotInstall if this
        machine cannot run it, or a package cannot be installed."""
        from engine_agent.engines.artifacts import exclusively  # the bootstrap loads this file outside its package

        python = self.installed_python(cache)
        if python is not None:
            return python
        reason = self.unsuitable(platform.system(), platform.machine(), cpu_flags())
        if reason is not None:
            raise CannotInstall(reason)
        folder = self.folder(cache)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with exclusively(
            folder.with_suffix(".lock"), lambda: say(f"waiting for another process that installs {self.title} …")
        ):
            return self.installed_python(cache) or self._install_anew(cache, say)

    def unsuitable(self, system: str, machine: str, flags: frozenset[str]) -> str | None:
        """Returns why a machine cannot run these packages; None if it can."""
        if system != "Linux" or machine != "x86_64":
            return f"{self.title} is built for Linux on x86-64, and this is {system} on {machine}"
        if "avx2" not in flags:
            return f"{self.title} needs a processor with AVX2, and this one has none"
        return None

    def mark_installed(self, folder: Path) -> None:
        unfinished = folder / f"{STAMP_NAME}.new"
        unfinished.write_text(self.digest())
        os.replace(unfinished, folder / STAMP_NAME)

    def digest(self) -> str:
        return hashlib.sha256(b"".join(each.read_bytes() for each in self.requirements)).hexdigest()

    def _install_anew(self, cache: Path, say: Say) -> Path:
        started, folder = time.monotonic(), self.folder(cache)
        if folder.exists():
            say(f"removing an older or unfinished {folder}")
            shutil.rmtree(folder)
        with removed_on_failure(folder):
            uv = UvProgram(say)
            uv.run(("venv", "--python", sys.executable, str(folder)), limit_s=QUERY_LIMIT_S)
            self.fill(uv, folder, say)
            self.mark_installed(folder)
        say(f"installed {self.title} in {time.monotonic() - started:.0f} s")
        python = self.installed_python(cache)
        if python is None:
            raise CannotInstall(f"{folder} disappeared during the installation")
        return python


def check_import(python: Path, module: str) -> None:
    """Imports a module in an environment, which fails if a shared library is missing or too old. Raises
    CannotInstall."""
    command = [str(python), "-c", f"import {module}"]
    try:
        checked = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise CannotInstall(f"{module} did not load within {QUERY_LIMIT_S:.0f} s in {python.parents[1]}") from None
    if checked.returncode != 0:
        raise CannotInstall(f"{module} does not load in {python.parents[1]}: {last_line(checked.stderr)}")


KEPT_LINES = 40
"""Of uv's output, to find the reason of a failure in; its longest explanations have about 20 lines."""

_DRAWING = "\u00d7\u2570\u2500\u25b6\u251c\u2502 "
"""The characters of uv's error trees."""


class UvFailed(CannotInstall):
    """uv is missing or failed; the text is the reason in one line."""


@contextmanager
def stopping_on_signals() -> Iterator[None]:
    """Exits on the signals that stop a program, so that unfinished folders are removed. Another signal does not
    interrupt that."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def stop(number: int, _: object) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def removed_on_failure(folder: Path) -> Iterator[None]:
    """Removes an installation that does not succeed. A stopped process leaves that to another one: the removal of tens
    of thousands of files takes minutes on a busy disk."""
    for left in folder.parent.glob(f".{folder.name}.*.removed"):
        _remove_later(left)
    try:
        yield
    except Exception:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    except BaseException:
        doomed = folder.with_name(f".{folder.name}.{os.getpid()}.removed")
        with suppress(OSError):
            folder.rename(doomed)
            _remove_later(doomed)
        raise


def _remove_later(folder: Path) -> None:
    command = ("sh", "-c", 'rm -rf -- "$0" > /dev/null 2>&1 < /dev/null &', str(folder))
    subprocess.run(command, start_new_session=True, check=False)


class UvProgram:
    def __init__(self, say: Callable[[str], None]) -> None:
        """Finds uv and reads pip's configuration; `say` is called with ignored settings and with downloads. Raises
        UvFailed if this Python has no uv."""
        self._say = say
        self._program = _find_uv()
        self._environment, warnings = uv_environment_here()
        for warning in warnings:
            say(f"warning: {warning}")

    def run(self, arguments: Sequence[str], limit_s: float) -> None:
        """Runs `uv <arguments>` to its end. Raises UvFailed if it failed, or took longer than `limit_s`."""
        kept: deque[str] = deque(maxlen=KEPT_LINES)
        with subprocess.Popen(
            [self._program, *arguments],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            limit = Timer(limit_s, _kill_uv, [process])
            limit.start()
            try:
                for line in process.stderr or ():
                    kept.append(line.strip())
                    if line.startswith("Downloading "):
                        self._say(f"  {line.strip()}")
            except BaseException:
                _kill_uv(process)
                raise
            finally:
                limit.cancel()
        if process.returncode < 0:
            raise UvFailed(f"uv was killed by signal {-process.returncode}; its limit is {limit_s:.0f} s")
        if process.returncode != 0:
            raise UvFailed(failure_reason(kept))


def failure_reason(lines: Sequence[str]) -> str:
    """Returns uv's error in one line, without the drawing around it and the hints after it."""
    starts = [i for i, line in enumerate(lines) if line.startswith(("error", _DRAWING[0]))]
    output = (line.strip(_DRAWING) for line in list(lines)[starts[0] if starts else 0 :])
    reason = " ".join(line for line in output if line)
    return reason.partition(" hint:")[0].removeprefix("error: ") or "uv gave no reason"


def _kill_uv(process: "subprocess.Popen[str]") -> None:
    """Kills uv and its children: a surviving child would keep our pipe open."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _find_uv() -> str:
    try:
        import uv
    except ModuleNotFoundError:
        raise UvFailed(f"{sys.executable} has no uv: install requirements.txt into it") from None
    return uv.find_uv_bin()


ASK_PIP_TIMEOUT_S = 30.0
"""`pip config list` takes 0.3 s; more than this is a hung file system."""

_UV_VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "timeout": "UV_HTTP_TIMEOUT",
    "trusted-host": "UV_INSECURE_HOST",
    "proxy": "ALL_PROXY",
}
_SEPARATORS = {"UV_INDEX": " ", "UV_FIND_LINKS": ",", "UV_INSECURE_HOST": " "}
_SECTIONS = ("global", "install", ":env:")
"""Those that `pip install` reads, in ascending priority."""


def pip_settings(listing: str) -> dict[str, str]:
    """Returns the settings that `pip install` would use, from the output of `pip config list`. A line is
    `section.option='value'`, with the value as a Python literal; other lines are ignored."""
    sections: dict[str, dict[str, str]] = {section: {} for section in _SECTIONS}
    for line in listing.splitlines():
        name, equals, value = line.partition("=")
        section, dot, option = name.rpartition(".")
        if equals and dot and section in sections:
            sections[section][option] = str(ast.literal_eval(value))
    return {option: value for section in _SECTIONS for option, value in sections[section].items()}


def uv_environment(settings: Mapping[str, str], exists: Callable[[Path], bool]) -> tuple[dict[str, str], list[str]]:
    """Returns uv's variables for pip's `settings`, and a warning for each missing location, which pip ignores as well.

    Args:
        settings: pip's options by name, such as `index-url`.
        exists: whether a local path exists."""
    variables: dict[str, str] = {}
    warnings: list[str] = []
    for option, variable in _UV_VARIABLES.items():
        if option not in settings:
            continue
        values = settings[option].split()
        if option in ("index-url", "extra-index-url", "find-links"):
            missing = [value for value in values if not _place_exists(value, exists)]
            warnings += [f"pip's {option} {value} does not exist and is ignored" for value in missing]
            values = [value for value in values if value not in missing]
        if values:
            variables[variable] = _SEPARATORS.get(variable, "").join(values)
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        # uv has no variable for it. Offline it queries no index either, and still reads local find-links.
        variables["UV_OFFLINE"] = "1"
    if "UV_INDEX" in variables:
        # pip chooses the best version of all indexes; uv would stop at the first index that has the package.
        variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return variables, warnings


def _place_exists(place: str, exists: Callable[[Path], bool]) -> bool:
    parts = urlsplit(place)
    if parts.scheme == "file":
        return exists(Path(unquote(parts.path)))
    return bool(parts.scheme) or exists(Path(place).expanduser())


def read_pip_settings() -> dict[str, str]:
    """Returns pip's settings on this machine; only those in `PIP_*` variables if there is no pip."""
    environment = "".join(
        f":env:.{name[4:].lower().replace('_', '-')}={value!r}\n"
        for name, value in os.environ.items()
        if name.startswith("PIP_")
    )
    # A virtual environment may have no pip; the Python that created it has the same configuration.
    for python in dict.fromkeys((sys.executable, sys._base_executable)):  # type: ignore[attr-defined]
        try:
            listing = subprocess.run(
                [python, "-m", "pip", "config", "list"],
                capture_output=True,
                text=True,
                timeout=ASK_PIP_TIMEOUT_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            continue
        return pip_settings(listing.stdout + environment)
    return pip_settings(environment)


def uv_environment_here() -> tuple[dict[str, str], list[str]]:
    """Returns `uv_environment` of this machine, overridden by the user's variables for uv."""
    variables, warnings = uv_environment(read_pip_settings(), Path.exists)
    return {**variables, **os.environ}, warnings
