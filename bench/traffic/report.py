"""Writes the results of the traffic benches into docs/bench/traffic.md.

Results of several runs lie in one file each under .cache/bench and count together. What stands between the markers of
the Markdown page is replaced; the words around them are people's. It measures nothing.

    .venv/bin/python -m bench report
"""

import argparse
import json
import os
import platform
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench import PAGES, RESULTS, table
from bench.traffic.contenders import PEERS

Row = dict[str, Any]
PAGE = PAGES / "traffic.md"
NONE = "-"


def read(folder: Path, name: str) -> list[Row]:
    path = folder / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def spread(values: Sequence[float], form: str = ",.0f") -> str:
    """The median, and the least and the greatest in brackets."""
    if not values:
        return NONE
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def of(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


# --- what the proxies cost ---


def requests_per_s(rows: Iterable[Row], contender: str) -> list[float]:
    return [row["requests"] / row["seconds"] for row in of(rows, contender=contender, kind="closed")]


def first_ms(rows: Iterable[Row], contender: str, share: str) -> list[float]:
    return [row["first_us"][share] / 1000 for row in of(rows, contender=contender, kind="rate") if row["first_us"]]


def proxies(rows: list[Row]) -> str:
    """Each contender against the cells themselves, in the order of its requests/s."""
    measured = [row for row in rows if "contender" in row]
    names = sorted({row["contender"] for row in measured}, key=lambda name: -median(requests_per_s(measured, name)))
    straight = median(requests_per_s(measured, "direct"))
    base = {share: median(first_ms(measured, "direct", share)) for share in ("0.5", "0.99")}
    lines = []
    for name in names:
        closed, streams, flood = (of(measured, contender=name, kind=kind) for kind in ("closed", "rate", "flood"))
        added = [
            NONE if name == "direct" else spread([ms - base[share] for ms in first_ms(measured, name, share)], ".2f")
            for share in ("0.5", "0.99")
        ]
        cpu = [
            NONE if name == "direct" else f"{median(1000 * row['cpu_s'] / max(1, row['requests']) for row in kind):.3f}"
            for kind in (closed, streams)
        ]
        chunks = spread([row["events"] / row["seconds"] for row in flood])
        failed = sum(row["errors"] for row in (*closed, *streams, *flood))
        rate = f"{streams[0]['count']}/s"
        share = f"{median(requests_per_s(measured, name)) / straight:.2f}"
        memory = NONE if name == "direct" else f"{max(row['resident_mib'] for row in closed):.0f}"
        speed = spread(requests_per_s(measured, name))
        lines.append([name, speed, share, rate, *added, chunks, *cpu, memory, str(failed)])
    head = ["path", "requests/s", "of direct", "streams", "added TTFT p50 ms", "added p99 ms", "chunks/s"]
    head += ["CPU s per 1,000 requests", "per 1,000 streams", "MiB", "errors"]
    absent = {name: reason for row in rows for name, reason in row.get("absent", {}).items() if name not in names}
    left_out = "".join(f"\n\nLeft out: {name}: {reason}" for name, reason in absent.items())
    rounds = len(requests_per_s(measured, "direct"))
    own = f"directly, TTFT p50 is {base['0.5']:.2f} ms and p99 {base['0.99']:.2f} ms"
    note = f"Medians of {rounds} rounds, least and greatest in brackets; {own}."
    return f"{table(head, lines)}\n\n{note}{left_out}"


# --- who finds the best cell ---


def routing(rows: list[Row]) -> str:
    """p99 by rate for each rule, and the rates that it sustains."""
    rates = sorted({row["rate"] for row in rows if "rate" in row})
    lines = []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        at = [spread([row["p99_ms"] for row in of(rows, policy=policy, rate=rate)]) for rate in rates]
        found = [row for row in of(rows, policy=policy) if "sustained" in row]
        best = [str(max((row["sustained"] for row in of(found, slow_factor=f)), default=NONE)) for f in (1.0, 3.0)]
        lines.append([policy, *at, *best])
    bound = next((row["bound_ms"] for row in rows if "bound_ms" in row), 0)
    head = ["rule", *(f"p99 ms at {rate:g}/s" for rate in rates)]
    head += [f"sustained at p99 <= {bound:g} ms, equal cells", "one 3x slower"]
    return table(head, lines)


def real_routing(rows: list[Row]) -> str:
    lines = []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        for rate in sorted({row["rate"] for row in of(rows, policy=policy)}):
            runs = of(rows, policy=policy, rate=rate)
            failed = sum(row["failed"] for row in runs)
            p50, p99 = (spread([row[name] for row in runs]) for name in ("p50_ms", "p99_ms"))
            lines.append([policy, f"{rate:g}/s", str(sum(row["n"] for row in runs)), p50, p99, str(failed)])
    return table(["rule", "rate", "n", "TTFT p50 ms", "p99 ms", "failed"], lines)


# --- what the caches find ---


def replay(rows: list[Row]) -> str:
    """One line for each rule and speed; later runs of the same replace earlier ones."""
    runs = {
        (row["trace"], row["cells"], row["factor"], row["policy"]): row
        for row in rows
        if row["policy"] != "ideal" and row.get("slow", 1) == 1
    }
    lines = [
        [
            f"{row['trace']}, {row['cells']} cells, {row['policy']}", f"{row['factor']:g}x",
            f"{row['hit_rate']:.1%}",
            *(f"{row['ttft_s'][share]:.2f}" for share in ("0.5", "0.9", "0.99")),
            f"{row['prompt_tokens_per_s']:,.0f}", f"{row['most_over_mean']:.2f}",
        ]
        for _, row in sorted(runs.items(), key=lambda run: run[0][:3])
    ]  # fmt: skip
    head = [
        "trace, cells, rule",
        "speed",
        "hit rate",
        "TTFT p50 s",
        "p90 s",
        "p99 s",
        "prompt tokens/s",
    ]
    ideal = {row["trace"]: row["hit_rate"] for row in rows if row["policy"] == "ideal"}
    most = "; ".join(f"{trace}: {share:.1%}" for trace, share in ideal.items())
    return f"{table([*head, 'most loaded cell over mean'], lines)}\n\nOne cell with an endless cache would find {most}."


def storms(rows: list[Row]) -> str:
    lines = [
        [
            row["label"] or "as it is", f"{row['load']:g}x for {row['storm_s']:g} s",
            f"{row['retries']} after {row['patience_s']:g} s",
            f"{row['capacity']:.0f}/s", f"{row['goodput_share']:.0%}", f"{row['back_after_s']:.0f} s",
            f"{row['succeeded']:.0%}", f"{row['tries_per_request']:.2f}",
        ]
        for row in rows
    ]  # fmt: skip
    head = ["ingress", "load", "retries, patience", "capacity", "goodput of capacity", "normal again after"]
    return table([*head, "requests that succeeded", "tries each"], lines)


SECTIONS: dict[str, Callable[[list[Row]], str]] = {
    "proxies": proxies,
    "proxies_apart": proxies,
    "routing": routing,
    "real_routing": real_routing,
    "replay": replay,
    "retry_storm": storms,
}


def machine() -> str:
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    processor = model.group(1) if model else platform.machine()
    peers = ", ".join(peer.requirement.replace("==", " ") for peer in PEERS)
    system = f"Linux {platform.release()}, Python {platform.python_version()}"
    return f"{os.cpu_count()} cores ({processor}), {pages:.0f} GiB, {system}; peers: {peers}."


def filled(page: str, name: str, text: str) -> str:
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    return re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: f"{begin}\n{text}\n{end}", page, flags=re.DOTALL)


def main(parser: argparse.ArgumentParser) -> None:
    parser.parse_args()
    page = filled(PAGE.read_text(encoding="utf-8"), "machine", machine())
    found = {name: rows for name in SECTIONS if (rows := read(RESULTS, name))}
    for name, rows in found.items():
        page = filled(page, name, SECTIONS[name](rows))
    PAGE.write_text(page, encoding="utf-8")
    print(f"{PAGE}: {', '.join(found) or 'no results yet'}")
