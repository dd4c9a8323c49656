"""Pages: the list of model versions, a model, a version with its actions, and the diff of two. Decides nothing."""

from datetime import datetime
from functools import partial

from django.http import Http404, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse

from controlplane.dashboard.actions import (
    REQUIRED_WHY,
    Action,
    ActionMenu,
    Submission,
    Target,
    action_menu,
    action_view,
)
from controlplane.dashboard.events import EventList, version_events
from controlplane.dashboard.fragments import Filter, Fragment, Page, PageRequest, found_or_404
from models_registry.benchmarks.pages.data import BenchmarksView, SearchesView, model_benchmarks, model_searches
from models_registry.builds.pages import BUILD_LIST, BUILDS
from models_registry.compile_caches.pages import CACHE_LIST
from models_registry.instance_types.selectors import instance_shapes
from models_registry.speculation.pages import AcceptedRow, SpeculationView, version_accepted, version_speculation
from models_registry.versions.models import ModelVersion
from models_registry.versions.pages.data import (
    MEASURED_LIST,
    MODEL_VERSION_LIST,
    VERSION_LIST,
    CellOfVersion,
    DiffPage,
    ModelPage,
    VersionPage,
    VersionRuns,
    model_find,
    version_cells,
    version_diff,
    version_find,
    version_page,
    version_runs,
)
from models_registry.versions.planning.lifecycle import ValidationState, VersionState
from models_registry.versions.selectors import VersionMemory, version_memory, version_uses
from models_registry.versions.services.drafts import draft_delete, version_release, version_retire
from models_registry.versions.services.validation import validation_start

EVENTS_OF_ONE_VERSION = 30
EFFECTS: dict[str, str] = {
    "validate": (
        "Its artifacts are read and compared with their digests, which can take minutes. If all match, the "
        "version is validated and can no longer be edited."
    ),
    "release": "It can be rolled out. No cell changes until a rollout.",
    "retire": "It can never be rolled out again. This cannot be undone.",
    "delete": "The draft and its validations are deleted. This cannot be undone.",
}


def _filter(request: PageRequest) -> Filter:
    return Filter(text_label="Find by model, version or engine", text_name="q", text=request.text("q"))


def _model(request: PageRequest) -> ModelPage:
    return found_or_404(model_find(request.key), f"model {request.key!r}")


def _benchmarks(request: PageRequest) -> BenchmarksView:
    return model_benchmarks(request.key, request.text("use"))


def _searches(request: PageRequest) -> SearchesView:
    return model_searches(request.key)


def _version_of(request: PageRequest) -> ModelVersion:
    return found_or_404(version_find(request.key), f"model version {request.key!r}")


def _version(request: PageRequest) -> VersionPage:
    return version_page(request.once(_version_of), values=request.caller.access.operate)


def _cells(request: PageRequest) -> tuple[CellOfVersion, ...]:
    return version_cells(request.once(_version_of))


def _memory(request: PageRequest) -> VersionMemory:
    return version_memory(request.once(_version_of), instance_shapes())


def _golden_prompts(request: PageRequest) -> ModelVersion:
    return request.once(_version_of)


def _runs(request: PageRequest) -> VersionRuns:
    return version_runs(request.once(_version_of))


def _speculation(request: PageRequest) -> SpeculationView:
    return version_speculation(request.once(_version_of))


def _accepted(request: PageRequest) -> tuple[AcceptedRow, ...]:
    return version_accepted(request.once(_version_of), request.now)


def _events(request: PageRequest) -> EventList:
    return version_events(request.once(_version_of).reference, EVENTS_OF_ONE_VERSION)


def _diff(request: PageRequest) -> DiffPage:
    page = version_diff(request.once(_version_of), request.text("against"), values=request.caller.access.operate)
    if page.against and page.diff is None:
        raise Http404(f"There is no model version {page.against!r}.")
    return page


def _actions(request: PageRequest) -> ActionMenu:
    return action_menu(request.once(_version_of), request.caller.access, *VERSION_ACTIONS)


OWN_TOPICS = ("models:{key}",)
TOPICS = ("models", "deployments", "cells")

MODELS = Page(
    section="models",
    title="Models",
    fragments=(
        Fragment("versions-table", "", TOPICS, "models_registry/versions/table.html", VERSION_LIST.page),
        BUILDS,
    ),
    narrow=_filter,
    lists=(VERSION_LIST, BUILD_LIST),
)

MODEL = Page(
    section="models",
    title="",
    fragments=(
        Fragment("model", "", TOPICS, "models_registry/versions/model.html", _model),
        Fragment("model-versions", "Versions", TOPICS, "models_registry/versions/table.html", MODEL_VERSION_LIST.page),
        Fragment(
            "model-benchmarks", "Measured", ("benchmarks",), "models_registry/benchmarks/benchmarks.html", _benchmarks
        ),
        Fragment("model-searches", "Searches", ("benchmarks",), "models_registry/benchmarks/searches.html", _searches),
    ),
    charts=True,
    lists=(MODEL_VERSION_LIST,),
)


VERSION = Page(
    section="models",
    title="",
    actions=_actions,
    fragments=(
        Fragment("version", "", (*OWN_TOPICS, "deployments"), "models_registry/versions/version.html", _version),
        Fragment("version-validation", "Validation", OWN_TOPICS, "models_registry/versions/validation.html", _version),
        Fragment("version-runs", "Where it runs", ("cells", "rollouts"), "models_registry/benchmarks/runs.html", _runs),
        Fragment(
            "version-measured",
            "Measured, last hour",
            ("load",),
            "models_registry/versions/measured.html",
            MEASURED_LIST.page,
        ),
        Fragment(
            "version-speculation",
            "Speculation",
            OWN_TOPICS,
            "models_registry/speculation/speculation.html",
            _speculation,
        ),
        Fragment(
            "version-accepted",
            "Speculation, last hour",
            ("load",),
            "models_registry/speculation/accepted.html",
            _accepted,
        ),
        Fragment(
            "version-cells",
            "Engine arguments",
            OWN_TOPICS,
            "models_registry/versions/cells.html",
            _cells,
        ),
        Fragment(
            "version-caches",
            "Compile caches",
            OWN_TOPICS,
            "models_registry/compile_caches/caches.html",
            CACHE_LIST.page,
        ),
        Fragment("version-memory", "Memory", OWN_TOPICS, "models_registry/versions/memory.html", _memory),
        Fragment(
            "version-prompts", "Golden prompts", OWN_TOPICS, "models_registry/versions/prompts.html", _golden_prompts
        ),
        Fragment("version-options", "Configuration", OWN_TOPICS, "models_registry/versions/options.html", _version),
        Fragment("version-events", "Events", ("events",), "models_registry/versions/events.html", _events),
    ),
    charts=True,
    lists=(CACHE_LIST, MEASURED_LIST),
)

VERSION_DIFF = Page(
    section="models",
    title="",
    fragments=(Fragment("version-diff", "", OWN_TOPICS, "models_registry/versions/diff.html", _diff),),
)


def _find(key: str) -> ModelVersion:
    return found_or_404(version_find(key), f"model version {key}")


def _validate(form: Submission, version: ModelVersion) -> None:
    validation_start(version_id=version.pk, actor=form.actor, now=form.now)


def _release(form: Submission, version: ModelVersion) -> None:
    version_release(version_id=version.pk, why=form.text("why"), actor=form.actor, now=form.now)


def _retire(form: Submission, version: ModelVersion) -> None:
    version_retire(version_id=version.pk, why=form.text("why"), actor=form.actor, now=form.now)


def _delete(form: Submission, version: ModelVersion) -> HttpResponse:
    draft_delete(version_id=version.pk, actor=form.actor, now=form.now)
    return redirect("model", key=version.model_id)


VERSION_TARGET = Target(
    noun="model version",
    find=_find,
    name=lambda version: version.reference,
    url=lambda version: reverse("version", args=(version.reference,)),
    action_url=lambda version, name: reverse("version-action", args=(version.reference, name)),
)
STATES_FOR: dict[str, tuple[VersionState, ...]] = {
    "validate": (VersionState.DRAFT,),
    "release": (VersionState.VALIDATED,),
    "retire": (VersionState.VALIDATED, VersionState.RELEASED),
    "delete": (VersionState.DRAFT,),
}


def _effect(name: str, version: ModelVersion, now: datetime) -> str:
    return EFFECTS[name]


def _why_not(name: str, version: ModelVersion) -> str:
    if VersionState(version.state) not in STATES_FOR[name]:
        return f"Not for a version that is {version.state}."
    if name == "validate":
        is_running = version.validations.filter(state=ValidationState.RUNNING.value).exists()
        return "A validation is running." if is_running else ""
    uses = version_uses(version.pk) if name in {"retire", "delete"} else ()
    return f"In use by {', '.join(uses)}." if uses else ""


VERSION_ACTIONS = tuple(
    Action(
        target=VERSION_TARGET,
        name=name,
        label=name.capitalize(),
        run=run,
        typed=VERSION_TARGET.name if name in {"retire", "delete"} else None,
        fields=(REQUIRED_WHY,) if name in {"release", "retire"} else (),
        effect=partial(_effect, name),
        why_not=partial(_why_not, name),
    )
    for name, run in (("validate", _validate), ("release", _release), ("retire", _retire), ("delete", _delete))
)
version_action = action_view(*VERSION_ACTIONS)
