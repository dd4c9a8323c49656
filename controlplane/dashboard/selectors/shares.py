"""Who gets machines when they are short: a deployment's own part of it, and the quotas of teams."""

from dataclasses import dataclass

from fleet.models import Deployment, DeploymentRegion
from fleet.planning.claims import GrantRule
from fleet.selectors.quota import QuotaUse, quota_uses
from kernel.tones import Tone


@dataclass(frozen=True, slots=True)
class LimitedPlace:
    """A region in which it may have fewer cells than were set, or had a while ago."""

    place: DeploymentRegion

    @property
    def tone(self) -> Tone:
        is_limited = self.place.cells_in_force < self.place.cells
        return Tone.WARN if is_limited and self.place.grant_rule != GrantRule.RETURN else Tone.MOVING


@dataclass(frozen=True, slots=True)
class Shares:
    """What a page shows of one deployment."""

    deployment: str
    team: str
    priority: int
    is_class_priority: bool
    preemptible: bool
    preempts: str
    places: tuple[LimitedPlace, ...]


@dataclass(frozen=True, slots=True)
class QuotaTable:
    rows: tuple[QuotaUse, ...]


def shares_of(deployment: Deployment) -> Shares:
    policy = deployment.sharing()
    limited = DeploymentRegion.objects.filter(deployment=deployment, cells_granted__isnull=False)
    return Shares(
        deployment=deployment.name,
        team=deployment.team,
        priority=policy.priority or 0,
        is_class_priority=deployment.priority is None,
        preemptible=bool(policy.preemptible),
        preempts=policy.preempts.value,
        places=tuple(LimitedPlace(place) for place in limited.order_by("region_id")),
    )


def quota_table() -> QuotaTable:
    """Every team's quota of every type, in four queries."""
    return QuotaTable(tuple(quota_uses()))
