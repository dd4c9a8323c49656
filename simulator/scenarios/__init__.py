"""The scenarios, one module each: its name is the scenario's, its `SCENARIO` says what happens."""

from importlib import import_module
from pkgutil import iter_modules

from simulator.scenario import Scenario


class UnknownScenario(ValueError):
    """No scenario has this name; the text names those that there are."""


def scenario_names() -> tuple[str, ...]:
    """All scenarios, by name."""
    return tuple(sorted(module.name for module in iter_modules(__path__)))


def scenario_named(name: str) -> Scenario:
    """Load a scenario.

    Raises:
        UnknownScenario: there is none of this name.
    """
    if name not in scenario_names():
        raise UnknownScenario(f"there is no scenario {name!r}; there are: {', '.join(scenario_names())}")
    found: Scenario = import_module(f"{__name__}.{name}").SCENARIO
    return found
