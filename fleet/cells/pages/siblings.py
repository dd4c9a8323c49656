"""The part of a cell's page that compares it with its siblings: reads their windows of load and of machines, and takes
means. `fleet.cells.planner.compare_with_siblings` decides which figures stand out."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from statistics import fmean
from typing import Any

from fleet.cells.models import Cell, CellMember
from fleet.cells.pages.data import CellRow
from fleet.cells.planner import Compared, compare_with_siblings
from fleet.load.selectors import Point, cell_subject, load_series, node_means, node_subject, step_of
from fleet.reconcile.planning.states import CellState
from kernel.time_ranges import TimeRange

SIBLINGS_COMPARED = 50
FINE_UP_TO = 8
"""With more siblings, windows of at least `COARSE_S` are read, so that the page stays fast."""
COARSE_S = 300
NODE_EXTREMES: dict[str, Any] = {"cpu_percent": max, "memory_percent": max, "clock_percent": min, "temperature_c": max}


@dataclass(frozen=True, slots=True)
class Siblings:
    """A cell next to the other ready cells of its deployment on the same instance type, over the page's time range.
    `shown`: those that were compared; `total`: all of them."""

    shown: int
    total: int
    compared: tuple[Compared, ...]

    @property
    def headline(self) -> str:
        standing_out = [one for one in self.compared if one.stands_out]
        if not standing_out:
            return "no figure is worse than that of every sibling by more than a quarter"
        parts = (
            f"{one.figure.title.lower()} {one.own:.3g} {one.figure.unit} (siblings {one.median:.3g})"
            for one in standing_out
        )
        stages = dict.fromkeys(one.figure.stage.value for one in standing_out)
        return f"worse than every sibling in {' and '.join(stages)}: {'; '.join(parts)}"


def siblings_of(row: CellRow, span: TimeRange, now: datetime) -> Siblings:
    """Means over the range, in five queries. With many siblings the first ones by name are compared."""
    cell = row.cell
    alike = Cell.objects.filter(
        deployment_id=cell.deployment_id, instance_type_id=cell.instance_type_id, role=cell.role, state=CellState.READY
    ).exclude(pk=cell.pk)
    names = list(alike.order_by("id").values_list("id", flat=True)[:SIBLINGS_COMPARED])
    members: dict[str, list[str]] = defaultdict(list)
    for of, node in CellMember.objects.filter(cell__in=[cell.pk, *names]).values_list("cell_id", "node_id"):
        members[of].append(node_subject(node))
    step_s = step_of(span, now) if len(names) <= FINE_UP_TO else max(COARSE_S, step_of(span, now))
    loads = load_series([cell_subject(name) for name in (cell.pk, *names)], span, step_s)
    uses = node_means([node for nodes in members.values() for node in nodes], span, now)

    def figures(name: str) -> dict[str, float | None]:
        return load_means(loads[cell_subject(name)].points) | use_means([uses.get(node, {}) for node in members[name]])

    compared = compare_with_siblings(figures(cell.pk), [figures(name) for name in names])
    return Siblings(len(names), alike.count(), compared)


def load_means(points: Sequence[Point | None]) -> dict[str, float | None]:
    """Means over windows with a sample, and what a request of them was like."""
    known = [point for point in points if point is not None]
    means = {field.name: _mean(getattr(point, field.name) for point in known) for field in fields(Point)}
    requests = means["requests_per_s"]
    for name, tokens in (("prompt_per_request", "prompt_tokens_per_s"), ("tokens_per_request", "tokens_per_s")):
        means[name] = (means[tokens] or 0.0) / requests if requests else None
    return means


def use_means(members: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """The busiest host, the slowest clock and the hottest device of a cell's members, from their means."""
    return {
        name: extreme((value for mean in members if (value := mean.get(name)) is not None), default=None)
        for name, extreme in NODE_EXTREMES.items()
    }


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
