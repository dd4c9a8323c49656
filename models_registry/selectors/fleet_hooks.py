"""What only the fleet knows of versions: which instance types there are, and what uses a version. The fleet registers
both.

The registry lies below the fleet and imports nothing of it. Without a registered fleet every call is an error,
never "not in use"."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from models_registry.planning.instance_types import InstanceShape

Uses = Callable[[int], list[str]]
"""Id of a version -> what uses it, as operators name it (`deployment smollm2`); empty if nothing does."""
InstanceShapes = Callable[[], Mapping[str, InstanceShape]]


@dataclass
class _Registered:
    uses: Uses | None = None
    shapes: InstanceShapes | None = None


_fleet = _Registered()


def register_fleet_hooks(*, uses: Uses, shapes: InstanceShapes) -> None:
    """Called once, when the fleet's app is ready."""
    _fleet.uses, _fleet.shapes = uses, shapes


def version_uses(version_id: int) -> list[str]:
    """What uses a version, as operators name it.

    Raises:
        LookupError: no fleet has registered.
    """
    if _fleet.uses is None:
        raise LookupError("no fleet has registered who uses model versions")
    return _fleet.uses(version_id)


def instance_shapes() -> Mapping[str, InstanceShape]:
    """The instance types that there are, by name.

    Raises:
        LookupError: no fleet has registered.
    """
    if _fleet.shapes is None:
        raise LookupError("no fleet has registered its instance types")
    return _fleet.shapes()
