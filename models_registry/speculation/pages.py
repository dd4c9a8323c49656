"""A version's speculation for its page: what its newest calibration says, as figures and tables. Reads only."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from controlplane.dashboard.charts import BY_PLACE, HEIGHT_PX, MOST_SERIES, Colour, figure_json
from fleet.faults.planning.drift import SHARE_LEAST, accepted_expected
from fleet.faults.selectors.faults import CellGuesses, cell_guesses
from models_registry.speculation.planner import gains_by_size, guessed_at, read_step_cost
from models_registry.versions.models import ModelVersion
from models_registry.versions.selectors import latest_calibration

TREE_SIZES = (7, 15, 31, 63)
LEGIBLE_SIZES = (1, 2, 4, 8, 16, 32, 63)
"""Ticks on the logarithmic axis of sizes, which chains of four tokens and trees of 63 paths share."""
SHORT_AXIS = 8
"""Sizes up to this one all have a tick."""
LEGEND_PX = 64
"""Five names take three lines on a narrow screen."""
GAIN_TASKS = MOST_SERIES // 2
"""Tasks in a figure of gains, which has a line for one sequence and another for the largest batch."""


@dataclass(frozen=True, slots=True)
class TaskRow:
    """`heads`: share of right first guesses, and of right guesses among the first ten, per head. `chain` and `tree`:
    size and tokens per step."""

    name: str
    positions: int
    heads: tuple[tuple[float, float], ...]
    chain: tuple[tuple[int, float], ...]
    tree: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class ChoiceRow:
    """`ranges`: first batch size, and the number of guessed tokens from there on."""

    task: str
    instance_type: str
    source: str
    tokens: int
    gain: float
    ranges: tuple[tuple[int, int], ...]
    reason: str


@dataclass(frozen=True, slots=True)
class GainRow:
    """One task and batch size on one instance type: speedup by number of guessed tokens, from 0 on, and the chosen
    number."""

    task: str
    batch: int
    gains: tuple[float, ...]
    chosen: int

    @property
    def told(self) -> tuple[tuple[int, float], ...]:
        """Sizes and speedups that fit in a table row."""
        sizes = range(len(self.gains)) if len(self.gains) <= SHORT_AXIS + 1 else sorted({*LEGIBLE_SIZES, self.chosen})
        return tuple((size, self.gains[size]) for size in sizes if size < len(self.gains))


@dataclass(frozen=True, slots=True)
class CostFigure:
    """One instance type. `what`: tokens of a chain, or paths of a tree."""

    name: str
    instance_type: str
    what: str
    rows: tuple[GainRow, ...]
    figure: str


@dataclass(frozen=True, slots=True)
class AcceptedRow:
    """Recent speculation of a deployment's cells. `tokens`: per step, including the model's own. `expected`: the
    calibrated number by task, for the same number of guesses."""

    deployment: str
    cells: int
    drafts: int
    guessed: float
    tokens: float
    expected: tuple[tuple[str, float], ...]

    @property
    def is_low(self) -> bool:
        """Below the calibrated number of the worst task."""
        return bool(self.expected) and self.tokens - 1 < SHARE_LEAST * (min(each for _, each in self.expected) - 1)


@dataclass(frozen=True, slots=True)
class SpeculationView:
    """`method`: several if it differs by instance type; empty: no speculation. `calibrated_at` None: never calibrated.
    `tokens_figure`: tokens per step by size; `costs`: speedups on each instance type with measured step costs."""

    reference: str
    method: str
    is_medusa: bool
    calibrated_at: datetime | None
    actor: str
    tasks: tuple[TaskRow, ...]
    choices: tuple[ChoiceRow, ...]
    tokens_figure: str
    costs: tuple[CostFigure, ...]


def version_speculation(version: ModelVersion) -> SpeculationView:
    spec = version.spec()
    everywhere = [spec.on(kind) for kind in spec.instance_types] if spec.by_type else [spec]
    methods = sorted({str(each.speculation["method"]) for each in everywhere if each.speculation.get("method")})
    found = latest_calibration(version) if methods else None
    return SpeculationView(
        reference=version.reference,
        method=" or ".join(methods),
        is_medusa="medusa" in methods,
        calibrated_at=found.created_at if found else None,
        actor=found.actor if found else "",
        tasks=tuple(map(_task, found.figures)) if found else (),
        choices=tuple(map(_choice, found.choices)) if found else (),
        tokens_figure=_tokens_figure(found.figures) if found else "",
        costs=tuple(_cost_figures(found.figures, found.choices, found.step_costs)) if found else (),
    )


def version_accepted(version: ModelVersion, now: datetime) -> tuple[AcceptedRow, ...]:
    """Guessed and accepted tokens of its cells in the last hour, in three queries."""
    own = [each for each in cell_guesses(now) if each.cell.model_version_id == version.pk]
    found = latest_calibration(version) if own else None
    return tuple(_accepted(own, found.figures if found else ()))


def _accepted(cells: Sequence[CellGuesses], figures: Sequence[Mapping[str, Any]]) -> Iterable[AcceptedRow]:
    for deployment in dict.fromkeys(each.cell.deployment_id for each in cells):
        own = [each for each in cells if each.cell.deployment_id == deployment]
        drafts = sum(each.drafts for each in own)
        if drafts:
            guessed, accepted = (
                sum(each) / drafts for each in zip(*((c.guessed, c.accepted) for c in own), strict=True)
            )
            expected = tuple((task["name"], 1 + accepted_expected(task["chain"], guessed)) for task in figures)
            yield AcceptedRow(deployment, len(own), drafts, guessed, 1 + accepted, expected)


def _task(figures: dict[str, Any]) -> TaskRow:
    tree = figures["tree"]
    return TaskRow(
        figures["name"],
        figures["positions"],
        tuple((ranks[0], sum(ranks)) for ranks in figures["accuracies"]),
        tuple(enumerate(figures["chain"]))[1:],
        tuple((size, tree[size]) for size in TREE_SIZES if size < len(tree)),
    )


def _choice(chosen: dict[str, Any]) -> ChoiceRow:
    ranges = tuple((first, tokens) for first, _, tokens in chosen["ranges"])
    return ChoiceRow(
        chosen["task"],
        chosen["instance_type"],
        chosen["source"],
        chosen["tokens"],
        chosen["gain"],
        ranges,
        chosen["reason"],
    )


def _tokens_figure(figures: Sequence[Mapping[str, Any]]) -> str:
    """Plotly figure as JSON: chains with markers, trees as lines, one colour per task."""
    traces = []
    for place, task in enumerate(figures[: len(BY_PLACE)]):
        for kind, dash in (("tree", "solid"), ("chain", "dot")):
            values = enumerate(task[kind])
            points = [(size, tokens) for size, tokens in values if size]
            mode = "lines+markers" if kind == "chain" else "lines"
            traces.append(_line(f"{task['name']}, {kind}", points, BY_PLACE[place], dash, mode, "tokens"))
    most = max((max(len(task["tree"]), len(task["chain"])) - 1 for task in figures), default=1)
    return _figure(traces, {**_marked(LEGIBLE_SIZES, most), "type": "log"})


def _cost_figures(
    figures: Sequence[Mapping[str, Any]], choices: Sequence[Mapping[str, Any]], step_costs: Sequence[Any]
) -> Iterable[CostFigure]:
    by_name = {task["name"]: task for task in figures}
    for number, cost in enumerate(map(read_step_cost, step_costs)):
        rows: list[GainRow] = []
        here = [one for one in choices if one["instance_type"] == cost.instance_type]
        for one in here:
            tokens = by_name[one["task"]]["tree" if one["is_tree"] else "chain"]
            for batch in cost.steps:
                gains = gains_by_size(tokens, cost, batch)
                rows.append(GainRow(one["task"], batch, gains, guessed_at(one["ranges"], batch)))
        what = "paths" if any(one["is_tree"] for one in here) else "tokens"
        yield CostFigure(f"gains-{number}", cost.instance_type, what, tuple(rows), _gains_figure(rows))


def _gains_figure(rows: Sequence[GainRow]) -> str:
    """One sequence as a line, the largest batch dashed, with a ring at the chosen number."""
    batches = sorted({row.batch for row in rows})
    dashes = {batches[-1]: "dash", batches[0]: "solid"} if batches else {}
    tasks = list(dict.fromkeys(row.task for row in rows))[:GAIN_TASKS]
    shown = [row for row in rows if row.batch in dashes and row.task in tasks]
    traces = []
    for row in shown:
        colour, name = BY_PLACE[tasks.index(row.task)], f"{row.task}, batch {row.batch}"
        points = list(enumerate(row.gains))
        traces.append(_line(name, points, colour, dashes[row.batch], "lines", "times as fast"))
    rings = [(row.chosen, row.gains[row.chosen]) for row in shown if row.chosen < len(row.gains)]
    ring = {"color": Colour.OK, "size": 11, "symbol": "circle-open", "line": {"width": 2}}
    traces.append({**_trace("chosen", rings, "markers", "times as fast"), "marker": ring})
    most = max((len(row.gains) - 1 for row in shown), default=1)
    marks = range(most + 1) if most <= SHORT_AXIS else (0, *LEGIBLE_SIZES[3:])
    return _figure(traces, _marked(marks, most))


def _line(
    name: str, points: Sequence[tuple[int, float]], colour: Colour, dash: str, mode: str, unit: str
) -> dict[str, Any]:
    style = {"color": colour, "width": 1.5, "dash": dash}
    return {**_trace(name, points, mode, unit), "line": style, "marker": {"color": colour, "size": 6}}


def _trace(name: str, points: Sequence[tuple[int, float]], mode: str, unit: str) -> dict[str, Any]:
    return {
        "mode": mode,
        "name": name,
        "x": [size for size, _ in points],
        "y": [round(value, 3) for _, value in points],
        "hovertemplate": f"%{{y:.2f}} {unit}",
    }


def _marked(marks: Iterable[int], most: int) -> dict[str, Any]:
    kept = [each for each in marks if each <= most]
    return {"tickvals": kept, "ticktext": [str(each) for each in kept]}


def _figure(traces: Sequence[Mapping[str, Any]], xaxis: Mapping[str, Any]) -> str:
    layout = {"height": HEIGHT_PX + LEGEND_PX, "showlegend": True, "xaxis": xaxis, "yaxis": {"rangemode": "tozero"}}
    return figure_json(traces, layout)
