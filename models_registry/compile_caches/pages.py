"""The list of a version's compile caches, with the action that deletes one. Decides nothing."""

from dataclasses import dataclass

from django.http import HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.urls import reverse

from controlplane.dashboard.actions import Submission, action, page_target
from kernel.access import Role
from models_registry.artifacts.planner import size_words
from models_registry.compile_caches.models import CompileCache
from models_registry.compile_caches.planner import why_not_compiled
from models_registry.compile_caches.selectors import caches_of
from models_registry.compile_caches.services import cache_delete
from models_registry.versions.models import ModelVersion


@dataclass(frozen=True, slots=True)
class CacheRow:
    cache: CompileCache

    @property
    def size(self) -> str:
        return size_words(self.cache.packed_bytes)


@dataclass(frozen=True, slots=True)
class VersionCaches:
    """`why_none`: why this version compiles nothing; empty if it does."""

    rows: tuple[CacheRow, ...]
    why_none: str


def version_caches(version: ModelVersion) -> VersionCaches:
    return VersionCaches(tuple(map(CacheRow, caches_of(version.pk))), why_not_compiled(version.spec()))


@action(page_target("models", "compile caches"), Role.ADMIN)
def compile_cache_delete(form: Submission, id: int) -> HttpResponse:
    row = get_object_or_404(CompileCache.objects.select_related("version"), pk=id)
    cache_delete(id=row.pk, actor=form.actor, now=form.now)
    return redirect(reverse("version", args=(row.version.reference,)))
