"""Instance types, as requests name them."""

from fleet.models import InstanceType
from kernel.refusals import InvalidInput


def instance_type_named(name: str) -> InstanceType:
    """The instance type that a request names.

    Raises:
        InvalidInput: there is none; it says which there are.
    """
    kind = InstanceType.objects.filter(name=name).first()
    if kind is None:
        there = ", ".join(InstanceType.objects.values_list("name", flat=True)) or "none"
        message = f"there is no instance type {name!r}; there are: {there}"
        raise InvalidInput(field="instance_type", rule="exists", message=message)
    return kind
