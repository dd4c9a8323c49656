"""Paths, arithmetic, results and Markdown that benches share."""

import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "bench"
CACHE = Path(os.environ.get("SWITCHYARD_CACHE") or ROOT / ".cache").resolve()
RESULTS = ROOT / ".cache" / "bench"


def note(bench: str, row: dict[str, Any]) -> None:
    """Print a result and append it to the file of this bench, which `report` reads."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    with (RESULTS / f"{bench}.jsonl").open("a", encoding="utf-8") as results:
        results.write(json.dumps(row) + "\n")
    print(row, flush=True)


def family(pid: int) -> list[psutil.Process]:
    """Returns the process and its children, or nothing if it has exited."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def cpu_s(processes: Iterable[psutil.Process]) -> float:
    """Returns the CPU seconds of these processes and of their exited children."""
    total = 0.0
    for each in processes:
        with suppress(psutil.Error):
            times = each.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table: text in the first column, numbers in the others."""
    lines = [head, ["---", *("---:" for _ in head[1:])], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
