"""Choices of filters. An unknown value in the URL stays selectable, so that a filter always shows its current value."""

from collections.abc import Iterable
from enum import StrEnum

from controlplane.dashboard.fragments import Choice, PageRequest
from fleet.deployments.models import Deployment
from fleet.regions.models import Region


def choose(request: PageRequest, name: str, every: str, values: Iterable[str]) -> Choice:
    """A choice among `values`, where "" (labelled `every`) means no filter."""
    chosen = request.text(name)
    known = list(values)
    if chosen and chosen not in known:
        known.append(chosen)
    options = (("", every), *((value, value.replace("_", " ")) for value in known))
    return choose_labelled(request, name, options)


def choose_labelled(request: PageRequest, name: str, options: Iterable[tuple[str, str]]) -> Choice:
    """A choice among (value, label) pairs; the URL's value is selected."""
    return Choice(name=name, label=name, options=tuple(options), chosen=request.text(name))


def choose_region(request: PageRequest) -> Choice:
    return choose(request, "region", "every region", Region.objects.values_list("name", flat=True))


def choose_deployment(request: PageRequest) -> Choice:
    return choose(request, "deployment", "every deployment", Deployment.objects.values_list("name", flat=True))


def choose_state(request: PageRequest, states: type[StrEnum], every: str) -> Choice:
    return choose(request, "state", every, (state.value for state in states))
