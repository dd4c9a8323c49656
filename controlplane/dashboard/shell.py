"""The parts of every page outside its content: navigation with the fleet's health in numbers, and the search, which
finds objects, pages and actions by a part of their name. `drain sim-70b` finds the action's form for each matching
object; text after a colon is the reason. A few of each kind are returned, shortest names first, so that an exact match
comes first. Reads only: one query for each kind of object, and a few for each of the first objects of an action."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from typing import Any
from urllib.parse import urlencode

from django.db.models import F, Q, QuerySet, Value
from django.db.models.functions import Concat, Length
from django.urls import URLPattern, get_resolver, reverse

from controlplane.dashboard.actions import Action
from controlplane.dashboard.fragments import Filter, Fragment, Page, PageRequest
from fleet.cells.models import Cell
from fleet.cells.pages.views import CELL_ACTIONS
from fleet.deployments.models import Deployment
from fleet.deployments.pages.views import SCALE
from fleet.faults.models import Incident
from fleet.faults.pages import INCIDENT_ACTIONS, FleetHealth, fleet_health
from fleet.machines.models import Machine
from fleet.machines.pages.views import MACHINE_ACTIONS
from fleet.nodes.models import Node
from fleet.nodes.pages import NODE_ACTIONS
from fleet.regions.models import Region
from fleet.requests.selectors import requests_named
from fleet.rollouts.models import Rollout
from fleet.rollouts.pages.views import ROLLOUT_ACTIONS
from kernel.access import Access
from kernel.tones import Tone
from models_registry.builds.models import EngineBuild
from models_registry.builds.pages import DELETE as DELETE_BUILD
from models_registry.imports.models import ModelImport
from models_registry.imports.pages import IMPORT_ACTIONS
from models_registry.instance_types.models import InstanceType
from models_registry.versions.models import Model, ModelVersion
from models_registry.versions.pages.views import VERSION_ACTIONS
from traffic.batches.models import Batch
from traffic.batches.pages import CANCEL
from traffic.batches.planning.batch import BATCH_TONE, BatchState
from traffic.keys.models import ApplicationKey
from traffic.keys.pages.views import KEY_ACTIONS
from traffic.keys.planner import KEY_TONE
from traffic.region_shares.pages.views import EVACUATE

EACH_SHOWN = 6
READ = slice(EACH_SHOWN + 1)
MAX_ID_DIGITS = 9
MAX_TEXT = 100


@dataclass(frozen=True, slots=True)
class Match:
    """One result; `state` "" if it has none. `fill`: the text that continues a search for an action, "" for others."""

    url: str
    name: str
    state: str = ""
    tone: str = Tone.IDLE.value
    why: str = ""
    fill: str = ""


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


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of object. `rows`: those that match a text, best first; `match`: its result, whose URL is of page `view`
    and the row's `key`. `actions`: those that the search offers."""

    title: str
    view: str
    rows: Callable[[str], "QuerySet[Any]"]
    match: Callable[[Any, datetime], tuple[str, ...]]
    actions: tuple[Action[Any], ...] = ()
    key: str = "pk"

    def found(self, text: str, now: datetime) -> Iterator[Match]:
        for row in self.rows(text)[READ]:
            yield Match(reverse(self.view, args=(getattr(row, self.key),)), *self.match(row, now))


def _by(model: type[Any], name: str, *others: str, related: tuple[str, ...] = ()) -> Callable[[str], "QuerySet[Any]"]:
    """Rows that have a text in one of these columns, those with the shortest `name` first."""

    def rows(text: str) -> "QuerySet[Any]":
        about = Q()
        for column in (name, *others):
            about |= Q(**{f"{column}__icontains": text})
        found: QuerySet[Any] = model.objects.filter(about).order_by(Length(name), name)
        return found.select_related(*related) if related else found

    return rows


def _versions(text: str) -> "QuerySet[ModelVersion]":
    named = ModelVersion.objects.annotate(name=Concat(F("model_id"), Value("@"), F("version")))
    return named.filter(name__icontains=text).order_by(Length("name"), "name")


def _rollouts(text: str) -> "QuerySet[Rollout]":
    return Rollout.objects.filter(
        Q(deployment__name__icontains=text) | Q(reason__icontains=text) | _has_number(text)
    ).order_by("-id")


def _incidents(text: str) -> "QuerySet[Incident]":
    about = Q(subject__icontains=text) | Q(summary__icontains=text) | Q(cell__icontains=text) | Q(node__icontains=text)
    return Incident.objects.filter(about | _has_number(text)).order_by("-state", "-id")


def _imports(text: str) -> "QuerySet[ModelImport]":
    return ModelImport.objects.filter(Q(source__icontains=text) | _has_number(text)).order_by("-id")


def _has_number(text: str) -> Q:
    return Q(pk=int(text)) if text.isascii() and text.isdigit() and len(text) <= MAX_ID_DIGITS else Q(pk__in=[])


def _batches(text: str) -> "QuerySet[Batch]":
    about = Q(id__startswith=text) | Q(tenant__icontains=text) | Q(lines_by_model__icontains=text)
    return Batch.objects.filter(about).order_by("-created_at", "-id")


def _keys(text: str) -> "QuerySet[ApplicationKey]":
    prefix = text.removeprefix("sw_").partition("_")[0]
    about = Q(name__icontains=text) | Q(tenant__icontains=text) | Q(prefix=prefix)
    return ApplicationKey.objects.filter(about).order_by(Length("name"), "name")


def _hardware(row: InstanceType) -> str:
    return f"{row.chips} x {row.accelerator}" if row.chips else "without accelerators"


def _key_match(row: ApplicationKey, now: datetime) -> tuple[str, ...]:
    state = row.state_at(now)
    return row.name, state, KEY_TONE[state], row.tenant


def _rollout_match(row: Rollout, now: datetime) -> tuple[str, ...]:
    name = f"Rollout {row.pk} of {row.deployment_id}"
    return name, row.get_state_display().lower(), row.tone, row.reason


OF_NODES = ("report", "member__cell", "region")
KINDS = (
    Kind("Cells", "cell", _by(Cell, "id"), lambda row, now: (row.pk, row.state, row.tone, row.reason), CELL_ACTIONS),
    Kind("Deployments", "deployment", _by(Deployment, "name"), lambda row, now: (row.pk,), (SCALE,)),
    Kind(
        "Nodes",
        "node",
        _by(Node, "id", related=OF_NODES),
        lambda row, now: (row.pk, row.state, row.tone, row.region_id),
        NODE_ACTIONS,
    ),
    Kind(
        "Machines",
        "machine",
        _by(Machine, "id", "provider_id", "address"),
        lambda row, now: (row.pk, row.state, row.tone, row.region_id),
        MACHINE_ACTIONS,
    ),
    Kind("Regions", "region", _by(Region, "name"), lambda row, now: (row.pk, "", "idle", row.provider), (EVACUATE,)),
    Kind("Models", "model", _by(Model, "name"), lambda row, now: (row.pk,)),
    Kind(
        "Versions",
        "version",
        _versions,
        lambda row, now: (row.reference, row.state, row.tone, row.engine),
        VERSION_ACTIONS,
        key="reference",
    ),
    Kind("Rollouts", "rollout", _rollouts, _rollout_match, ROLLOUT_ACTIONS),
    Kind(
        "Incidents",
        "incident",
        _incidents,
        lambda row, now: (row.summary, row.state, row.tone, row.kind),
        INCIDENT_ACTIONS,
    ),
    Kind(
        "Instance types",
        "instance-type",
        _by(InstanceType, "name"),
        lambda row, now: (row.name, row.origin, row.tone, _hardware(row)),
        key="name",
    ),
    Kind(
        "Engine builds",
        "engine-build",
        _by(EngineBuild, "name"),
        lambda row, now: (row.name,),
        (DELETE_BUILD,),
        key="name",
    ),
    Kind(
        "Imports",
        "import",
        _imports,
        lambda row, now: (row.source, row.get_state_display().lower(), row.tone, f"import {row.pk}"),
        IMPORT_ACTIONS,
    ),
    Kind("Keys", "key", _keys, _key_match, KEY_ACTIONS, key="prefix"),
    Kind(
        "Batches",
        "batch-page",
        _batches,
        lambda row, now: (row.pk, row.state, BATCH_TONE[BatchState(row.state)], f"{row.tenant}, {row.model_names}"),
        (CANCEL,),
    ),
)
FORMS = (
    ("Roll out a version", "rollout-new"),
    ("Create a key", "key-new"),
    ("New model", "model-new"),
    ("New schedule of batches", "batch-schedule-new"),
    ("Fix shares of traffic", "traffic-shares"),
)
"""Actions without an object, and the URLs of their pages."""


def search(*, text: str, now: datetime, access: Access) -> SearchResults:
    """Without a query for an empty text. Offers only actions that this user may take."""
    text = text[:MAX_TEXT]
    if not text:
        return SearchResults("", ())
    groups = (
        _group("Actions", chain(_acts(text, access), _verbs(text, access))),
        *(_group(kind.title, kind.found(text, now)) for kind in KINDS),
        _group("Requests", _requests(text)),
        _group("Pages", _pages(text, access)),
    )
    return SearchResults(text, tuple(group for group in groups if group.matches))


def _group(title: str, matches: Iterable[Match]) -> Group:
    hits = tuple(matches)
    return Group(title, hits[:EACH_SHOWN], len(hits) > EACH_SHOWN)


def _words(action: Action[Any]) -> tuple[str, ...]:
    return (action.label.lower(), action.name, *action.words)


def _acts(text: str, access: Access) -> Iterator[Match]:
    """The forms for a text such as `drain sim-70b: why`, possible ones first."""
    command, _, why = text.partition(":")
    offered = ((kind, action) for kind in KINDS for action in kind.actions)
    found = chain.from_iterable(_of_action(kind, action, command, why, access) for kind, action in offered)
    yield from sorted(found, key=lambda match: match.state != "")


def _of_action(kind: Kind, action: Action[Any], command: str, why: str, access: Access) -> Iterator[Match]:
    starts = (word for word in _words(action) if command.lower().startswith(f"{word} "))
    name = next((command[len(word) :].strip() for word in starts), "")
    if not name:
        return
    for row in kind.rows(name)[READ]:
        item = action.menu_item(row, access)
        if item.is_denied:
            continue
        label = f"{action.label} {action.target.name(row)}"
        if item.why_not:
            yield Match(action.target.url(row), label, "not now", Tone.IDLE.value, item.why_not)
        else:
            query = f"?{urlencode({'why': why.strip()})}" if why.strip() else ""
            yield Match(f"{item.url}{query}", label, why=f"{action.target.noun}, shows the effect first")


def _verbs(text: str, access: Access) -> Iterator[Match]:
    """The names of actions that begin with the text; a name of an object is to follow."""
    nouns: dict[str, list[str]] = {}
    for action in (action for kind in KINDS for action in kind.actions):
        if _may_any(access, action) and any(word.startswith(text.lower()) for word in _words(action)):
            nouns.setdefault(action.label, []).append(action.target.noun)
    for label, targets in sorted(nouns.items(), key=lambda pair: len(pair[0])):
        fill = f"{label.lower()} "
        url = f"{reverse('search')}?{urlencode({'q': fill})}"
        yield Match(url, f"{label} …", why=f"then the name of a {' or '.join(dict.fromkeys(targets))}", fill=fill)
    for title, view in FORMS:
        if access.operate and text.lower() in title.lower():
            yield Match(reverse(view), title)


def _may_any(access: Access, action: Action[Any]) -> bool:
    """Whether the user may take an action on all objects or, by a grant, on some."""
    return access.may(action.role) or any(access.may(action.role, name) for name in access.grants)


def _requests(text: str) -> Iterator[Match]:
    """Sampled requests by the beginning of their id."""
    for row in requests_named(text)[READ]:
        url = f"{reverse('requests')}?{urlencode({'q': row.request})}"
        yield Match(
            url, row.request, row.outcome, row.tone.value, f"{row.cell or row.ingress}, {row.tenant or 'no tenant'}"
        )


def _pages(text: str, access: Access) -> Iterator[Match]:
    for route in get_resolver("controlplane.dashboard.urls").url_patterns:
        if not isinstance(route, URLPattern):
            continue
        page: Page | None = getattr(route.callback, "page", None)
        if page is not None and page.title and text.lower() in page.title.lower() and access.may(page.role):
            yield Match(reverse(str(route.name)), page.title)


def health(request: PageRequest) -> FleetHealth:
    return fleet_health()


def _results(request: PageRequest) -> SearchResults:
    return search(text=request.text("q"), now=request.now, access=request.caller.access)


def _filter(request: PageRequest) -> Filter:
    return Filter(text_label="Name, page or action", text_name="q", text=request.text("q"))


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
