"""What only the fleet knows of versions: which machines there are, and what uses a version. The fleet registers both.

The registry lies below the fleet and imports nothing of it. Without a registered fleet every call is an error,
never "not in use"."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from models_registry.planning.instance_types import InstanceShape

Uses = Callable[[int], list[str]]
"""Id of a version -> what uses it, as operators name it (`deployment smollm2`); empty if nothing does."""
Machines = Callable[[], Mapping[str, InstanceShape]]


@dataclass
class _Registered:
    uses: Uses | None = None
    machines: Machines | None = None


_fleet = _Registered()


def register_fleet_hooks(*, uses: Uses, machines: Machines) -> None:
    """Called once, when the fleet's app is ready."""
    _fleet.uses, _fleet.machines = uses, machines


def version_uses(version_id: int) -> list[str]:
    """What uses a version, as operators name it.

    Raises:
        LookupError: no fleet has registered.
    """
    if _fleet.uses is None:
        raise LookupError("no fleet has registered who uses model versions")
    return _fleet.uses(version_id)


def machines_known() -> Mapping[str, InstanceShape]:
    """The instance types that there are, by name.

    Raises:
        LookupError: no fleet has registered.
    """
    if _fleet.machines is None:
        raise LookupError("no fleet has registered its instance types")
    return _fleet.machines()
