"""The page of one region, and what its forms change: which pools of capacity are used,
in what order, and which images machines move to."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from django.http import Http404
from django.urls import reverse

from controlplane.dashboard.actions import Action, Run, Submission, Target, action, action_view
from controlplane.dashboard.fragments import Fragment, Page, PageRequest
from controlplane.dashboard.selectors.events import EventList, region_events
from controlplane.dashboard.selectors.region_tree import RegionTree, region_tree
from controlplane.dashboard.selectors.regions import (
    RegionHead,
    RegionImages,
    RegionPools,
    region_find,
    region_head,
    region_images,
    region_pools,
)
from fleet.api.capacity_pool import DeclarePoolSerializer
from fleet.api.image_move import AskImageSerializer
from fleet.models import CapacityPool, ImageMove, Region
from fleet.planning.markets import Market
from fleet.services.capacity_pool import NewPool, pool_change, pool_declare, pool_delete, pool_resume
from fleet.services.cloud_images import image_ask, image_back

EVENTS_OF_ONE_REGION = 30


def _region(request: PageRequest) -> Region:
    return _found(request.key)


def _found(region: str) -> Region:
    found = region_find(region)
    if found is None:
        raise Http404(f"There is no region {region!r}.")
    return found


def _head(request: PageRequest) -> RegionHead:
    return region_head(request.once(_region))


def _pools(request: PageRequest) -> RegionPools:
    return region_pools(request.once(_region), request.now)


def _images(request: PageRequest) -> RegionImages:
    return region_images(request.once(_region))


def _tree(request: PageRequest) -> RegionTree:
    return region_tree(request.once(_region))


def _events(request: PageRequest) -> EventList:
    return region_events(request.once(_region).pk, EVENTS_OF_ONE_REGION)


REGION = Page(
    section="nodes",
    title="",
    fragments=(
        Fragment("region", "", ("regions:{key}", "nodes", "cells"), "dashboard/regions/region.html", _head),
        Fragment(
            "region-pools", "Pools of capacity", ("regions:{key}", "machines"), "dashboard/regions/pools.html", _pools
        ),
        Fragment("region-images", "Images", ("regions:{key}",), "dashboard/regions/images.html", _images),
        Fragment("region-tree", "Where its nodes are", ("nodes", "cells"), "dashboard/regions/tree.html", _tree),
        Fragment("region-events", "Events", ("events",), "dashboard/events/list.html", _events),
    ),
)


def _pool(region: str, pool_id: int) -> CapacityPool:
    pool = CapacityPool.objects.filter(region_id=region, pk=pool_id).first()
    if pool is None:
        raise Http404(f"There is no pool {pool_id} in {region!r}.")
    return pool


TARGET = Target(
    noun="pool of capacity",
    find=_pool,
    name=str,
    url=lambda pool: f"{reverse('region', args=(pool.region_id,))}#region-pools",
)


def _changing(columns: Callable[[CapacityPool], dict[str, Any]]) -> Run[CapacityPool]:
    def run(form: Submission, pool: CapacityPool) -> None:
        pool_change(pool_id=pool.pk, columns=columns(pool), actor=form.actor, now=form.now)

    return run


def _resume(form: Submission, pool: CapacityPool) -> None:
    pool_resume(pool_id=pool.pk, actor=form.actor, now=form.now)


def _remove(form: Submission, pool: CapacityPool) -> None:
    pool_delete(pool_id=pool.pk, actor=form.actor, now=form.now)


pool_action = action_view(
    Action(target=TARGET, name="on", run=_changing(lambda pool: {"enabled": True})),
    Action(target=TARGET, name="off", run=_changing(lambda pool: {"enabled": False})),
    Action(target=TARGET, name="earlier", run=_changing(lambda pool: {"position": max(0, pool.position - 1)})),
    Action(target=TARGET, name="resume", run=_resume),
    Action(target=TARGET, name="remove", run=_remove),
)

REGION_TARGET = Target(
    noun="region",
    find=_found,
    name=lambda region: region.pk,
    url=lambda region: f"{reverse('region', args=(region.pk,))}#region-pools",
)


@action(REGION_TARGET)
def pool_add_action(form: Submission, region: Region) -> None:
    body = form.valid(DeclarePoolSerializer, "instance_type", "market", "zone", "max_price", region=region.pk)
    new = NewPool(region.pk, body["instance_type"], body["zone"], Market(body["market"]), body["max_price"])
    pool_declare(new, actor=form.actor, now=form.now)


def _move(region: str, move_id: int) -> ImageMove:
    move = ImageMove.objects.filter(region_id=region, pk=move_id).first()
    if move is None:
        raise Http404(f"There is no move {move_id} to another image in {region!r}.")
    return move


def _images_of(region: str) -> str:
    return f"{reverse('region', args=(region,))}#region-images"


@action(replace(REGION_TARGET, url=lambda region: _images_of(region.pk)))
def image_move_action(form: Submission, region: Region) -> None:
    body = form.valid(AskImageSerializer, "instance_type", "image", "why", region=region.pk)
    image_ask(region.pk, body["instance_type"], body["image"], actor=form.actor, now=form.now, why=body["why"])


@action(Target(noun="move", find=_move, name=str, url=lambda move: _images_of(move.region_id)))
def image_back_action(form: Submission, move: ImageMove) -> None:
    image_back(move.pk, actor=form.actor, now=form.now)
