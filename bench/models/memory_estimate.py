"""Memory estimates of versions against vLLM's own figures on a CPU, by kind of attention.

    python -m bench memory_estimate [KIND ...] [--write]

Writes a random checkpoint of each kind (0.2 to 0.4 GB, deleted again), loads it in vLLM on this machine, and compares:
bytes of weights, tokens and requests that fit with an explicit KV cache of 1 GiB, and tokens that fit in what vLLM
finds itself with `gpu_memory_utilization` 0.15 (weights, process and KV cache). Needs that share of memory free."""

import argparse
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench import CACHE, PAGES, table
from engine_agent.engines.vllm import environment
from lab.checkpoints import CONFIGS, write_checkpoint
from lab.vllm_probe import ask_vllm
from models_registry.instance_types.planner import InstanceShape
from models_registry.versions.planning.checkpoint import Checkpoint, read_checkpoint
from models_registry.versions.planning.machines import Degrees
from models_registry.versions.planning.memory import GIB, MemoryEstimate, estimate_memory
from models_registry.versions.planning.spec import VersionSpec

CONTEXT = 4096
SHARE = 0.15
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "explicit": {"kv_cache_memory_bytes": GIB},
    "found": {"gpu_memory_utilization": SHARE},
}
COMMON = {"max_model_len": CONTEXT, "max_num_seqs": 16, "max_num_batched_tokens": 2048}
PAGE = PAGES / "memory_estimate.md"
MARK = "<!-- figures -->\n"


@dataclass(frozen=True)
class Compared:
    """One kind: the estimate and vLLM's figures, with an explicit cache and with one that vLLM sizes."""

    kind: str
    estimated: Mapping[str, MemoryEstimate]
    vllm: Mapping[str, Mapping[str, Any]]

    def ratios(self) -> dict[str, float]:
        """Estimate by vLLM's figure."""
        explicit, found = self.vllm["explicit"], self.vllm["found"]
        return {
            "weights": self.estimated["explicit"].weights_bytes / explicit["weights_bytes"],
            "tokens, 1 GiB": self.estimated["explicit"].tokens / explicit["tokens"],
            "tokens, found": self.estimated["found"].tokens / found["tokens"],
        }

    @property
    def process_bytes(self) -> int:
        """What the worker used beside its weights."""
        return int(self.vllm["found"]["consumed_bytes"] - self.vllm["found"]["weights_bytes"])


def compare(kinds: list[str], python: Path) -> list[Compared]:
    """Loads each kind twice, one after the other, in forks of one process. Raises RuntimeError if vLLM cannot."""
    with tempfile.TemporaryDirectory() as home:
        folders = {kind: write_checkpoint(Path(home) / kind, CONFIGS[kind]) for kind in kinds}
        questions = [
            {"load": {"model": str(folder), **COMMON, **stated}}
            for folder in folders.values()
            for stated in SETTINGS.values()
        ]
        answers = iter(ask_vllm(python, questions, Path(home)))
        return [_compared(kind, folder, [next(answers) for _ in SETTINGS]) for kind, folder in folders.items()]


def _compared(kind: str, folder: Path, answers: list[dict[str, Any]]) -> Compared:
    if errors := [each["error"] for each in answers if "error" in each]:
        raise RuntimeError(f"{kind}: {errors[0]}")
    checkpoint = _read(folder)
    machine = InstanceShape("this.host", "cpu", cores=1, memory_gib=psutil.virtual_memory().total / GIB)
    estimated = {
        name: estimate_memory(_version(machine, stated), checkpoint, Degrees(), machine)
        for name, stated in SETTINGS.items()
    }
    return Compared(kind, estimated, dict(zip(SETTINGS, answers, strict=True)))


def _read(folder: Path) -> Checkpoint:
    with (folder / "model.safetensors").open("rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
    return read_checkpoint((folder / "config.json").read_bytes(), [header])


def _version(machine: InstanceShape, stated: Mapping[str, Any]) -> VersionSpec:
    return VersionSpec(
        model="random",
        version="1",
        engine="vllm",
        artifact_uri="file:///random",
        artifact_digest="",
        context_length=CONTEXT,
        max_concurrency=16,
        ready_timeout_s=600.0,
        parallelism={machine.name: {}},
        engine_options={**stated, "max_num_batched_tokens": COMMON["max_num_batched_tokens"]},
    )


def report(found: list[Compared]) -> str:
    head = (
        "kind", "weights, MiB", "estimate", "tokens in 1 GiB", "estimate", "requests", "estimate", "tokens found",
        "estimate", "process, MiB",
    )  # fmt: skip
    return table(head, (_row(each) for each in found))


def _row(each: Compared) -> list[str]:
    ratios, own, ours = each.ratios(), each.vllm, each.estimated
    return [
        each.kind,
        f"{own['explicit']['weights_bytes'] / 2**20:.1f}",
        f"{ratios['weights']:.3f}",
        f"{own['explicit']['tokens']:,}",
        f"{ratios['tokens, 1 GiB']:.3f}",
        f"{own['explicit']['requests']:.2f}",
        f"{ours['explicit'].requests:.2f}",
        f"{own['found']['tokens']:,}",
        f"{ratios['tokens, found']:.3f}",
        f"{each.process_bytes / 2**20:.0f}",
    ]


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"one of {', '.join(CONFIGS)}; default: all")
    parser.add_argument("--write", action="store_true", help=f"write the figures into {PAGE.name}")
    options = parser.parse_args()
    if unknown := [kind for kind in options.kinds if kind not in CONFIGS]:
        parser.error(f"unknown kind {unknown[0]!r}; choose from {', '.join(CONFIGS)}")
    figures = report(compare(options.kinds or list(CONFIGS), environment.install(CACHE, print)))
    print(figures)
    if options.write:
        text = PAGE.read_text()
        start, end = text.index(MARK) + len(MARK), text.rindex(MARK)
        PAGE.write_text(f"{text[:start]}\n{figures}\n\n{text[end:]}")
