"""The form in which an operator fixes shares: a field for each serving region, at first with what holds now."""

from collections.abc import Mapping
from dataclasses import dataclass

from fleet.models import Deployment
from traffic.models import TrafficMatrix
from traffic.selectors.async_request import ingress_addresses_by_region


@dataclass(frozen=True, slots=True)
class ShareField:
    """`percent` as text: what somebody wrote stands there again, right or wrong."""

    region: str
    percent: str


@dataclass(frozen=True, slots=True)
class SharesForm:
    """`deployment` and `origin`: those asked for, or the first there are. Without fields there is nothing to fix."""

    deployment: str
    origin: str
    deployments: tuple[str, ...]
    origins: tuple[str, ...]
    fields: tuple[ShareField, ...]


def shares_form(deployment: str, origin: str, percents: Mapping[str, str]) -> SharesForm:
    """In three queries. Names that do not exist stay, so that the refusal can name them."""
    deployments = tuple(Deployment.objects.order_by("name").values_list("name", flat=True))
    regions = tuple(sorted(ingress_addresses_by_region()))
    deployment = deployment or next(iter(deployments), "")
    origin = origin or next(iter(regions), "")
    now = _percents_now(deployment, origin)
    fields = tuple(ShareField(region, percents.get(region, now.get(region, "0"))) for region in regions)
    return SharesForm(deployment, origin, deployments, regions, fields if deployments else ())


def _percents_now(deployment: str, origin: str) -> dict[str, str]:
    """Whole per cents that sum to 100, so that the form can be sent as it is."""
    row = TrafficMatrix.objects.filter(deployment_id=deployment).first()
    shares: dict[str, float] = (row.shares.get(origin) if row else None) or {origin: 1.0}
    whole = {region: round(100 * share) for region, share in shares.items()}
    largest = max(whole, key=lambda region: whole[region])
    whole[largest] += 100 - sum(whole.values())
    return {region: str(percent) for region, percent in whole.items()}
