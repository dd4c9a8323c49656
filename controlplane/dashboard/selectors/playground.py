"""What the playground offers: deployments with cells that answer, and regions with an ingress to ask through."""

from dataclasses import dataclass

from django.db.models import Count, Q

from fleet.models import Deployment
from fleet.planning.states import CellState
from traffic.selectors.async_request import ingress_addresses_by_region
from traffic.selectors.key import key_standing


@dataclass(frozen=True, slots=True)
class Offer:
    name: str
    ready: int


@dataclass(frozen=True, slots=True)
class Playground:
    """`chosen`: the deployment that the address of the page names, else the first with a ready cell."""

    deployments: tuple[Offer, ...]
    regions: tuple[str, ...]
    keys_required: bool
    chosen: str


def playground(chosen: str) -> Playground:
    """In three queries."""
    ready = Count("cells", filter=Q(cells__state=CellState.READY.value))
    rows = Deployment.objects.annotate(ready=ready).order_by("name").values_list("name", "ready")
    offers = tuple(Offer(name, count) for name, count in rows)
    first = next((offer.name for offer in offers if offer.ready), "")
    return Playground(
        deployments=offers,
        regions=tuple(sorted(ingress_addresses_by_region())),
        keys_required=key_standing().required,
        chosen=chosen or first,
    )
