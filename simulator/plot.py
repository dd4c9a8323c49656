"""Draws one run: cells in service and wanted cells over time, with events as marks. Writes one self-contained HTML
file."""

from collections.abc import Iterable
from html import escape
from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from simulator.context import TimelineEntry
from simulator.world import Series, World

POINTS = 5000
"""Points per line; more cannot be distinguished on a screen."""
MARKS = {"fault": ("x", "#c0392b"), "killed": ("triangle-down", "#c0392b"), "violation": ("star", "#8e44ad")}
ROLLOUT_MARK = ("diamond", "#2c7fb8")


def figure_html(world: World, title: str) -> str:
    places = sorted(world.series)
    names = [f"{deployment} in {region}" for deployment, region in places]
    figure = make_subplots(rows=max(1, len(places)), cols=1, shared_xaxes=True, subplot_titles=names)
    for row, place in enumerate(places, start=1):
        _lines(figure, row, world.series[place], world.queue.now_s)
    top = max((max(world.series[place].wanted) for place in places), default=1)
    for kind, entries in _timeline_marks(world).items():
        _scatter(figure, kind, entries, top)
    figure.update_layout(
        title=title, template="plotly_white", height=140 + 220 * max(1, len(places)), hovermode="closest"
    )
    figure.update_xaxes(title_text="simulated seconds", row=max(1, len(places)), col=1)
    figure.update_yaxes(title_text="cells", rangemode="tozero")
    page: str = figure.to_html(full_html=True, include_plotlyjs=True)
    return page.replace("<head>", f"<head><title>{escape(title)}</title>", 1)


def write_figure(world: World, title: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(figure_html(world, title), encoding="utf-8")


def _lines(figure: go.Figure, row: int, series: Series, end_s: float) -> None:
    step = max(1, len(series.at_s) // POINTS)
    at_s = [*series.at_s[::step], end_s]
    ready = [*series.ready[::step], series.ready[-1]]
    wanted = [*series.wanted[::step], series.wanted[-1]]
    for name, values, line in (
        ("wanted", wanted, {"dash": "dot", "color": "#888888", "shape": "hv"}),
        ("ready", ready, {"color": "#1b7837", "shape": "hv"}),
    ):
        trace = go.Scatter(x=at_s, y=values, name=name, mode="lines", line=line, showlegend=row == 1)
        figure.add_trace(trace, row=row, col=1)


def _timeline_marks(world: World) -> dict[str, list[TimelineEntry]]:
    marks: dict[str, list[TimelineEntry]] = {}
    for entry in (*world.timeline.entries, *world.timeline.violations):
        kind = "rollout" if entry.kind.startswith("rollout.") else entry.kind
        if kind in MARKS or kind == "rollout":
            marks.setdefault(kind, []).append(entry)
    return marks


def _scatter(figure: go.Figure, kind: str, entries: Iterable[TimelineEntry], top: int) -> None:
    shown = list(entries)[:POINTS]
    symbol, colour = MARKS.get(kind, ROLLOUT_MARK)
    figure.add_trace(
        go.Scatter(
            x=[entry.at_s for entry in shown],
            y=[top * 1.05] * len(shown),
            text=[f"{entry.kind} {escape(entry.subject)}: {escape(entry.text)}" for entry in shown],
            name=kind,
            mode="markers",
            marker={"symbol": symbol, "color": colour, "size": 9},
            hovertemplate="%{x:.1f} s %{text}<extra></extra>",
        ),
        row=1,
        col=1,
    )
