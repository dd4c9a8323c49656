"""Load on pages: the latest reports of cells and their sums, and charts over time. Old reports count as no report."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import connection

from controlplane.dashboard.charts import MOST_SERIES, Chart, Colour, Marker, Series, with_markers
from engine_agent.protocol.load_messages import Load
from fleet.cells.models import Cell
from fleet.deployments.models import Deployment
from fleet.deployments.planner import Burn, Objective, burns
from fleet.load.planner import FRESH_FOR_S, HELD_FOR_S
from fleet.load.selectors import (
    LoadSeries,
    NodeSeries,
    deployment_subject,
    load_in_short,
    load_series,
    node_series,
    node_subject,
    seen_in_windows,
    step_of,
)
from fleet.nodes.models import HOLDS_SINCE, Node, NodeReport
from kernel.time_ranges import TimeRange


def report_of(node: Node) -> NodeReport | None:
    """The latest report of a node, prefetched with it."""
    return getattr(node, "report", None)


def silent_s(report: NodeReport | None, now: datetime) -> float | None:
    """Seconds since the agent's last report, or None if it never reported, or is on time, perhaps with heartbeats."""
    if report is None or report.last_seen_at is None:
        return None
    age_s = (now - report.last_seen_at).total_seconds()
    limit_s = HELD_FOR_S if report.connected and not report.quiet else FRESH_FOR_S
    return age_s if age_s > limit_s else None


def load_of(cell: Cell, leader: NodeReport | None, now: datetime) -> Load | None:
    """The cell's load, or None without a fresh report of its leader about this generation."""
    if leader is None or leader.load is None or leader.last_seen_at is None or silent_s(leader, now) is not None:
        return None
    if (leader.cell, leader.generation) != (cell.id, cell.generation):
        return None
    return load_in_short(leader.load)


@dataclass(frozen=True, slots=True)
class SummedLoad:
    """The sum over several cells (None without reports), and the number of ready cells that reported. Counts add up;
    p50 is the median of the cells' values; p99 is the worst cell's, an upper bound, because percentiles cannot be
    added."""

    load: Load | None
    ready_cells: int


NO_LOAD = SummedLoad(load=None, ready_cells=0)
_SUMS = f"""
SELECT cell.deployment_id, count(*) FILTER (WHERE cell.state = 'ready'),
    sum(reported.in_flight), sum(reported.queued), sum(reported.tokens_per_s),
    sum(reported.requests_total), sum(reported.errors_total),
    percentile_cont(0.5) WITHIN GROUP (ORDER BY reported.ttft_p50_ms), max(reported.ttft_p99_ms),
    percentile_cont(0.5) WITHIN GROUP (ORDER BY reported.itl_p50_ms), max(reported.itl_p99_ms)
FROM fleet_cell cell
JOIN fleet_cellmember member ON member.cell_id = cell.id AND member.rank = 0
JOIN fleet_nodereport report ON report.node_id = member.node_id
    AND report.cell = cell.id AND report.generation = cell.generation,
LATERAL jsonb_to_record(report.load) AS reported(in_flight float8, queued float8, tokens_per_s float8,
    requests_total float8, errors_total float8, ttft_p50_ms float8, ttft_p99_ms float8, itl_p50_ms float8,
    itl_p99_ms float8)
WHERE cell.state <> 'stopped' AND report.load IS NOT NULL AND {HOLDS_SINCE}
    AND cell.deployment_id = ANY(%(deployments)s)
GROUP BY cell.deployment_id
"""  # noqa: S608 - only a condition


def loads_by_deployment(deployments: Sequence[str], now: datetime) -> dict[str, SummedLoad]:
    """Deployment -> load of its live cells with fresh reports. One query."""
    with connection.cursor() as cursor:
        cursor.execute(_SUMS, {"since": now - timedelta(seconds=FRESH_FOR_S), "deployments": list(deployments)})
        return {row[0]: SummedLoad(_load(*row[2:]), row[1]) for row in cursor.fetchall()}


def _load(
    in_flight: float | None,
    queued: float | None,
    tokens_per_s: float | None,
    requests_total: float | None,
    errors_total: float | None,
    *percentiles: float | None,
) -> Load:
    ttft_p50_ms, ttft_p99_ms, itl_p50_ms, itl_p99_ms = percentiles
    return Load(
        in_flight=round(in_flight or 0),
        queued=round(queued or 0),
        tokens_per_s=tokens_per_s or 0.0,
        requests_total=round(requests_total or 0),
        errors_total=round(errors_total or 0),
        ttft_p50_ms=ttft_p50_ms,
        ttft_p99_ms=ttft_p99_ms,
        itl_p50_ms=itl_p50_ms,
        itl_p99_ms=itl_p99_ms,
    )


@dataclass(frozen=True, slots=True)
class Charts:
    """Charts over one time range, and the markers in it."""

    charts: tuple[Chart, ...]
    markers: tuple[Marker, ...]


@dataclass(frozen=True, slots=True)
class Slo:
    """A deployment's objective and the burn of its budgets."""

    objective: Objective
    burns: tuple[Burn, ...]


def load_charts(
    subject: str,
    *,
    span: TimeRange,
    now: datetime,
    markers: tuple[Marker, ...],
    ttft_objective_ms: float | None = None,
) -> Charts:
    """Charts of a subject's load, in one query."""
    load = load_series([subject], span, step_of(span, now))[subject]
    return Charts(with_markers(_charts(load, ttft_objective_ms), markers), markers)


def slo_of(deployment: Deployment, now: datetime) -> Slo:
    """Burn rates of a deployment's budgets, in one query."""
    objective = deployment.objective()
    return Slo(objective, burns(objective, seen_in_windows(deployment_subject(deployment.name), now)))


@dataclass(frozen=True, slots=True)
class Line:
    """A figure of a window as a line."""

    figure: str
    name: str
    colour: Colour | None = None


LOAD_CHARTS: tuple[tuple[str, str, str, tuple[Line, ...]], ...] = (
    ("rate", "Requests", "/s", (Line("requests_per_s", "requests"), Line("errors_per_s", "errors", Colour.BAD))),
    ("tokens", "Tokens", "/s", (Line("prompt_tokens_per_s", "in"), Line("tokens_per_s", "out"))),
    (
        "ttft",
        "Time to first token",
        "ms",
        (Line("ttft_p50_ms", "median"), Line("ttft_p95_ms", "p95"), Line("ttft_p99_ms", "p99")),
    ),
    (
        "itl",
        "Time between tokens",
        "ms",
        (Line("itl_p50_ms", "median"), Line("itl_p95_ms", "p95"), Line("step_ms", "engine step")),
    ),
    (
        "batch",
        "Batch and queue",
        "requests",
        (
            Line("in_flight", "in flight"),
            Line("queued", "queued", Colour.WARN),
            Line("running", "running"),
            Line("waiting", "waiting", Colour.BAKE),
        ),
    ),
    ("cache", "KV cache", "%", (Line("kv_percent", "in use"), Line("cache_hit_percent", "prefix hits"))),
    ("preemptions", "Preemptions", "/s", (Line("preemptions_per_s", "preemptions", Colour.WARN),)),
)
"""Name, title, unit and lines of each chart."""


def _charts(load: LoadSeries, ttft_objective_ms: float | None) -> Iterator[Chart]:
    for name, title, unit, lines in LOAD_CHARTS:
        series = tuple(Series(line.name, values_of(load.points, line.figure), line.colour) for line in lines)
        threshold = ttft_objective_ms if name == "ttft" else None
        yield Chart(name, title, unit, load.start, load.step_s, series, threshold=threshold)


def values_of(points: Sequence[object], figure: str) -> list[float | None]:
    """A figure of each window, None where there is none."""
    return [None if point is None else getattr(point, figure) for point in points]


@dataclass(frozen=True, slots=True)
class Plot:
    """A chart of the use of machines and devices. `from_zero` False: the axis begins at the smallest value."""

    name: str
    title: str
    unit: str
    lines: tuple[Line, ...]
    from_zero: bool = True


USE_CHARTS = (
    Plot(
        "host",
        "Machine",
        "% in use",
        (Line("cpu_percent", "CPU"), Line("memory_percent", "memory"), Line("disk_percent", "file system")),
    ),
    Plot("network", "Network", "MB/s", (Line("network_received_per_s", "in"), Line("network_sent_per_s", "out"))),
    Plot("disk", "Disks", "MB/s", (Line("disk_read_per_s", "read"), Line("disk_written_per_s", "written"))),
    Plot(
        "devices",
        "Accelerators",
        "%",
        (
            Line("utilisation_percent", "busy"),
            Line("device_memory_percent", "memory"),
            Line("clock_percent", "lowest clock"),
        ),
    ),
    Plot("temperature", "Temperature", "°C", (Line("temperature_c", "hottest device"),), from_zero=False),
    Plot("power", "Power of accelerators", "W", (Line("power_watts", "power"),)),
    Plot(
        "errors",
        "New errors",
        "",
        (Line("ecc_errors", "ECC", Colour.BAD), Line("link_errors", "NVLink, PCIe, EFA", Colour.WARN)),
    ),
)
MEMBER_CHARTS = (
    Plot("busy", "Accelerators busy", "%", (Line("utilisation_percent", ""),)),
    Plot("memory", "Device memory", "%", (Line("device_memory_percent", ""),)),
    Plot("temperature", "Hottest device", "°C", (Line("temperature_c", ""),), from_zero=False),
    Plot("power", "Power of accelerators", "W", (Line("power_watts", ""),)),
    Plot("clock", "Lowest clock", "% of its maximum", (Line("clock_percent", ""),), from_zero=False),
    Plot("cpu", "CPU of the machine", "%", (Line("cpu_percent", ""),)),
)


def use_charts(subject: str, *, span: TimeRange, now: datetime, markers: tuple[Marker, ...]) -> Charts:
    """Charts of the machines and devices of a subject, in one query."""
    use = node_series([subject], span, now)[subject]
    plots = [
        (plot, [Series(line.name, node_values(use, line.figure), line.colour) for line in plot.lines])
        for plot in USE_CHARTS
    ]
    return _use_charts("use", use, plots, markers)


def member_charts(nodes: Sequence[str], *, span: TimeRange, now: datetime, markers: tuple[Marker, ...]) -> Charts:
    """A line for each of the first nodes of a cell, in one query."""
    shown = [node_subject(node) for node in nodes[:MOST_SERIES]]
    if not shown:
        return Charts((), markers)
    use = node_series(shown, span, now)
    plots = [
        (plot, [Series(node.partition(":")[2], node_values(use[node], plot.lines[0].figure)) for node in shown])
        for plot in MEMBER_CHARTS
    ]
    return _use_charts("member", use[shown[0]], plots, markers)


def _use_charts(
    prefix: str, use: NodeSeries, plots: Iterable[tuple[Plot, list[Series]]], markers: tuple[Marker, ...]
) -> Charts:
    """Without charts of figures that no machine reports."""
    charts = (
        Chart(
            f"{prefix}-{plot.name}",
            plot.title,
            plot.unit,
            use.start,
            use.step_s,
            tuple(series),
            from_zero=plot.from_zero,
        )
        for plot, series in plots
    )
    return Charts(with_markers((chart for chart in charts if not chart.is_empty), markers), markers)


def node_values(use: NodeSeries, figure: str) -> list[float | None]:
    """A figure of each window; bytes as megabytes."""
    values = values_of(use.points, figure)
    if figure.endswith("_per_s"):
        return [None if value is None else value / 1e6 for value in values]
    return values
