"""The scenarios: each module declares some in its table `SCENARIOS`, by the names that `make simulate S=…` takes."""

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from simulator.scenario import Scenario


class UnknownScenario(ValueError):
    """No scenario has this name; the text lists the names."""


def scenario_names() -> tuple[str, ...]:
    return tuple(sorted(_registry()))


def scenario_named(name: str) -> Scenario:
    if name not in _registry():
        raise UnknownScenario(f"there is no scenario {name!r}; there are: {', '.join(scenario_names())}")
    return _registry()[name]


@cache
def _registry() -> dict[str, Scenario]:
    registry: dict[str, Scenario] = {}
    for module in iter_modules(__path__):
        registry |= import_module(f"{__name__}.{module.name}").SCENARIOS
    return registry
