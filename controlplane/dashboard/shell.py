"""The parts of every page outside its content: navigation with the fleet's health in numbers, and search by name for
cells, nodes, deployments, versions, rollouts, incidents, instance types and keys. Search returns a few of each kind,
shortest names first, so that an exact match comes first. Reads only, in a constant number of queries."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime

from django.db.models import F, Q, Value
from django.db.models.functions import Concat, Length

from controlplane.dashboard.fragments import Filter, Fragment, Page, PageRequest
from fleet.cells.models import Cell
from fleet.deployments.models import Deployment
from fleet.faults.models import Incident
from fleet.faults.pages import FleetHealth, fleet_health
from fleet.nodes.models import Node
from fleet.rollouts.models import Rollout
from kernel.tones import Tone
from models_registry.instance_types.models import InstanceType
from models_registry.versions.models import ModelVersion
from traffic.keys.models import ApplicationKey
from traffic.keys.planner import KEY_TONE

EACH_SHOWN = 6
READ = slice(EACH_SHOWN + 1)
MAX_ID_DIGITS = 9
MAX_TEXT = 100


@dataclass(frozen=True, slots=True)
class Match:
    """One result: `view` and `key` make its URL; `state` "" if it has none."""

    view: str
    key: str
    name: str
    state: str = ""
    tone: str = Tone.IDLE.value
    why: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """Results of one kind; `more`: there are more than shown."""

    title: str
    matches: tuple[Match, ...]
    more: bool


@dataclass(frozen=True, slots=True)
class SearchResults:
    text: str
    groups: tuple[Group, ...]


def search(*, text: str, now: datetime) -> SearchResults:
    """One query for each kind; none for an empty text."""
    text = text[:MAX_TEXT]
    if not text:
        return SearchResults("", ())
    groups = (
        _group("Cells", _cells(text)),
        _group("Deployments", _deployments(text)),
        _group("Nodes", _nodes(text)),
        _group("Versions", _versions(text)),
        _group("Rollouts", _rollouts(text)),
        _group("Incidents", _incidents(text)),
        _group("Instance types", _instance_types(text)),
        _group("Keys", _keys(text, now)),
    )
    return SearchResults(text, tuple(group for group in groups if group.matches))


def _group(title: str, matches: Iterable[Match]) -> Group:
    hits = tuple(matches)
    return Group(title, hits[:EACH_SHOWN], len(hits) > EACH_SHOWN)


def _cells(text: str) -> Iterator[Match]:
    for cell in Cell.objects.filter(id__icontains=text).order_by(Length("id"), "id")[READ]:
        yield Match("cell", cell.pk, cell.pk, cell.state, cell.tone, cell.reason)


def _deployments(text: str) -> Iterator[Match]:
    for row in Deployment.objects.filter(name__icontains=text).order_by(Length("name"), "name")[READ]:
        yield Match("deployment", row.name, row.name)


def _nodes(text: str) -> Iterator[Match]:
    for node in Node.objects.filter(id__icontains=text).order_by(Length("id"), "id")[READ]:
        yield Match("node", node.pk, node.pk, node.state, node.tone, node.region_id)


def _versions(text: str) -> Iterator[Match]:
    named = ModelVersion.objects.annotate(name=Concat(F("model_id"), Value("@"), F("version")))
    for row in named.filter(name__icontains=text).order_by(Length("name"), "name")[READ]:
        yield Match("version", row.reference, row.reference, row.state, row.tone, row.engine)


def _rollouts(text: str) -> Iterator[Match]:
    about = Q(deployment__name__icontains=text) | Q(reason__icontains=text)
    if text.isdecimal() and len(text) <= MAX_ID_DIGITS:
        about |= Q(pk=int(text))
    for row in Rollout.objects.filter(about).order_by("-id")[READ]:
        name = f"Rollout {row.pk} of {row.deployment_id}"
        yield Match("rollout", str(row.pk), name, row.get_state_display().lower(), row.tone, row.reason)


def _incidents(text: str) -> Iterator[Match]:
    about = Q(subject__icontains=text) | Q(summary__icontains=text) | Q(cell__icontains=text) | Q(node__icontains=text)
    for row in Incident.objects.filter(about).order_by("-state", "-id")[READ]:
        yield Match("incident", str(row.pk), row.summary, row.state, row.tone, row.kind)


def _instance_types(text: str) -> Iterator[Match]:
    about = Q(name__icontains=text) | Q(accelerator__icontains=text)
    for row in InstanceType.objects.filter(about).order_by(Length("name"), "name")[READ]:
        hardware = f"{row.chips} x {row.accelerator}" if row.chips else "without accelerators"
        yield Match("instance-type", row.name, row.name, row.origin, row.tone, hardware)


def _keys(text: str, now: datetime) -> Iterator[Match]:
    prefix = text.removeprefix("sw_").partition("_")[0]
    about = Q(name__icontains=text) | Q(tenant__icontains=text) | Q(prefix=prefix)
    for row in ApplicationKey.objects.filter(about).order_by(Length("name"), "name")[READ]:
        state = row.state_at(now)
        yield Match("key", row.prefix, row.name, state, KEY_TONE[state], row.tenant)


def health(request: PageRequest) -> FleetHealth:
    return fleet_health()


def _results(request: PageRequest) -> SearchResults:
    return search(text=request.text("q"), now=request.now)


def _filter(request: PageRequest) -> Filter:
    return Filter(text_label="Name", text_name="q", text=request.text("q"))


SHELL = Fragment(
    name="navigation",
    title="",
    topics=("incidents", "cells", "nodes", "approvals"),
    template="dashboard/parts/navigation.html",
    load=health,
)
SEARCH = Page(
    section="search",
    title="Search",
    # Without topics: results must not move under the pointer.
    fragments=(Fragment("search-results", "", (), "dashboard/search/results.html", _results),),
    narrow=_filter,
)
