"""What the plan of the day leaves to batches of a model in a region, in lines a second."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from fleet.models import Deployment, ScalingState
from fleet.planning.capacity.need import PlacePlan, batch_seconds, batch_time_s
from fleet.selectors.capacity_plan import Place, place_plans
from traffic.planning.batch_order import RESERVE


@dataclass(frozen=True)
class BatchBudgets:
    """`served`: deployment by the names that it is asked for by; `line_s`: how long a line takes in a place: as long as
    requests took there while none had to wait. Places of which that is not known, or without a fresh plan, have no
    budget that anybody could count on."""

    now: datetime
    plans: Mapping[Place, PlacePlan] = field(default_factory=dict)
    served: Mapping[str, str] = field(default_factory=dict)
    line_s: Mapping[Place, float] = field(default_factory=dict)

    def rate(self, region: str, model: str, until: datetime) -> float | None:
        """Lines a second in the mean of the time until then; None: nobody knows."""
        within_s = (until - self.now).total_seconds()
        found = self._of(region, model)
        if found is None or within_s <= 0:
            return None
        plan, line_s = found
        return batch_seconds(plan, self.now, within_s) / line_s / within_s

    def time_s(self, region: str, model: str, lines: int) -> float | None:
        """In how many seconds so many lines have had room, with a reserve; None: nobody knows."""
        found = self._of(region, model)
        return batch_time_s(found[0], self.now, lines * found[1] / RESERVE) if found else None

    def _of(self, region: str, model: str) -> tuple[PlacePlan, float] | None:
        place = (self.served.get(model, ""), region)
        plan, line_s = self.plans.get(place), self.line_s.get(place)
        return (plan, line_s) if plan is not None and plan.budget and line_s else None


def batch_budgets(now: datetime) -> BatchBudgets:
    """Of all models. One query where there is no plan, four where there is one."""
    plans = place_plans(now)
    if not plans:
        return BatchBudgets(now)
    names = {name for name, _ in plans}
    rows = list(Deployment.objects.filter(name__in=names).select_related("model_version"))
    return BatchBudgets(now, plans, served_names(rows), line_times(names))


def served_names(deployments: Iterable[Deployment]) -> dict[str, str]:
    """Name -> deployment: of its model, unless a deployment has that name itself."""
    rows = sorted(deployments, key=lambda row: row.name, reverse=True)
    return {row.model_version.model_id: row.name for row in rows} | {row.name: row.name for row in rows}


def line_times(deployments: Iterable[str]) -> dict[Place, float]:
    """Seconds that a request took in a place while none had to wait, where the autoscaler has seen that."""
    rows = ScalingState.objects.filter(place__deployment__in=list(deployments)).select_related("place")
    found = {(row.place.deployment_id, row.place.region_id): row.load.get("service_s") for row in rows}
    return {place: float(seconds) for place, seconds in found.items() if seconds}
