"""The figures of the traffic bench as one small page; Plotly lies beside it, copied from the installed package."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import plotly.graph_objects as go
import plotly.offline

Row = dict[str, Any]
PLOTLY = "plotly.min.js"
HEIGHT = 360
HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Traffic bench</title>
<style>body{font:14px system-ui;max-width:960px;margin:24px auto;padding:0 16px}</style>
<script src="plotly.min.js"></script><h1>Traffic bench</h1>
<noscript>The figures need JavaScript; the same numbers are in traffic.md.</noscript>
<p id="lost" hidden>plotly.min.js is missing: <code>python -m bench.traffic.report</code> puts it here. The same
numbers are in <a href="traffic.md">traffic.md</a>.</p><script>document.getElementById("lost").hidden = !!window.Plotly
</script>
"""


def write(path: Path, results: dict[str, list[Row]]) -> None:
    """Write the page for the results that are there, and Plotly's own script beside it."""
    drawn = [figure for name, draw in FIGURES if (rows := results.get(name)) for figure in draw(rows)]
    bodies = [figure.to_html(full_html=False, include_plotlyjs=False) for figure in drawn]
    path.write_text(HEAD + "\n".join(bodies) + "\n</html>\n", encoding="utf-8")
    (path.parent / PLOTLY).write_text(plotly.offline.get_plotlyjs(), encoding="utf-8")


def _figure(title: str, traces: Sequence[Any], **layout: Any) -> go.Figure:
    return go.Figure(list(traces), go.Layout(title=title, template="none", height=HEIGHT, **layout))


def _proxies(rows: list[Row]) -> list[go.Figure]:
    measured = [row for row in rows if "contender" in row]
    names = list(dict.fromkeys(row["contender"] for row in measured))

    def bars(title: str, kind: str, value: Any) -> go.Figure:
        found = {
            name: [
                value(row) for row in measured if (row["contender"], row["kind"]) == (name, kind) and row["requests"]
            ]
            for name in names
        }
        order = sorted((name for name in names if found[name]), key=lambda name: median(found[name]))
        middle = [median(found[name]) for name in order]
        error = {"type": "data", "array": [max(found[n]) - median(found[n]) for n in order]}
        error["arrayminus"] = [median(found[n]) - min(found[n]) for n in order]
        bar = go.Bar(x=middle, y=order, orientation="h", error_x=error)
        return _figure(title, [bar], xaxis={"type": "log"}, margin={"l": 160})

    return [
        bars("Requests/s (log scale)", "closed", lambda row: row["requests"] / row["seconds"]),
        bars("Time to first token, p99, ms (log scale)", "rate", lambda row: row["first_us"]["0.99"] / 1000),
    ]


def _routing(rows: list[Row]) -> list[go.Figure]:
    lines = []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        rates = sorted({row["rate"] for row in rows if "rate" in row and row["policy"] == policy})
        p99 = [median(r["p99_ms"] for r in rows if (r["policy"], r.get("rate")) == (policy, rate)) for rate in rates]
        lines.append(go.Scatter(x=rates, y=p99, name=policy))
    axes = {"xaxis": {"title": "requests/s"}, "yaxis": {"title": "p99 ms", "type": "log"}}
    return [_figure("Time to first token by rule, one of 8 cells 3x slower (simulated)", lines, **axes)]


def _replay(rows: list[Row]) -> list[go.Figure]:
    runs = [row for row in rows if row["policy"] != "ideal" and row["trace"] == "mooncake"]
    points = [
        go.Scatter(
            x=[row["hit_rate"]], y=[row["ttft_s"]["0.5"]], mode="markers", name=f"{row['policy']}, {row['factor']:g}x"
        )
        for row in runs
    ]
    axes = {"xaxis": {"title": "hit rate", "tickformat": ".0%"}, "yaxis": {"title": "TTFT p50 s", "type": "log"}}
    return [_figure("Mooncake trace: what the caches find and what it brings (simulated)", points, **axes)]


def _storm(rows: list[Row]) -> list[go.Figure]:
    drawn = []
    for row in rows:
        at_s = [window["at_s"] for window in row["windows"]]
        lines = [
            go.Scatter(x=at_s, y=[window[name] for window in row["windows"]], name=name)
            for name in ("new", "tries", "goodput", "refused", "gave_up")
        ]
        drawn.append(_figure(f"Retry storm: {row['label'] or 'as it is'}, per second", lines, xaxis={"title": "s"}))
    return drawn


FIGURES = (("proxies", _proxies), ("routing", _routing), ("replay", _replay), ("retry_storm", _storm))
