"""Pages of imports: the list with the form for a new one, and one import with its progress, files and actions. Decides
nothing."""

import math
from dataclasses import dataclass
from datetime import timedelta

from django.conf import settings
from django.urls import reverse

from controlplane.dashboard.actions import Action, ActionMenu, Field, Submission, Target, action_view, page_target
from controlplane.dashboard.choices import choose_labelled
from controlplane.dashboard.fragments import Filter, Fragment, Page, PageRequest, found_or_404
from models_registry.artifacts.planner import size_words
from models_registry.imports.api import DraftImportSerializer, StartImportSerializer
from models_registry.imports.models import ImportFile, ModelImport
from models_registry.imports.planner import IMPORT_OPEN, ImportState
from models_registry.imports.services.imports import import_cancel, import_draft, import_retry, import_start
from models_registry.versions.models import ModelVersion
from models_registry.versions.planning.engine_arguments import ENGINES
from models_registry.versions.planning.lifecycle import choices

SHOWN = 100
FILES_SHOWN = 200
NUMBERS = ("model_type", "attention_heads", "kv_heads", "layers", "context_length")
EFFECTS = {
    "cancel": "The download stops, and its unfinished files are removed.",
    "retry": "The import continues with the same commit; verified files are kept.",
    "draft": "A draft is created that serves this artifact, with the model's heads, layers and context length.",
}


@dataclass(frozen=True, slots=True)
class ImportList:
    """`hubs`: configured ones, by scheme; without any, nothing can be imported."""

    rows: tuple[ModelImport, ...]
    more: bool
    filtered: bool
    hubs: tuple[tuple[str, str], ...]
    engines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ImportPage:
    row: ModelImport
    versions: tuple[str, ...]

    @property
    def is_open(self) -> bool:
        return ImportState(self.row.state) in IMPORT_OPEN

    @property
    def rate(self) -> str:
        """The present rate, and the time that is left at it."""
        if not self.row.bytes_per_s:
            return ""
        left_s = (self.row.bytes_total - self.row.bytes_done) / self.row.bytes_per_s
        return f", {size_words(round(self.row.bytes_per_s))}/s, {timedelta(seconds=math.ceil(left_s))} left"

    @property
    def numbers(self) -> tuple[tuple[str, object], ...]:
        known = self.row.configuration
        return tuple((name.replace("_", " "), known[name]) for name in NUMBERS if name in known)


@dataclass(frozen=True, slots=True)
class FileList:
    rows: tuple[ImportFile, ...]
    hidden: int


def _list(request: PageRequest) -> ImportList:
    state, text = request.text("state"), request.text("q")
    rows = ModelImport.objects.order_by("-id")
    if state:
        rows = rows.filter(state=state)
    if text:
        rows = rows.filter(source__icontains=text)
    found = tuple(rows[: SHOWN + 1])
    known = (("hf", settings.HF_ENDPOINT), ("modelscope", settings.MODELSCOPE_ENDPOINT))
    hubs = tuple((scheme, endpoint) for scheme, endpoint in known if endpoint)
    return ImportList(found[:SHOWN], len(found) > SHOWN, bool(state or text), hubs, tuple(ENGINES))


def _filter(request: PageRequest) -> Filter:
    state = choose_labelled(request, "state", (("", "all"), *choices(ImportState)))
    return Filter(text_label="Organisation or name", text_name="q", text=request.text("q"), choices=(state,))


def _find(key: str) -> ModelImport:
    row = ModelImport.objects.filter(pk=key).first() if key.isascii() and key.isdigit() and len(key) < 19 else None
    return found_or_404(row, f"import {key!r}")


def _row(request: PageRequest) -> ModelImport:
    return _find(request.key)


def _import(request: PageRequest) -> ImportPage:
    row = request.once(_row)
    served = ModelVersion.objects.exclude(artifact_uri="").filter(artifact_uri=row.artifact_uri).order_by("-id")
    return ImportPage(row, tuple(version.reference for version in served[:SHOWN]))


def _files(request: PageRequest) -> FileList:
    row = request.once(_row)
    return FileList(tuple(row.files.order_by("path")[:FILES_SHOWN]), max(0, row.files_total - FILES_SHOWN))


def _actions(request: PageRequest) -> ActionMenu:
    row = request.once(_row)
    names = {ImportState.DONE: ("draft",), ImportState.FAILED: ("retry",), ImportState.CANCELLED: ("retry",)}.get(
        ImportState(row.state), ("cancel",)
    )
    return ActionMenu(
        tuple(
            ACTIONS[name].confirmation(row, reverse("import-action", args=(row.pk, name)), EFFECTS[name])
            for name in names
        )
    )


IMPORTS = Page(
    section="models",
    title="Imports",
    fragments=(Fragment("imports-table", "", ("imports",), "models_registry/imports/table.html", _list),),
    narrow=_filter,
)
IMPORT = Page(
    section="models",
    title="",
    fragments=(
        Fragment("import", "", ("imports:{key}", "models"), "models_registry/imports/import.html", _import),
        Fragment("import-actions", "Actions", ("imports:{key}",), "dashboard/actions.html", _actions),
        Fragment("import-files", "Files", ("imports:{key}",), "models_registry/imports/files.html", _files),
    ),
)


def _start(form: Submission, _: None) -> object:
    columns = form.valid(StartImportSerializer, "source", "pattern", "draft", "engine")
    return import_start(**columns, actor=form.actor, now=form.now)


def _cancel(form: Submission, row: ModelImport) -> None:
    import_cancel(import_id=row.pk, actor=form.actor, now=form.now)


def _retry(form: Submission, row: ModelImport) -> None:
    import_retry(import_id=row.pk, actor=form.actor, now=form.now)


def _draft(form: Submission, row: ModelImport) -> None:
    columns = form.valid(DraftImportSerializer, "draft", "engine")
    import_draft(import_id=row.pk, **columns, actor=form.actor, now=form.now)


TARGET = Target(
    noun="import",
    find=_find,
    name=lambda row: f"import {row.pk}",
    url=lambda row: reverse("import", args=(row.pk,)),
)
ACTIONS: dict[str, Action[ModelImport]] = {
    each.name: each
    for each in (
        Action(target=TARGET, name="cancel", label="Cancel", run=_cancel),
        Action(target=TARGET, name="retry", label="Retry", run=_retry),
        Action(
            target=TARGET,
            name="draft",
            label="Draft a version",
            submit="Create draft",
            run=_draft,
            fields=(
                Field("draft", "MODEL@VERSION", required=True),
                Field("engine", f"Engine: {', '.join(ENGINES)} (default: by its weights)"),
            ),
        ),
    )
}
import_action = action_view(*ACTIONS.values())
import_new = action_view(Action(target=page_target("imports", "imports"), name="start", run=_start))
