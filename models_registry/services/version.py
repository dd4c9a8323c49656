"""Registers model versions: nothing gets into the registry that could not be served as it says."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from models_registry.models import Model, ModelVersion
from models_registry.planning.engine_arguments import render_version
from models_registry.planning.instance_types import InstanceShape
from models_registry.planning.versions import InvalidVersion


def version_register(
    *, model: Model, version: str, machines: Mapping[str, InstanceShape], now: datetime, **columns: Any
) -> ModelVersion:
    """Store a version after rendering it for every instance type that it names.

    Args:
        model: what it is a version of.
        version: its name, which the model does not have yet.
        machines: the instance types that there are, by name.
        now: when it is made.
        columns: the other columns of `ModelVersion`.

    Raises:
        InvalidVersion: it names no instance type, or one that there is not, or cannot be rendered for one; the text
            names field, value and rule.
    """
    made = ModelVersion(model=model, version=version, created_at=now, **columns)
    spec = made.spec()
    if not spec.parallelism:
        raise InvalidVersion(f"{spec.reference}: parallelism is empty; it must name an instance type")
    for name in spec.parallelism:
        if name not in machines:
            raise InvalidVersion(
                f"{spec.reference}: parallelism names instance type {name!r}; there are {', '.join(sorted(machines))}"
            )
        render_version(spec, machines[name])
    made.save(force_insert=True)
    return made
