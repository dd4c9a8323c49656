"""Reads quotas with the use of their teams: machines in cells, machines for all target cells, borrowed and idle ones. A
constant number of queries."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from django.db.models import Count

from fleet.cells.models import CellMember
from fleet.deployments.models import Deployment
from fleet.quotas.models import Quota
from models_registry.versions.planning.engine_arguments import nodes_per_cell
from models_registry.versions.planning.spec import InvalidVersion

Owner = tuple[str, str, str]
"""(team, instance type, region); region "" is the total."""


QUOTA_STATES = ("within", "borrows", "limited")


@dataclass(frozen=True, slots=True)
class QuotaUse:
    """Machines: `used` in cells of the team's deployments, `wanted` for all their target cells. `withheld`: target
    cells that are not allowed now."""

    quota: Quota
    used: int
    wanted: int
    withheld: int
    deployments: tuple[str, ...]

    @property
    def state(self) -> str:
        return "limited" if self.withheld else "borrows" if self.borrowed else "within"

    @property
    def borrowed(self) -> int:
        return max(0, self.used - self.quota.machines)

    @property
    def idle(self) -> int:
        """Unused machines of the quota, which others may borrow."""
        return max(0, self.quota.machines - self.used)


def quota_uses() -> list[QuotaUse]:
    rows = list(Quota.objects.order_by("instance_type_id", "team", "name"))
    uses = quota_uses_of({owner_of(row) for row in rows}) if rows else {}
    return [uses_of(row, uses) for row in rows]


def owner_of(row: Quota) -> Owner:
    return row.team, row.instance_type_id, row.region_id or ""


def uses_of(row: Quota, uses: Mapping[Owner, "OwnerUse"]) -> QuotaUse:
    use = uses.get(owner_of(row), OwnerUse())
    return QuotaUse(row, use.used, use.wanted, use.withheld, use.deployments)


@dataclass(frozen=True, slots=True)
class OwnerUse:
    """Use of a type by a team's deployments; see `QuotaUse`."""

    used: int = 0
    wanted: int = 0
    withheld: int = 0
    deployments: tuple[str, ...] = ()


def quota_uses_of(owners: set[Owner]) -> dict[Owner, OwnerUse]:
    """By team, type and region, in three queries."""
    rows = Deployment.objects.filter(team__in={team for team, _, _ in owners})
    used: Counter[tuple[str, str, str]] = Counter()
    members = CellMember.objects.order_by().filter(cell__deployment__in=rows)
    columns = ("cell__deployment", "cell__region", "cell__instance_type")
    for counted in members.values(*columns).annotate(count=Count("id")):
        used[tuple(counted[column] for column in columns)] = counted["count"]
    wanted: Counter[Owner] = Counter()
    withheld: Counter[Owner] = Counter()
    names: dict[Owner, list[str]] = defaultdict(list)
    in_use: Counter[Owner] = Counter()
    for row in rows.select_related("model_version").prefetch_related("regions").order_by("name"):
        sizes = {kind: _cell_size(row, kind) for kind in row.instance_types}
        places = {place.region_id: place for place in row.regions.all()}
        for region in sorted({*places, *(at for name, at, _ in used if name == row.name)}):
            place = places.get(region)
            there = {kind: used[row.name, region, kind] // size for kind, size in sizes.items()}
            for kind, size in sizes.items():
                # Future cells count for the preferred type.
                is_first, others = kind == row.instance_types[0], sum(there.values()) - there[kind]
                for owner in ((row.team, kind, ""), (row.team, kind, region)):
                    names[owner] += [] if row.name in names[owner] else [row.name]
                    in_use[owner] += used[row.name, region, kind]
                    if place is not None:
                        wanted[owner] += size * (max(0, place.cells - others) if is_first else there[kind])
                        withheld[owner] += is_first * (place.cells - place.cells_in_force)
    return {
        owner: OwnerUse(in_use[owner], wanted[owner], withheld[owner], tuple(of_owner))
        for owner, of_owner in names.items()
    }


def _cell_size(row: Deployment, instance_type: str) -> int:
    """Machines per cell; 1 if its version is unreadable, which its deployment reports."""
    try:
        return nodes_per_cell(row.model_version.spec(), instance_type)
    except InvalidVersion:
        return 1
