"""What cells of a version were measured to do in the last hour, since each of them is ready: by deployment and region,
in the numbers that a version is compared by."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import connection

from fleet.planning.load.history import FINE_S
from models_registry.models import ModelVersion

LOOKED_BACK = timedelta(hours=1)
CELLS_MEASURED = 50
"""Of a version, the longest ready ones: an hour of each is 240 windows."""


_MEASURED = """
SELECT cell.deployment_id, cell.region_id, deployment.instance_type_id, count(DISTINCT cell.id),
    sum(requests)::bigint, sum(errors)::bigint, max(tokens_per_s), max(in_flight), max(ttft_p50_ms), max(ttft_p95_ms),
    max(itl_p95_ms)
FROM (
    SELECT id, deployment_id, region_id, state_since FROM fleet_cell
    WHERE model_version_id = %(version)s AND state = 'ready' ORDER BY state_since, id LIMIT %(most)s
) cell
JOIN fleet_deployment deployment ON deployment.name = cell.deployment_id
JOIN fleet_loadsubject subject ON subject.name = 'cell:' || cell.id
JOIN fleet_loadwindow seen ON seen.subject_id = subject.id AND seen.step_s = %(step)s
    AND seen.at >= greatest(%(since)s, cell.state_since)
GROUP BY 1, 2, 3 ORDER BY 1, 2, 3
"""


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
    """In one query; places without a measured window are left out."""
    values: dict[str, Any] = {"version": version.pk, "since": now - LOOKED_BACK, "step": FINE_S, "most": CELLS_MEASURED}
    with connection.cursor() as cursor:
        cursor.execute(_MEASURED, values)
        return tuple(Measured(*row) for row in cursor.fetchall())
