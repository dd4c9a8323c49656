"""What admins allow engines beyond the lists of `engine_agent.protocol.engine_options`."""

from collections.abc import Mapping, Sequence

from models_registry.models import EngineAllowance


def engine_allowances() -> Mapping[str, Sequence[str]]:
    """Engine -> names of options and variables, in a fixed order. One query."""
    allowed: dict[str, list[str]] = {}
    for engine, name in EngineAllowance.objects.order_by("engine", "name").values_list("engine", "name"):
        allowed.setdefault(engine, []).append(name)
    return allowed
