"""What `prove` finds on a machine, and the choice of an engine from it. `look` runs programs; the rest is pure."""

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from engine_agent.node.confine import closed_above
from engine_agent.protocol.engine_builds import BuildFacts, HostFacts, why_unsuitable

QUERY_LIMIT_S = 60.0
VLLM_TORCH, VLLM_CUDA = "2.11.0", "13"
"""The versions that the carried vLLM was compiled for."""
ENGINE_UID = 60_900
SMI = "nvidia-smi"
SMI_FIELDS = "name,driver_version,memory.total,uuid,power.limit,power.min_limit,compute_cap"
ASK = """
import json, sysconfig, importlib.metadata as m
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return ""
found = {n: version(n) for n in ("torch", "transformers", "triton", "vllm", "numpy")}
try:
    import torch
    found["torch"], found["cuda"] = torch.__version__, torch.version.cuda or ""
    found["sees"] = torch.cuda.is_available()
except ImportError:
    pass
print(json.dumps({**found, "packages": sysconfig.get_path("purelib")}))
"""


@dataclass(frozen=True, slots=True)
class Machine:
    """`python`: the machine's own, with torch if any; `packages`: its folder of packages. `cards`: one dictionary for
    each NVIDIA device, by the names in `SMI_FIELDS`."""

    host: HostFacts
    cores: int
    system: str
    python: str
    python_version: str
    versions: Mapping[str, str]
    packages: str
    sees_cuda: bool
    cards: Sequence[Mapping[str, str]]
    why_no_card: str
    closed: str
    """A folder above that Python that an engine's own account may not pass; empty: none."""

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "host": {**asdict(self.host), "cpu_flags": len(self.host.cpu_flags)}}


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to serve. `why_not`: empty if this machine can. `build`: a carried build; None: the program of engine
    `generic` over the machine's torch. `args`: of its plan, besides its limits."""

    name: str
    engine: str
    why_not: str = ""
    build: Path | None = None
    facts: BuildFacts | None = None
    weights: str = "safetensors"
    args: tuple[str, ...] = ()


def look(host: HostFacts, python: str | None = None) -> Machine:
    """`python`: the interpreter with torch; default: `python3` of the path."""
    program = python or shutil.which("python3") or "python3"
    found = json.loads(output_of((program, "-c", ASK)) or "{}")
    cards, why_no_card = _cards()
    return Machine(
        host=host,
        cores=len(os.sched_getaffinity(0)),
        system=platform.platform(),
        python=program,
        python_version=output_of((program, "-c", "import platform; print(platform.python_version())")),
        versions={name: str(found.get(name) or "") for name in ("torch", "cuda", "transformers", "triton", "numpy")},
        packages=str(found.get("packages", "")),
        sees_cuda=bool(found.get("sees")),
        cards=cards,
        why_no_card=why_no_card,
        closed=closed_above(os.path.realpath(program), ENGINE_UID, ENGINE_UID) if os.geteuid() == 0 else "",
    )


def _cards() -> tuple[list[dict[str, str]], str]:
    if shutil.which(SMI) is None:
        return [], f"this machine has no {SMI}"
    text = output_of((SMI, f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader,nounits"))
    return parse_cards(text), "" if parse_cards(text) else f"{SMI} lists no device"


def parse_cards(text: str) -> list[dict[str, str]]:
    names = SMI_FIELDS.split(",")
    rows = [[field.strip() for field in line.split(",")] for line in text.splitlines()]
    return [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names)]


def output_of(argv: Sequence[str]) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=QUERY_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


class CardSamples:
    """Power, clock and use of the first card, twice a second while its block runs. Without a card it has none."""

    FIELDS = "power.draw,clocks.sm,utilization.gpu"

    def __init__(self, cards: Sequence[Mapping[str, str]]) -> None:
        self._cards = cards
        self._process: subprocess.Popen[str] | None = None
        self._lines: list[str] = []

    def __enter__(self) -> Self:
        if self._cards:
            argv = (SMI, "-i", self._cards[0]["uuid"], f"--query-gpu={self.FIELDS}", "-lms", "500")
            self._process = subprocess.Popen(
                (*argv, "--format=csv,noheader,nounits"), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._lines = self._process.communicate()[0].splitlines()

    def found(self) -> dict[str, Any]:
        return averages(self._lines)


def averages(lines: Sequence[str]) -> dict[str, Any]:
    """The means of samples; empty without any. Fields that a driver does not support are left out."""
    names = ("sampled_watts", "sm_mhz", "use_percent")
    columns = zip(*(line.split(",") for line in lines if line.count(",") == len(names) - 1), strict=True)
    found = {}
    for name, column in zip(names, columns, strict=False):
        numbers = [float(text) for text in column if text.strip().replace(".", "", 1).isdigit()]
        if numbers:
            found[name] = round(sum(numbers) / len(numbers), 1)
    return found


def choices(found: Machine, builds: Sequence[tuple[Path, BuildFacts]], device: str) -> list[Choice]:
    """Every way to serve, the best first, with the reason against those that this machine cannot take."""
    ways = [_of_build(found, folder, facts, device) for folder, facts in builds]
    of_vllm = [way for way in ways if way.engine == "vllm"]
    eager = [replace(way, name=f"{way.name}, eager", args=("--enforce-eager",)) for way in of_vllm]
    return [*of_vllm, *eager, *(way for way in ways if way.engine != "vllm"), _torch(found, device)]


def _of_build(found: Machine, folder: Path, facts: BuildFacts, device: str) -> Choice:
    name = f"{facts.serves} {facts.version} ({facts.platform})"
    needs_cuda = facts.platform.startswith("cuda")
    why = why_unsuitable(facts, found.host)
    if not why and needs_cuda:
        why = _why_no_cuda(found, device)
        if not why and facts.engine == "vllm":
            why = _why_no_vllm(found, facts)
    elif not why and device == "cuda":
        why = f"it is for {facts.platform}"
    weights = "gguf" if facts.engine == "llama-cpp" else "safetensors"
    return Choice(name, facts.engine, why, folder, facts, weights)


def _why_no_cuda(found: Machine, device: str) -> str:
    if device != "cuda":
        return f"it needs CUDA, and the device is {device}"
    return "" if found.cards else found.why_no_card


def _why_no_vllm(found: Machine, facts: BuildFacts) -> str:
    torch, cuda = found.versions.get("torch", ""), found.versions.get("cuda", "")
    if torch.partition("+")[0] != VLLM_TORCH or cuda.partition(".")[0] != VLLM_CUDA:
        there = f"{torch} for CUDA {cuda or 'none'}" if torch else "none"
        return f"it needs torch {VLLM_TORCH} for CUDA {VLLM_CUDA}, and {found.python} has {there}"
    if found.python_version.split(".")[:2] != facts.python.split(".")[:2]:
        return f"it needs Python {facts.python}, and {found.python} is {found.python_version}"
    return "" if found.sees_cuda else f"torch of {found.python} sees no device"


def _torch(found: Machine, device: str) -> Choice:
    missing = [name for name in ("torch", "transformers") if not found.versions.get(name)]
    why = f"{found.python} has no {' and no '.join(missing)}" if missing else ""
    if not why and device == "cuda" and not found.sees_cuda:
        why = f"torch of {found.python} sees no device"
    name = f"transformers {found.versions.get('transformers') or '?'} on torch (engine generic)"
    return Choice(name, "generic", why)
