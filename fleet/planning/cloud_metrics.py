"""What an alarm outside of this install is told each minute, as the parameters of CloudWatch's `PutMetricData`. Pure.

Few figures, each of which a person would be woken for: whoever wants more asks Prometheus.
"""

from dataclasses import dataclass
from typing import Any

NAMESPACE = "Switchyard"
"""The only one that the policy of the control plane's role allows."""
DIMENSION = "Install"
PASS_COUNTS_S = 60.0
"""A pass of the reconciler that ended within it is a completed one: as long as the alarm's period."""


@dataclass(frozen=True, slots=True)
class InstallFigures:
    """How an install stands. `reconciled_s`: seconds since the reconciler's last whole pass; `last_pass_s`: the same of
    the control loop that is most behind. None: there was none yet."""

    cells_wanted: int
    cells_ready: int
    incidents_open: int
    reconciled_s: float | None
    last_pass_s: float | None


def metrics_request(install: str, figures: InstallFigures) -> dict[str, Any]:
    """All of it in one call. Without times of ours: CloudWatch takes that of arrival, which no wrong clock shifts."""
    was_reconciled = figures.reconciled_s is not None and figures.reconciled_s <= PASS_COUNTS_S
    values: list[tuple[str, float, str]] = [
        ("CompletedPasses", float(was_reconciled), "Count"),
        ("CellsWanted", figures.cells_wanted, "Count"),
        ("CellsReady", figures.cells_ready, "Count"),
        ("OpenIncidents", figures.incidents_open, "Count"),
    ]
    if figures.last_pass_s is not None:
        values.append(("LastPassAge", figures.last_pass_s, "Seconds"))
    of_this = [{"Name": DIMENSION, "Value": install}]
    data = [
        {"MetricName": name, "Dimensions": of_this, "Value": float(value), "Unit": unit} for name, value, unit in values
    ]
    return {"Namespace": NAMESPACE, "MetricData": data}
