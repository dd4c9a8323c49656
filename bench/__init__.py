"""Paths, arithmetic and Markdown that benches share."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "bench"
CACHE = Path(os.environ.get("SWITCHYARD_CACHE") or ROOT / ".cache").resolve()


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the value below which this share of `values` is."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table: text in the first column, numbers in the others."""
    lines = [head, ["---", *("---:" for _ in head[1:])], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
