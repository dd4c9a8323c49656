"""The page of one model version, and its difference to another."""

from django.http import Http404

from controlplane.dashboard.fragments import Asked, Fragment, Page
from controlplane.dashboard.selectors.events import EventList, version_events
from controlplane.dashboard.selectors.version_measures import Measured, version_measures
from controlplane.dashboard.selectors.versions import (
    CellOfVersion,
    DiffPage,
    VersionPage,
    VersionRuns,
    version_cells,
    version_diff,
    version_find,
    version_page,
    version_runs,
)
from models_registry.models import ModelVersion

EVENTS_OF_ONE_VERSION = 30


def _found(asked: Asked) -> ModelVersion:
    version = version_find(asked.key)
    if version is None:
        raise Http404(f"There is no model version {asked.key!r}.")
    return version


def _version(asked: Asked) -> VersionPage:
    return version_page(asked.once(_found))


def _cells(asked: Asked) -> tuple[CellOfVersion, ...]:
    return version_cells(asked.once(_found))


def _prompts(asked: Asked) -> ModelVersion:
    return asked.once(_found)


def _runs(asked: Asked) -> VersionRuns:
    return version_runs(asked.once(_found))


def _measured(asked: Asked) -> tuple[Measured, ...]:
    return version_measures(asked.once(_found), asked.now)


def _events(asked: Asked) -> EventList:
    return version_events(asked.once(_found).reference, EVENTS_OF_ONE_VERSION)


def _diff(asked: Asked) -> DiffPage:
    page = version_diff(asked.once(_found), asked.word("against"))
    if page.against and page.diff is None:
        raise Http404(f"There is no model version {page.against!r}.")
    return page


OWN = ("models:{key}",)

VERSION = Page(
    section="models",
    title="",
    fragments=(
        Fragment("version", "", (*OWN, "deployments"), "dashboard/models/version.html", _version),
        Fragment("version-proof", "What was proven", OWN, "dashboard/models/proof.html", _version),
        Fragment("version-asks", "Ask", (*OWN, "deployments"), "dashboard/models/asks.html", _version),
        Fragment("version-runs", "Where it runs", ("cells", "rollouts"), "dashboard/models/runs.html", _runs),
        Fragment("version-measured", "Measured, last hour", ("load",), "dashboard/models/measured.html", _measured),
        Fragment("version-cells", "A cell of it", OWN, "dashboard/models/cells.html", _cells),
        Fragment("version-prompts", "Golden prompts", OWN, "dashboard/models/prompts.html", _prompts),
        Fragment("version-said", "Configuration", OWN, "dashboard/models/said.html", _version),
        Fragment("version-events", "Events", ("events",), "dashboard/models/events.html", _events),
    ),
)

VERSION_DIFF = Page(
    section="models",
    title="",
    fragments=(Fragment("version-diff", "", OWN, "dashboard/models/diff.html", _diff),),
)
