"""Pages: the list of engine builds on the page of models, with a form to add one; a build with the action to delete it;
and the uploads under way with the actions that abort them. Decides nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from django.http import HttpResponse
from django.shortcuts import redirect
from django.urls import reverse

from controlplane.dashboard.actions import (
    Action,
    ActionMenu,
    Submission,
    Target,
    action,
    action_menu,
    action_view,
    page_target,
)
from controlplane.dashboard.fragments import Fragment, Page, PageRequest, found_or_404
from controlplane.dashboard.lists import Column, List
from engine_agent.protocol.engine_builds import BUILD_FILE, BadBuild, BuildFacts, parse_facts
from kernel.access import Role
from models_registry.artifacts.planner import size_words
from models_registry.builds.api import AddEngineBuildSerializer
from models_registry.builds.models import EngineBuild, EngineBuildUpload
from models_registry.builds.selectors import build_uses, uses_by_build
from models_registry.builds.services.builds import build_add, build_delete
from models_registry.builds.services.uploads import KEPT, upload_delete


@dataclass(frozen=True, slots=True)
class BuildRow:
    """A build with the versions that name it. `size`: what a node fetches; `unpacked`: what it then keeps."""

    build: EngineBuild
    uses: tuple[str, ...]

    @property
    def needs(self) -> str:
        build = self.build
        of_host = "Neuron's image" if build.is_external else f"glibc {build.least_glibc}"
        driver = f", driver {build.least_driver}" if build.least_driver else ""
        return f"{build.cpu_arch}, {of_host}{driver}"

    @property
    def size(self) -> str:
        return size_words(self.build.packed_bytes)

    @property
    def unpacked(self) -> str:
        return size_words(self.build.unpacked_bytes)


@dataclass(frozen=True, slots=True)
class UploadRow:
    upload: EngineBuildUpload

    @property
    def facts(self) -> BuildFacts | None:
        """None if they cannot be read."""
        try:
            return parse_facts(self.upload.facts, BUILD_FILE)
        except BadBuild:
            return None

    @property
    def engine(self) -> str:
        facts = self.facts
        return f"{facts.serves} {facts.version} for {facts.platform}" if facts else "unreadable"

    @property
    def percent(self) -> float:
        return 100 * self.upload.bytes_done / self.upload.packed_bytes

    @property
    def arrived(self) -> str:
        return size_words(self.upload.bytes_done)

    @property
    def size(self) -> str:
        return size_words(self.upload.packed_bytes)

    @property
    def kept_until(self) -> datetime:
        return self.upload.touched_at + KEPT


def _rows(builds: Sequence[EngineBuild], now: datetime) -> tuple[BuildRow, ...]:
    uses = uses_by_build()
    return tuple(BuildRow(row, tuple(uses.get(row.name, ()))) for row in builds)


BUILD_LIST: List[BuildRow] = List(
    name="engine-builds",
    prefix="builds-",
    columns=(
        Column("build", "Build", lambda row: row.build.name, ("name",)),
        Column("engine", "Engine", lambda row: f"{row.build.serves} {row.build.version}", ("serves", "version")),
        Column("platform", "Platform", lambda row: row.build.platform, ("platform",), "wide"),
        Column("needs", "Needs", lambda row: row.needs, css="wide"),
        Column("size", "Size", lambda row: row.build.packed_bytes, ("packed_bytes",), "number", is_newest_first=True),
        Column("uses", "Named by", lambda row: ", ".join(row.uses), css="wide"),
        Column(
            "added", "Added", lambda row: row.build.created_at, ("created_at",), "wide number", is_newest_first=True
        ),
    ),
    query=lambda request: EngineBuild.objects.all(),
    rows=_rows,
    order=("name",),
    find=("name",),
    above=lambda request: EngineBuildUpload.objects.count(),
)


def _find(key: str) -> EngineBuild:
    return found_or_404(EngineBuild.objects.filter(name=key).first(), f"engine build {key!r}")


def _of_request(request: PageRequest) -> EngineBuild:
    return _find(request.key)


def _build(request: PageRequest) -> BuildRow:
    row = request.once(_of_request)
    return BuildRow(row, tuple(build_uses(row.name)))


def _actions(request: PageRequest) -> ActionMenu:
    return action_menu(request.once(_build).build, request.caller.access, DELETE)


UPLOAD_LIST: List[UploadRow] = List(
    name="uploads",
    columns=(
        Column("build", "Build", lambda row: row.upload.name, ("name",)),
        Column("engine", "Engine", lambda row: row.engine, css="wide"),
        Column("done", "Done", lambda row: row.percent, css="number"),
        Column("arrived", "Arrived", lambda row: row.upload.bytes_done, ("bytes_done",), "wide number"),
        Column("parts", "Parts", lambda row: row.upload.parts_done, ("parts_done",), "wide number"),
        Column("by", "By", lambda row: row.upload.actor, ("actor",), "wide"),
        Column("started", "Started", lambda row: row.upload.created_at, ("created_at",), "wide number"),
        Column("latest", "Latest part", lambda row: row.upload.touched_at, ("touched_at",), "number"),
    ),
    query=lambda request: EngineBuildUpload.objects.all(),
    rows=lambda uploads, now: [UploadRow(upload) for upload in uploads],
    order=("name",),
    find=("name", "actor"),
)


def _find_upload(key: str) -> EngineBuildUpload:
    return found_or_404(EngineBuildUpload.objects.filter(name=key).first(), f"upload of engine build {key!r}")


BUILDS = Fragment(
    "engine-builds", "Engine builds", ("models", "builds"), "models_registry/builds/table.html", BUILD_LIST.page
)
BUILD = Page(
    section="models",
    title="",
    fragments=(Fragment("engine-build", "", ("models",), "models_registry/builds/build.html", _build),),
    actions=_actions,
)


UPLOADS = Page(
    section="models",
    title="Uploads of engine builds",
    fragments=(
        Fragment("build-uploads", "", ("builds",), "models_registry/builds/uploads.html", UPLOAD_LIST.page),
        Fragment("build-upload-how", "Upload a build", (), "models_registry/builds/upload_how.html", lambda _: None),
    ),
    lists=(UPLOAD_LIST,),
)


@action(page_target("models", "engine-builds"), Role.ADMIN)
def engine_build_new(form: Submission, _: None) -> HttpResponse:
    fields = form.valid(AddEngineBuildSerializer, "name", "uri")
    row = build_add(**fields, actor=form.actor, now=form.now)
    return redirect("engine-build", key=row.name)


def _delete(form: Submission, row: EngineBuild) -> HttpResponse:
    build_delete(name=row.name, actor=form.actor, now=form.now)
    return redirect("models")


TARGET = Target(
    noun="engine build",
    find=_find,
    name=lambda row: row.name,
    url=lambda row: reverse("engine-build", args=(row.name,)),
    action_url=lambda row, name: reverse("engine-build-action", args=(row.name, name)),
)


def _why_not_delete(row: EngineBuild) -> str:
    uses = build_uses(row.name)
    return f"Named by {', '.join(uses)}, so it cannot be deleted." if uses else ""


DELETE_EFFECT = (
    "No version can name it any more. Uploaded files are deleted unless another build has them; files that were added "
    "in their place stay there. This cannot be undone."
)
DELETE = Action(
    target=TARGET,
    name="delete",
    label="Delete",
    role=Role.ADMIN,
    run=_delete,
    typed=TARGET.name,
    effect=lambda row, now: DELETE_EFFECT,
    why_not=_why_not_delete,
)


def _abort(form: Submission, row: EngineBuildUpload) -> HttpResponse:
    upload_delete(name=row.name, actor=form.actor, now=form.now)
    return redirect("engine-build-uploads")


UPLOAD_TARGET = Target(
    noun="upload",
    find=_find_upload,
    name=lambda row: row.name,
    url=lambda row: reverse("engine-build-uploads"),
)
ABORT = Action(
    target=UPLOAD_TARGET,
    name="abort",
    label="Abort",
    role=Role.ADMIN,
    run=_abort,
    effect=lambda row, now: (
        f"The {UploadRow(row).arrived} that arrived are deleted. The same command starts again with the first part."
    ),
)
engine_build_upload_action = action_view(ABORT)
engine_build_action = action_view(DELETE)
