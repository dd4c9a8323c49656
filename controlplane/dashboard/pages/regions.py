"""The page of one region, and what its forms change: which pools of capacity are used, and in what order."""

from collections.abc import Callable
from typing import Any

from django.http import Http404
from django.urls import reverse

from controlplane.dashboard.actions import Action, Run, Submission, Target, action, action_view
from controlplane.dashboard.fragments import Fragment, Page, PageRequest, storable
from controlplane.dashboard.selectors.events import EventList, region_events
from controlplane.dashboard.selectors.region_tree import RegionTree, region_tree
from controlplane.dashboard.selectors.regions import (
    RegionHead,
    RegionPools,
    region_find,
    region_head,
    region_pools,
)
from fleet.api.capacity_pool import DeclarePoolSerializer
from fleet.models import CapacityPool, Region
from fleet.planning.pools import Market
from fleet.services.capacity_pool import NewPool, pool_change, pool_declare, pool_delete, pool_resume

EVENTS_OF_ONE_REGION = 30


def _region(request: PageRequest) -> Region:
    return _found(request.key)


def _found(region: str) -> Region:
    found = region_find(storable(region))
    if found is None:
        raise Http404(f"There is no region {region!r}.")
    return found


def _head(request: PageRequest) -> RegionHead:
    return region_head(request.once(_region))


def _pools(request: PageRequest) -> RegionPools:
    return region_pools(request.once(_region), request.now)


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
        Fragment("region-tree", "Where its nodes are", ("nodes", "cells"), "dashboard/regions/tree.html", _tree),
        Fragment("region-events", "Events", ("events",), "dashboard/events/list.html", _events),
    ),
)


def _pool(region: str, pool_id: int) -> CapacityPool:
    pool = CapacityPool.objects.filter(region_id=storable(region), pk=pool_id).first()
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
