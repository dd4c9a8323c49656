"""The list of regions, and the page of one: its cloud's state, pools of capacity, images, and nodes as a tree of zones
and network nodes; and its actions on pools and images."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby
from typing import Any

from django.db.models import QuerySet
from django.urls import reverse

from controlplane.dashboard.actions import (
    Action,
    ActionMenu,
    Run,
    Submission,
    Target,
    action,
    action_view,
    menu_item,
    refuse_newer,
)
from controlplane.dashboard.charts import Marker
from controlplane.dashboard.events import EventList, chart_markers, region_events
from controlplane.dashboard.fragments import Filter, Fragment, Page, PageRequest, deferred, found_or_404
from controlplane.dashboard.lists import Column, List
from fleet.capacity.api import DeclarePoolSerializer
from fleet.capacity.planning.pools import Market
from fleet.capacity.services import NewPool, pool_change, pool_declare, pool_delete, pool_resume
from fleet.cells.models import Cell, CellMember
from fleet.cells.selectors import cell_counts_by_region
from fleet.clouds.api import AskImageSerializer
from fleet.clouds.models import CapacityPool, CloudRegion, ImageMove, TaskImage
from fleet.clouds.planning.upkeep import IMAGE_TONE, ImageState
from fleet.clouds.services.images import image_move_request, image_move_roll_back
from fleet.load.pages import Charts, load_charts, use_charts
from fleet.load.selectors import Point, last_windows, region_subject
from fleet.machines.planner import CLOUDS
from fleet.nodes.models import Node
from fleet.nodes.selectors import node_counts_by_region
from fleet.reconcile.planning.states import CellState, CloudRegionState, NodeState
from fleet.regions.models import Region
from fleet.regions.pages.actions import ALARMS, GRPC_OFF, GRPC_ON, REGION_TARGET
from fleet.regions.pages.pools import POOL_LIST, region_of
from kernel.time_ranges import OF_LOAD
from kernel.tones import Tone
from traffic.region_shares.models import RegionLoss

StateCounts = Mapping[str, Mapping[str, int]]
"""Region -> state -> number."""

OF_LOSS = "Shortages after its loss at the peak of the next day, p90 of the forecasts"
CLOUD_TONE = {
    CloudRegionState.READING: Tone.MOVING,
    CloudRegionState.READY: Tone.OK,
    CloudRegionState.REFUSED: Tone.BAD,
}


@dataclass(frozen=True, slots=True)
class RegionRow:
    """A region in the list. `load`: its last window; `loss`: shortages after its loss. Both are None if unknown."""

    region: Region
    cloud: CloudRegion | None
    cloud_tone: Tone
    nodes: int
    cells: int
    ready: int
    load: Point | None
    loss: RegionLoss | None


@dataclass(frozen=True, slots=True)
class RegionHead:
    """A region and its counts: state -> number. `cloud` None: not in a cloud; `loss`: what its loss would break, or
    None without recent forecasts."""

    region: Region
    cloud: CloudRegion | None
    cloud_tone: Tone
    nodes: tuple[tuple[str, int], ...]
    cells: tuple[tuple[str, int], ...]
    loss: RegionLoss | None


@dataclass(frozen=True, slots=True)
class ImagesOfType:
    """The images of a type's pools, and the newest move from them, or None."""

    instance_type: str
    images: tuple[str, ...]
    move: ImageMove | None
    tone: Tone
    is_under_way: bool
    may_turn_back: bool


@dataclass(frozen=True, slots=True)
class RegionImages:
    region: str
    types: tuple[ImagesOfType, ...]


def _listed(request: PageRequest) -> "QuerySet[Region]":
    text, regions = request.text("q"), Region.objects.select_related("cloud", "loss")
    return regions.filter(name__icontains=text) if text else regions


def _region_rows(regions: Sequence[Region], now: datetime) -> tuple[RegionRow, ...]:
    nodes, cells = node_counts_by_region(), cell_counts_by_region()
    loads = last_windows([region_subject(region.pk) for region in regions], now)
    return tuple(_region_row(region, nodes, cells, loads) for region in regions)


def _load_of(name: str) -> Callable[[RegionRow], object]:
    return lambda row: getattr(row.load, name, None)


REGION_LIST: List[RegionRow] = List(
    name="regions",
    columns=(
        Column("region", "Region", lambda row: row.region.pk),
        Column("provider", "Provider", lambda row: row.region.provider, css="wide"),
        Column("cloud", "Cloud", lambda row: row.cloud.state if row.cloud else None, css="wide"),
        Column("cells", "Cells", lambda row: row.ready, css="number", title="Ready cells of all", is_newest_first=True),
        Column("nodes", "Nodes", lambda row: row.nodes, css="number wide", is_newest_first=True),
        Column("requests", "Requests/s", _load_of("requests_per_s"), css="number", is_newest_first=True),
        Column("tokens", "Tokens/s", _load_of("tokens_per_s"), css="number wide", is_newest_first=True),
        Column("ttft-p95", "TTFT p95", _load_of("ttft_p95_ms"), css="number wide", is_newest_first=True),
        Column("loss", "N+1", lambda row: row.loss.text if row.loss else None, title=OF_LOSS),
        Column("ingress", "Ingress", lambda row: row.region.ingress_url, css="wide"),
    ),
    query=_listed,
    rows=_region_rows,
    order=("name",),
    by_value=True,
)


def _region_row(region: Region, nodes: StateCounts, cells: StateCounts, loads: Mapping[str, Point]) -> RegionRow:
    cloud: CloudRegion | None = getattr(region, "cloud", None)
    states = cells.get(region.pk, {})
    return RegionRow(
        region=region,
        cloud=cloud,
        cloud_tone=CLOUD_TONE[CloudRegionState(cloud.state)] if cloud else Tone.IDLE,
        nodes=sum(nodes.get(region.pk, {}).values()),
        cells=sum(states.values()),
        ready=states.get(CellState.READY.value, 0),
        load=loads.get(region_subject(region.pk)),
        loss=getattr(region, "loss", None),
    )


def region_head(region: Region) -> RegionHead:
    cloud: CloudRegion | None = getattr(region, "cloud", None)
    nodes, cells = node_counts_by_region().get(region.pk, {}), cell_counts_by_region().get(region.pk, {})
    return RegionHead(
        region=region,
        cloud=cloud,
        cloud_tone=CLOUD_TONE[CloudRegionState(cloud.state)] if cloud else Tone.IDLE,
        nodes=tuple((state.value, nodes[state]) for state in NodeState if nodes.get(state)),
        cells=tuple((state.value, cells[state]) for state in CellState if cells.get(state)),
        loss=getattr(region, "loss", None),
    )


def region_images(region: Region) -> RegionImages:
    moves = ImageMove.objects.filter(region_id=region.pk).order_by("instance_type_id", "-pk")
    newest = {move.instance_type_id: move for move in moves.distinct("instance_type_id")}
    by_type: dict[str, set[str]] = {}
    for model in (CapacityPool, TaskImage):
        for kind, image in model.objects.filter(region_id=region.pk).values_list("instance_type_id", "image"):
            by_type.setdefault(kind, set()).add(image)
    types = tuple(_image_rows(kind, images, newest.get(kind)) for kind, images in sorted(by_type.items()))
    return RegionImages(region.pk, types)


def _image_rows(kind: str, images: set[str], move: ImageMove | None) -> ImagesOfType:
    is_under_way = move is not None and move.ended_at is None
    return ImagesOfType(
        instance_type=kind,
        images=tuple(sorted(images)),
        move=move,
        tone=IMAGE_TONE[ImageState(move.state)] if move else Tone.IDLE,
        is_under_way=is_under_way,
        may_turn_back=is_under_way and move is not None and move.state != ImageState.BACK,
    )


NODES_DRAWN = 1000


@dataclass(frozen=True, slots=True)
class Mark:
    """A node as a square. `text`: its state and role."""

    node: Node
    role: str

    @property
    def tone(self) -> Tone:
        return Tone.WARN if self.node.cordoned and self.node.tone is Tone.OK else self.node.tone

    @property
    def text(self) -> str:
        return f"{self.node.state}{', cordoned' if self.node.cordoned else ''}, {self.role}"


@dataclass(frozen=True, slots=True)
class Marks:
    """Nodes of one cell at one place; `cell` None: spares."""

    cell: Cell | None
    marks: tuple[Mark, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """A zone, or a network node below it. `names`: its own, and those of descendants without siblings. `nodes`: number
    below it."""

    names: tuple[str, ...]
    nodes: int
    places: tuple["Place", ...]
    groups: tuple[Marks, ...]


@dataclass(frozen=True, slots=True)
class RegionTree:
    """`unknown`: nodes without a known place. `more`: there are more nodes than drawn."""

    places: tuple[Place, ...]
    unknown: tuple[Marks, ...]
    drawn: int
    more: bool


_DRAWN_COLUMNS = ("state", "cordoned", "topology", "member__rank", "member__cell__state")


def region_tree(region: Region) -> RegionTree:
    live = Node.objects.filter(region=region).exclude(state=NodeState.RETIRED)
    drawn = live.select_related("member__cell").only(*_DRAWN_COLUMNS)
    found = list(drawn.order_by("topology", "id")[: NODES_DRAWN + 1])
    nodes = found[:NODES_DRAWN]
    placed = [(tuple(node.topology), node) for node in nodes if node.topology]
    unknown = _groups([node for node in nodes if not node.topology])
    return RegionTree(places_of(placed), unknown, len(nodes), more=len(found) > NODES_DRAWN)


def places_of(placed: Iterable[tuple[tuple[str, ...], Node]]) -> tuple[Place, ...]:
    """Returns the places directly below one. `placed`: the rest of each path, and its node."""
    ordered = sorted(placed, key=lambda pair: (pair[0], pair[1].pk))
    places = []
    for name, below in groupby(ordered, key=lambda pair: pair[0][0]):
        pairs = [(path[1:], node) for path, node in below]
        here = [node for path, node in pairs if not path]
        places.append(_merged_place(name, places_of((path, node) for path, node in pairs if path), here))
    return tuple(places)


def _merged_place(name: str, below: tuple[Place, ...], here: Sequence[Node]) -> Place:
    if len(below) == 1 and not here:
        only = below[0]
        return Place((name, *only.names), only.nodes, only.places, only.groups)
    return Place((name,), len(here) + sum(place.nodes for place in below), below, _groups(here))


def _groups(nodes: Sequence[Node]) -> tuple[Marks, ...]:
    """Cells by name, their nodes by rank; spares last."""
    by_cell: dict[str, list[tuple[int, Mark]]] = {}
    cells: dict[str, Cell] = {}
    for node in nodes:
        member: CellMember | None = getattr(node, "member", None)
        key = member.cell_id if member else ""
        if member:
            cells[key] = member.cell
        role = f"{member.role} of {member.cell_id}" if member else "spare"
        by_cell.setdefault(key, []).append((member.rank if member else 0, Mark(node, role)))
    order = sorted(by_cell, key=lambda key: (not key, key))
    return tuple(
        Marks(cells.get(key), tuple(mark for _, mark in sorted(by_cell[key], key=lambda one: (one[0], one[1].node.pk))))
        for key in order
    )


EVENTS_OF_ONE_REGION = 30


TOPICS = ("regions", "nodes", "cells", "history")
REGIONS = Page(
    section="regions",
    title="Regions",
    fragments=(Fragment("regions-table", "", TOPICS, "fleet/regions/table.html", REGION_LIST.page),),
    narrow=lambda request: Filter("Find by name", "q", request.text("q")),
    lists=(REGION_LIST,),
)


def _head(request: PageRequest) -> RegionHead:
    return region_head(request.once(region_of))


def _images(request: PageRequest) -> RegionImages:
    return region_images(request.once(region_of))


def _tree(request: PageRequest) -> RegionTree:
    return region_tree(request.once(region_of))


def _events(request: PageRequest) -> EventList:
    return region_events(request.once(region_of).pk, EVENTS_OF_ONE_REGION)


def _markers(request: PageRequest) -> tuple[Marker, ...]:
    return chart_markers(request.span, region=request.key)


def _load(request: PageRequest) -> Charts:
    subject = region_subject(request.key)
    return load_charts(subject, span=request.span, now=request.now, markers=request.once(_markers))


def _use(request: PageRequest) -> Charts:
    subject = region_subject(request.key)
    return use_charts(subject, span=request.span, now=request.now, markers=request.once(_markers))


def _region_actions(request: PageRequest) -> ActionMenu:
    region, access = request.once(region_of), request.caller.access
    evacuate = menu_item("Evacuate", reverse("evacuate", args=(region.pk,)), access)
    alarms = (ALARMS.menu_item(region, access),) if region.provider in CLOUDS else ()
    return ActionMenu((evacuate, (GRPC_OFF if region.grpc else GRPC_ON).menu_item(region, access), *alarms))


REGION = Page(
    section="regions",
    title="",
    actions=_region_actions,
    fragments=(
        Fragment("region", "", ("regions:{key}", "nodes", "cells"), "fleet/regions/region.html", _head),
        Fragment("region-load", "Load", ("history",), "fleet/load/charts.html", _load),
        *deferred(Fragment("region-use", "Accelerators and machines", ("history",), "fleet/load/charts.html", _use)),
        Fragment("region-pools", "Pools", ("regions:{key}", "machines"), "fleet/regions/pools.html", POOL_LIST.page),
        Fragment("region-images", "Images", ("regions:{key}",), "fleet/regions/images.html", _images),
        *deferred(Fragment("region-tree", "Where its nodes are", ("nodes", "cells"), "fleet/regions/tree.html", _tree)),
        Fragment("region-events", "Events", ("events",), "dashboard/events/list.html", _events),
    ),
    charts=True,
    ranges=OF_LOAD,
    lists=(POOL_LIST,),
)


def _pool(region: str, pool_id: int) -> CapacityPool:
    return found_or_404(
        CapacityPool.objects.filter(region_id=region, pk=pool_id).first(), f"pool {pool_id} in {region!r}"
    )


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


@action(replace(REGION_TARGET, url=lambda region: f"{reverse('region', args=(region.pk,))}#region-pools"))
def pool_add_action(form: Submission, region: Region) -> None:
    body = form.valid(DeclarePoolSerializer, "instance_type", "market", "zone", "max_price", region=region.pk)
    new = NewPool(region.pk, body["instance_type"], body["zone"], Market(body["market"]), body["max_price"])
    pool_declare(new, actor=form.actor, now=form.now)


def _move(region: str, move_id: int) -> ImageMove:
    return found_or_404(
        ImageMove.objects.filter(region_id=region, pk=move_id).first(), f"move {move_id} to another image in {region!r}"
    )


def _images_of(region: str) -> str:
    return f"{reverse('region', args=(region,))}#region-images"


@action(replace(REGION_TARGET, url=lambda region: _images_of(region.pk)))
def image_move_action(form: Submission, region: Region) -> None:
    body = form.valid(AskImageSerializer, "instance_type", "image", "why", region=region.pk)
    last = ImageMove.objects.filter(region=region, instance_type_id=body["instance_type"]).first()
    if last is not None:
        event = f"was requested by {last.asked_by}" if last.ended_at is None else f"ended ({last.state})"
        sent = f"{body['instance_type']} to {body['image'] or 'the image that its stack states'}"
        refuse_newer(form, last.ended_at or last.asked_at, f"the move of {last} {event}", sent)
    image_move_request(region.pk, body["instance_type"], body["image"], actor=form.actor, now=form.now, why=body["why"])


@action(Target(noun="move", find=_move, name=str, url=lambda move: _images_of(move.region_id)))
def image_back_action(form: Submission, move: ImageMove) -> None:
    image_move_roll_back(move.pk, actor=form.actor, now=form.now)
