"""The list of a version's compile caches, with the action that deletes one. Decides nothing."""

from dataclasses import dataclass

from django.conf import settings
from django.http import HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.urls import reverse

from controlplane.dashboard.actions import Submission, action, page_target
from controlplane.dashboard.fragments import PageRequest, found_or_404
from controlplane.dashboard.lists import Column, List
from kernel.access import Role
from models_registry.artifacts.planner import size_words
from models_registry.compile_caches.models import CompileCache
from models_registry.compile_caches.planner import why_not_compiled
from models_registry.compile_caches.selectors import (
    cache_folder,
    cache_room_bytes,
    caches_bytes,
    caches_of,
    is_in_bucket,
)
from models_registry.compile_caches.services import cache_delete
from models_registry.versions.models import ModelVersion
from models_registry.versions.selectors import version_by_reference


@dataclass(frozen=True, slots=True)
class CacheRow:
    cache: CompileCache

    @property
    def size(self) -> str:
        return size_words(self.cache.packed_bytes)


@dataclass(frozen=True, slots=True)
class CacheNotes:
    """`why_none`: why this version compiles nothing; empty if it does. `store`: where the archives of all versions are,
    and how much of their room they take."""

    why_none: str
    store: str


def _version(request: PageRequest) -> ModelVersion:
    version = version_by_reference(ModelVersion.objects.all(), request.key)
    return found_or_404(version, f"model version {request.key!r}")


def _notes(request: PageRequest) -> CacheNotes:
    return CacheNotes(why_not_compiled(request.once(_version).spec()), _store())


CACHE_LIST: List[CacheRow] = List(
    name="compile-caches",
    prefix="caches-",
    columns=(
        Column("type", "Compiled on", lambda row: row.cache.instance_type, ("instance_type",)),
        Column("rank", "Rank", lambda row: row.cache.rank, ("rank",), "number"),
        Column("size", "Size", lambda row: row.cache.packed_bytes, ("packed_bytes",), "number", is_newest_first=True),
        Column("fetched", "Fetched", lambda row: row.cache.uses, ("uses",), "number", is_newest_first=True),
        Column("by", "By", lambda row: f"{row.cache.node} of {row.cache.cell}", ("node", "cell"), "wide"),
        Column("digest", "Digest", lambda row: row.cache.digest, ("digest",), "wide"),
        Column(
            "added", "Added", lambda row: row.cache.created_at, ("created_at",), "wide number", is_newest_first=True
        ),
    ),
    query=lambda request: caches_of(request.once(_version).pk),
    rows=lambda caches, now: [CacheRow(cache) for cache in caches],
    order=("instance_type", "rank", "id"),
    find=("instance_type", "node", "cell", "digest"),
    above=_notes,
)


def _store() -> str:
    if not (room := cache_room_bytes()):
        return "Caches are not shared: SWITCHYARD_COMPILE_CACHE_STORE_GIB is 0."
    place = settings.COMPILE_CACHES if is_in_bucket() else f"{cache_folder()} on the control plane's hosts"
    return f"Stored in {place}; the caches of all versions take {size_words(caches_bytes())} of {size_words(room)}."


@action(page_target("models", "compile caches"), Role.ADMIN)
def compile_cache_delete(form: Submission, id: int) -> HttpResponse:
    row = get_object_or_404(CompileCache.objects.select_related("version"), pk=id)
    cache_delete(id=row.pk, actor=form.actor, now=form.now)
    return redirect(reverse("version", args=(row.version.reference,)))
