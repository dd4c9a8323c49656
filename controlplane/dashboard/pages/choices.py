"""The lists that filters offer.

An unknown value in the URL stays selectable, so that a filter never lies about what it filters.
"""

from collections.abc import Iterable
from enum import StrEnum

from controlplane.dashboard.fragments import Asked, Choice
from fleet.models import Deployment, Region


def choose(asked: Asked, name: str, every: str, values: Iterable[str]) -> Choice:
    """A choice among `values`, of which "" (labelled `every`) means no restriction."""
    chosen = asked.word(name)
    known = list(values)
    if chosen and chosen not in known:
        known.append(chosen)
    options = (("", every), *((value, value.replace("_", " ")) for value in known))
    return Choice(name=name, label=name, options=options, chosen=chosen)


def choose_region(asked: Asked) -> Choice:
    return choose(asked, "region", "every region", Region.objects.values_list("name", flat=True))


def choose_deployment(asked: Asked) -> Choice:
    return choose(asked, "deployment", "every deployment", Deployment.objects.values_list("name", flat=True))


def choose_state(asked: Asked, states: type[StrEnum], every: str) -> Choice:
    return choose(asked, "state", every, (state.value for state in states))
