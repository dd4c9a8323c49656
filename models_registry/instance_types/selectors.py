"""Reads instance types, and who uses one. The fleet registers its uses at start, because the registry never imports the
fleet; without them no type counts as unused. Never writes."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from django.db.models import Q

from models_registry.instance_types.models import InstanceType
from models_registry.instance_types.planner import INSTANCE_TYPES, InstanceShape
from models_registry.versions.models import ModelVersion
from models_registry.versions.planning.lifecycle import VersionState

NAMED_MOST = 8
TypeUses = Callable[[str], list[str]]
"""Name of a type -> its users in the fleet (`deployment smollm2`); empty if there are none."""


@dataclass
class _Registered:
    uses: TypeUses | None = None


_fleet = _Registered()


def register_type_uses(uses: TypeUses) -> None:
    """Called once, when the fleet's app is ready."""
    _fleet.uses = uses


def instance_shapes(names: Collection[str] | None = None) -> dict[str, InstanceShape]:
    """All known types, or those named, by name: rows, and shipped types that have none yet. One query."""
    rows = InstanceType.objects.all() if names is None else InstanceType.objects.filter(name__in=names)
    shipped = {name: shape for name, shape in INSTANCE_TYPES.items() if names is None or name in names}
    return {**shipped, **{row.name: row.shape() for row in rows}}


def instance_type_names() -> list[str]:
    """The names of all known types, in order."""
    return sorted({*INSTANCE_TYPES, *InstanceType.objects.values_list("name", flat=True)})


def types_of_versions() -> set[str]:
    """The types that versions name, except retired versions."""
    versions = ModelVersion.objects.exclude(state=VersionState.RETIRED.value)
    return {kind for named in versions.values_list("parallelism", flat=True) for kind in named}


def type_uses(name: str) -> list[str]:
    """Users of a type, as operators name them. Raises LookupError if no fleet has registered."""
    if _fleet.uses is None:
        raise LookupError("no fleet has registered the users of instance types")
    versions = ModelVersion.objects.exclude(state=VersionState.RETIRED.value).filter(Q(parallelism__has_key=name))
    return [f"version {version.reference}" for version in versions.order_by("id")] + _fleet.uses(name)


def uses_text(uses: list[str]) -> str:
    more = len(uses) - NAMED_MOST
    return ", ".join(uses[:NAMED_MOST]) + (f" and {more} more" if more > 0 else "")
