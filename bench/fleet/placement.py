"""Time to place all cells of a region with 10,000 spare nodes.

    .venv/bin/python -m bench placement [--out docs/bench/placement.md]

Needs nothing but the checkout. Times are processor seconds of this one process; fleets come from fixed seeds."""

import argparse
import random
import time
from dataclasses import dataclass, replace
from pathlib import Path

from bench import PAGES, table
from fleet.placement.planning.distance import Path as NetworkPath
from fleet.placement.planning.distance import total_distance
from fleet.placement.planning.planner import Placed, Placement, PlacementRequest
from fleet.reconcile.planning.snapshot import FleetView
from simulator.fleet_spec import KIND, DeploymentSpec, FleetSpec, build_fleet

NODES = 10_000
DEPTH = 3
RACKS_PER_ROW, ROWS_PER_HALL = 8, 16
DEPLOYMENTS = 5
USED = 0.95
"""Share of the spares that the orders ask for."""
ROUNDS = 3
"""The least of so many timings counts: others use the processor too."""

HEAD = (
    "machines a rack", "of them spare", "nodes a cell", "cells requested", "placed", "CPU s",
    "levels between two nodes",
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A region: machines a rack, which share of them is spare, and how many nodes a cell takes."""

    rack: int
    spare: float
    sizes: tuple[int, ...]
    within: int = 0


SHAPES = (
    Shape(16, 1.0, (2,)),
    Shape(16, 1.0, (4,)),
    Shape(16, 0.6, (4,)),
    Shape(16, 0.6, (1, 2, 4, 8)),
    Shape(16, 0.6, (4,), within=3),
    Shape(4, 0.6, (4,)),
    Shape(32, 0.5, (8,)),
    Shape(1, 1.0, (4,)),
)


def region(shape: Shape, seed: int) -> tuple[FleetView, list[PlacementRequest]]:
    """A region with `NODES` spares, scattered over its racks, and the cells to place."""
    chance = random.Random(seed)
    places: list[NetworkPath] = []
    rack = 0
    while len(places) < NODES:
        row, hall = rack // RACKS_PER_ROW, rack // RACKS_PER_ROW // ROWS_PER_HALL
        spare = sum(chance.random() < shape.spare for _ in range(shape.rack))
        places += [(f"h{hall}", f"w{row}", f"r{rack}")] * spare
        rack += 1
    empty = build_fleet(FleetSpec((DeploymentSpec("d", {"east": 0}),), spares=NODES))
    nodes = {node.id: replace(node, topology=place) for node, place in zip(empty.nodes.values(), places, strict=False)}
    orders: list[PlacementRequest] = []
    requested = 0
    while requested < NODES * USED:
        size = chance.choice(shape.sizes)
        requested += size
        name = f"d{len(orders) % DEPLOYMENTS}"
        orders.append(PlacementRequest(f"c{len(orders):05d}", name, "east", KIND, size, within=shape.within))
    return replace(empty, nodes=nodes), orders


def timed(shape: Shape) -> tuple[float, int, int, int, int]:
    """Processor seconds; cells requested, cells placed, pairs of their nodes, and their total distance."""
    view, orders = region(shape, seed=1)
    seconds, answers = [], {}
    for _ in range(ROUNDS):
        start = time.process_time()
        answers = Placement(view).place(orders)
        seconds.append(time.process_time() - start)
    placed = [answer.nodes for answer in answers.values() if isinstance(answer, Placed)]
    pairs = sum(len(nodes) * (len(nodes) - 1) // 2 for nodes in placed)
    distance = total_distance([[member.topology for member in nodes] for nodes in placed], DEPTH)
    return min(seconds), len(orders), len(placed), pairs, distance


def speed_rows() -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for shape in SHAPES:
        seconds, requested, placed, pairs, distance = timed(shape)
        sizes = ", ".join(map(str, shape.sizes)) + (f" under one of level {shape.within}" if shape.within else "")
        mean = f"{distance / pairs:.3f}" if pairs else "0"
        rows.append((str(shape.rack), f"{shape.spare:.0%}", sizes, str(requested), str(placed), f"{seconds:.2f}", mean))
    return rows


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=PAGES / "placement.md")
    chosen = parser.parse_args()
    speed = table(HEAD, speed_rows())
    text = (
        "# Placement\n\nWritten by `python -m bench placement`; do not edit.\n\n"
        f"Placing all cells of a region with {NODES} spares, in CPU seconds of one core:\n\n{speed}\n"
    )
    chosen.out.write_text(text)
    print(text)
