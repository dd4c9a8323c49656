"""Pages: the list of engine builds on the page of models, with a form to add one; and a build with the action to delete
it. Decides nothing."""

from dataclasses import dataclass

from django.http import HttpResponse
from django.shortcuts import redirect
from django.urls import reverse

from controlplane.dashboard.actions import Action, ActionMenu, Submission, Target, action, action_view, page_target
from controlplane.dashboard.fragments import Fragment, Page, PageRequest, found_or_404
from kernel.access import Role
from models_registry.artifacts.planner import size_words
from models_registry.builds.api import AddEngineBuildSerializer
from models_registry.builds.models import EngineBuild
from models_registry.builds.selectors import build_uses, uses_by_build
from models_registry.builds.services.builds import build_add, build_delete

BUILDS_SHOWN = 100


@dataclass(frozen=True, slots=True)
class BuildRow:
    """A build with the versions that name it. `size`: what a node fetches; `unpacked`: what it then keeps."""

    build: EngineBuild
    uses: tuple[str, ...]

    @property
    def size(self) -> str:
        return size_words(self.build.packed_bytes)

    @property
    def unpacked(self) -> str:
        return size_words(self.build.unpacked_bytes)


@dataclass(frozen=True, slots=True)
class BuildList:
    rows: tuple[BuildRow, ...]
    more: bool


def _list(request: PageRequest) -> BuildList:
    found, uses = list(EngineBuild.objects.all()[: BUILDS_SHOWN + 1]), uses_by_build()
    rows = tuple(BuildRow(row, tuple(uses.get(row.name, ()))) for row in found[:BUILDS_SHOWN])
    return BuildList(rows, more=len(found) > BUILDS_SHOWN)


def _find(key: str) -> EngineBuild:
    return found_or_404(EngineBuild.objects.filter(name=key).first(), f"engine build {key!r}")


def _of_request(request: PageRequest) -> EngineBuild:
    return _find(request.key)


def _build(request: PageRequest) -> BuildRow:
    row = request.once(_of_request)
    return BuildRow(row, tuple(build_uses(row.name)))


def _actions(request: PageRequest) -> ActionMenu:
    found = request.once(_build)
    if found.uses:
        return ActionMenu((), f"Named by {', '.join(found.uses)}, so it cannot be deleted.")
    if not request.caller.access.administer:
        return ActionMenu((), "Admins may delete it.")
    effect = "No version can name it any more. Its files stay where they are. This cannot be undone."
    url = reverse("engine-build-action", args=(found.build.name, DELETE.name))
    return ActionMenu((DELETE.confirmation(found.build, url, effect),))


BUILDS = Fragment("engine-builds", "Engine builds", ("models",), "models_registry/builds/table.html", _list)
BUILD = Page(
    section="models",
    title="",
    fragments=(
        Fragment("engine-build", "", ("models",), "models_registry/builds/build.html", _build),
        Fragment("engine-build-actions", "Actions", ("models",), "dashboard/actions.html", _actions),
    ),
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
)
DELETE = Action(target=TARGET, name="delete", label="Delete", role=Role.ADMIN, run=_delete, typed=TARGET.name)
engine_build_action = action_view(DELETE)
