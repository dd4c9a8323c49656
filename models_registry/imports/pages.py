"""Pages of imports: the list, one import with its progress, files and actions, and the wizard for a new model, by name
from a hub, or in a bucket or folder. Decides nothing."""

import math
import re
import shlex
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

from django.conf import settings
from django.db.models import QuerySet
from django.urls import reverse

from controlplane.api.apply.planning import Kind
from controlplane.dashboard.actions import (
    Action,
    ActionMenu,
    Field,
    Submission,
    Target,
    action_menu,
    action_view,
)
from controlplane.dashboard.choices import choose_labelled
from controlplane.dashboard.fragments import Filter, Fragment, Page, PageRequest, found_or_404
from controlplane.dashboard.lists import Column, List, plain
from controlplane.dashboard.wizards import (
    Documents,
    Facts,
    Input,
    InputKind,
    Option,
    Step,
    Typed,
    Values,
    Wizard,
    document,
    nested,
)
from models_registry.artifacts.planner import size_words
from models_registry.imports.api import DraftImportSerializer
from models_registry.imports.models import ImportFile, ModelImport
from models_registry.imports.planner import IMPORT_OPEN, ImportState
from models_registry.imports.services.imports import import_cancel, import_draft, import_retry
from models_registry.versions.models import ModelVersion
from models_registry.versions.planning.engine_arguments import ENGINES
from models_registry.versions.planning.lifecycle import VersionState, choices

SHOWN = 100
NUMBERS = ("model_type", "attention_heads", "kv_heads", "layers", "context_length")
EFFECTS = {
    "cancel": "The download stops, and its unfinished files are removed.",
    "retry": "The import continues with the same commit; verified files are kept.",
    "draft": "A draft is created that serves this artifact, with the model's heads, layers and context length.",
}


@dataclass(frozen=True, slots=True)
class ImportPage:
    """`drafts`: those of `versions` that can still be changed."""

    row: ModelImport
    versions: tuple[str, ...]
    drafts: tuple[str, ...]

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


def _listed(request: PageRequest) -> "QuerySet[ModelImport]":
    rows, state, text = ModelImport.objects.all(), request.text("state"), request.text("q")
    rows = rows.filter(state=state) if state else rows
    return rows.filter(source__icontains=text) if text else rows


IMPORT_LIST: List[ModelImport] = List(
    name="imports",
    columns=(
        Column("import", "Import", lambda row: row.source, ("source",)),
        Column("state", "State", lambda row: row.state, ("state",)),
        Column("done", "Done", lambda row: row.bytes_done, ("bytes_done",), "number", is_newest_first=True),
        Column("size", "Size", lambda row: row.bytes_total, ("bytes_total",), "number wide", is_newest_first=True),
        Column("files", "Files", lambda row: row.files_total, ("files_total",), "number wide", is_newest_first=True),
        Column("by", "By", lambda row: row.actor, ("actor",), "wide"),
        Column("created", "Created", lambda row: row.created_at, ("id",), "number wide", is_newest_first=True),
    ),
    query=_listed,
    order=("-id",),
    filters=("state", "q"),
)


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
    found = served[:SHOWN]
    drafts = tuple(version.reference for version in found if version.state == VersionState.DRAFT)
    return ImportPage(row, tuple(version.reference for version in found), drafts)


FILE_LIST: List[ImportFile] = List(
    name="files",
    prefix="files-",
    columns=(
        plain("path", "File"),
        Column("state", "State", lambda row: "verified" if row.stored else "to come", ("stored",)),
        plain("size", "Bytes", "number"),
        plain("stored", "SHA-256", "wide", name="sha256"),
    ),
    query=lambda request: request.once(_row).files.all(),
    order=("path", "id"),
    find=("path",),
)


def _actions(request: PageRequest) -> ActionMenu:
    return action_menu(request.once(_row), request.caller.access, *IMPORT_ACTIONS)


IMPORTS = Page(
    section="models",
    title="Imports",
    fragments=(Fragment("imports-table", "", ("imports",), "models_registry/imports/table.html", IMPORT_LIST.page),),
    narrow=_filter,
    lists=(IMPORT_LIST,),
)
IMPORT = Page(
    section="models",
    title="",
    actions=_actions,
    fragments=(
        Fragment("import", "", ("imports:{key}", "models"), "models_registry/imports/import.html", _import),
        Fragment("import-files", "Files", ("imports:{key}",), "models_registry/imports/files.html", FILE_LIST.page),
    ),
    lists=(FILE_LIST,),
)


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
    action_url=lambda row, name: reverse("import-action", args=(row.pk, name)),
)
ENDED_ACTIONS = {ImportState.DONE: "draft", ImportState.FAILED: "retry", ImportState.CANCELLED: "retry"}


def _effect(name: str, row: ModelImport, now: datetime) -> str:
    return EFFECTS[name]


def _why_not(name: str, row: ModelImport) -> str:
    possible = ENDED_ACTIONS.get(ImportState(row.state), "cancel")
    return "" if name == possible else f"Not for an import that is {row.get_state_display().lower()}."


DRAFT_FIELDS = (
    Field("draft", "MODEL@VERSION", required=True),
    Field("engine", f"Engine: {', '.join(ENGINES)} (default: by its weights)"),
)
IMPORT_ACTIONS = tuple(
    Action(
        target=TARGET,
        name=name,
        label=label,
        submit="Create draft" if name == "draft" else "",
        run=run,
        fields=DRAFT_FIELDS if name == "draft" else (),
        effect=partial(_effect, name),
        why_not=partial(_why_not, name),
    )
    for name, label, run in (
        ("cancel", "Cancel", _cancel),
        ("retry", "Retry", _retry),
        ("draft", "Draft a version", _draft),
    )
)
import_action = action_view(*IMPORT_ACTIONS)


@dataclass(frozen=True, slots=True)
class Places:
    """Where models come from: configured hubs by scheme, and allowed folders and buckets."""

    hubs: tuple[tuple[str, str], ...]
    sources: tuple[str, ...]


def _places(typed: Typed) -> Places:
    known = (("hf", settings.HF_ENDPOINT), ("modelscope", settings.MODELSCOPE_ENDPOINT))
    return Places(tuple(hub for hub in known if hub[1]), tuple(settings.ARTIFACT_SOURCES))


def _engines(typed: Typed) -> list[Option]:
    return [Option("", "by its weights"), *(Option(engine) for engine in ENGINES)]


_SHORT_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?")
_STORED = ("file://", "s3://")


def _model_name(source: str) -> str:
    """`smollm2-135m-instruct` for `hf://HuggingFaceTB/SmolLM2-135M-Instruct@main`."""
    last = source.partition("://")[2].partition("@")[0].rstrip("/").rpartition("/")[2]
    return re.sub(r"[^a-z0-9_-]+", "-", last.lower()).strip("-")[:96]


def _model_documents(values: Values) -> Documents:
    source = str(values["source"])
    source = f"hf://{source}" if _SHORT_NAME.fullmatch(source) else source
    name = str(values.get("model") or _model_name(source))
    reference = f"{name}@{values.get('version', '1')}"
    model = document(Kind.MODEL, name, nested(values, ("description",)))
    if source.startswith(_STORED):
        spec = {"engine": values.get("engine", "vllm"), "artifact_uri": source}
        return [model, document(Kind.MODEL_VERSION, reference, spec)]
    spec = {"source": source, **nested(values, ("pattern", "engine"))}
    return [model, document(Kind.MODEL_IMPORT, reference, spec)]


def _model_url(documents: Documents) -> str:
    """The import, or the draft of a model that is stored already."""
    last = documents[-1]
    name = str(last["metadata"]["name"])
    if last["kind"] != Kind.MODEL_IMPORT:
        return reverse("draft-edit", args=(name,))
    row = ModelImport.objects.filter(draft=name).first()
    return reverse("import", args=(row.pk,)) if row else reverse("imports")


def _model_command(documents: Documents) -> str:
    last = documents[-1]
    if last["kind"] != Kind.MODEL_IMPORT or documents[0]["spec"]:
        return ""
    spec = last["spec"]
    words = ["switchyard", "model", "import", spec["source"], "--draft", last["metadata"]["name"]]
    words += [word for name in ("pattern", "engine") if spec.get(name) for word in (f"--{name}", spec[name])]
    return shlex.join(map(str, words))


MODEL_WIZARD = Wizard(
    title="New model",
    section="models",
    about="A model from a hub is downloaded, verified and stored; its first version is drafted from it. A model in a "
    "bucket or folder stays there.",
    steps=(
        Step(
            "Source",
            (
                Input(
                    name="source",
                    at="ModelImport.source",
                    label="Name or address",
                    required=True,
                    placeholder="ORG/NAME",
                    help="ORG/NAME, hf://ORG/NAME@REVISION, modelscope://ORG/NAME@REVISION, s3://BUCKET/PREFIX or "
                    "file:///FOLDER.",
                ),
                Input(name="pattern", at="ModelImport.pattern", label="Weights", placeholder="*Q4_K_M.gguf"),
            ),
            facts=Facts("models_registry/imports/places.html", _places),
        ),
        Step(
            "Name",
            (
                Input(name="model", at="Model.metadata.name", help="Its name in requests. Default: from the source."),
                Input(name="version", at="ModelImport.metadata.name", value="1", help="Its first version, a draft."),
                Input(name="engine", at="ModelImport.engine", kind=InputKind.CHOICE, options=_engines),
                Input(name="description", at="Model.description"),
            ),
        ),
    ),
    documents=_model_documents,
    kinds=frozenset({Kind.MODEL, Kind.MODEL_IMPORT, Kind.MODEL_VERSION}),
    creates=frozenset({Kind.MODEL_IMPORT, Kind.MODEL_VERSION}),
    url=_model_url,
    command=_model_command,
)
