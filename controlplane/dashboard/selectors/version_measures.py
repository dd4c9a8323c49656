"""What cells of a version were measured to do in the last hour, since each of them is ready: by deployment and region,
in the numbers that a version is compared by."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from fleet.models import Cell, LoadWindow
from fleet.planning.history import FINE_S
from fleet.planning.states import CellState
from fleet.selectors.history import cell_subject
from models_registry.models import ModelVersion

LOOKED_BACK = timedelta(hours=1)
CELLS_MEASURED = 50
"""Of a version, the longest ready ones: an hour of each is 240 windows."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Cells of one place. Peaks are of one cell in 15 s; latencies those of the worst cell and window."""

    deployment: str
    region: str
    instance_type: str
    cells: int
    requests: int
    errors: int
    peak_tokens_per_s: float
    peak_in_flight: float
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    itl_p95_ms: float | None


def version_measures(version: ModelVersion, now: datetime) -> tuple[Measured, ...]:
    """In two queries; places without a measured window are left out."""
    ready = Cell.objects.filter(model_version=version, state=CellState.READY.value).order_by("state_since")
    cells = {cell_subject(cell.pk): cell for cell in ready.select_related("deployment")[:CELLS_MEASURED]}
    windows = LoadWindow.objects.filter(subject__name__in=list(cells), step_s=FINE_S, at__gte=now - LOOKED_BACK)
    places: dict[tuple[str, str, str], list[tuple[str, LoadWindow]]] = defaultdict(list)
    for window in windows.select_related("subject"):
        cell = cells[window.subject.name]
        if window.at >= cell.state_since:
            place = (cell.deployment_id, cell.region_id, cell.deployment.instance_type_id)
            places[place].append((cell.pk, window))
    return tuple(_measured(place, found) for place, found in sorted(places.items()))


def _measured(place: tuple[str, str, str], found: Sequence[tuple[str, LoadWindow]]) -> Measured:
    windows = [window for _, window in found]
    return Measured(
        *place,
        cells=len({cell for cell, _ in found}),
        requests=sum(window.requests for window in windows),
        errors=sum(window.errors for window in windows),
        peak_tokens_per_s=max(window.tokens_per_s for window in windows),
        peak_in_flight=max(window.in_flight for window in windows),
        ttft_p50_ms=_worst(window.ttft_p50_ms for window in windows),
        ttft_p95_ms=_worst(window.ttft_p95_ms for window in windows),
        itl_p95_ms=_worst(window.itl_p95_ms for window in windows),
    )


def _worst(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
