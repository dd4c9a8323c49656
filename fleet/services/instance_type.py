"""Instance types, as requests name them."""

from collections.abc import Sequence

from fleet.models import InstanceType
from kernel.refusals import InvalidInput


def instance_type_named(name: str) -> InstanceType:
    """The instance type that a request names.

    Raises:
        InvalidInput: there is none; it says which there are.
    """
    kind = InstanceType.objects.filter(name=name).first()
    if kind is None:
        raise _unknown(name, "instance_type")
    return kind


def instance_types_named(names: Sequence[str]) -> list[InstanceType]:
    """The instance types that a request lists, in its order.

    Raises:
        InvalidInput: none, one twice, or one that there is not.
    """
    if not names or len(set(names)) < len(names):
        message = "names one twice" if names else "names none; name the ones that its cells may be on, the first first"
        raise InvalidInput(field="instance_types", rule="list", message=message)
    found = {kind.name: kind for kind in InstanceType.objects.filter(name__in=names)}
    if missing := [name for name in names if name not in found]:
        raise _unknown(missing[0], "instance_types")
    return [found[name] for name in names]


def _unknown(name: str, field: str) -> InvalidInput:
    there = ", ".join(InstanceType.objects.values_list("name", flat=True)) or "none"
    return InvalidInput(field=field, rule="exists", message=f"there is no instance type {name!r}; there are: {there}")
