"""Times the placing of every cell of a region, and compares the total network distance with the exact optimum.

    .venv/bin/python bench/placement.py [--cases 2000] [--out docs/bench/placement.md]

Needs nothing but the checkout. Times are processor seconds of this one process; fleets and cases come from fixed seeds.
"""

import argparse
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fleet.planning.placement.distance import Path as NetworkPath
from fleet.planning.placement.distance import total_distance
from fleet.planning.placement.planner import Placed, Placement, PlacementRequest
from fleet.planning.snapshot import FleetView
from tests.fleet.planning.fleets import KIND, fleet, node
from tests.fleet.planning.placement.exact_packing import smallest_distance

NODES = 10_000
DEPTH = 3
RACKS_PER_ROW, ROWS_PER_HALL = 8, 16
DEPLOYMENTS = 5
USED = 0.95
"""Share of the spares that the orders ask for."""
ROUNDS = 3
"""The least of so many timings counts: others use the processor too."""


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
    nodes = [node(f"n-{index:05d}", topology=place) for index, place in enumerate(places[:NODES])]
    orders: list[PlacementRequest] = []
    requested = 0
    while requested < NODES * USED:
        size = chance.choice(shape.sizes)
        requested += size
        name = f"d{len(orders) % DEPLOYMENTS}"
        orders.append(PlacementRequest(f"c{len(orders):05d}", name, "east", KIND, size, within=shape.within))
    return fleet(*nodes, wanted=0), orders


def timed(shape: Shape) -> tuple[float, int, int, int, int]:
    """Processor seconds; cells requested, cells placed, pairs of their nodes, and their total distance."""
    seconds = []
    for _ in range(ROUNDS):
        view, orders = region(shape, seed=1)
        start = time.process_time()
        answers = Placement(view).place(orders)
        seconds.append(time.process_time() - start)
    placed = [answer.nodes for answer in answers.values() if isinstance(answer, Placed)]
    pairs = sum(len(nodes) * (len(nodes) - 1) // 2 for nodes in placed)
    distance = total_distance([[member.topology for member in nodes] for nodes in placed], DEPTH)
    return min(seconds), len(orders), len(placed), pairs, distance


def small_case(chance: random.Random) -> tuple[list[NetworkPath], list[int]]:
    """4 to 14 machines in random places, and 1 to 4 cells of up to 6 nodes that fit on them."""
    fan = chance.choice((2, 3, 4))
    places = [tuple(f"{level}{chance.randrange(fan)}" for level in range(DEPTH)) for _ in range(chance.randint(4, 14))]
    sizes: list[int] = []
    for _ in range(chance.randint(1, 4)):
        size = chance.choice((2, 2, 3, 4, 4, 5, 6))
        if sum(sizes) + size <= len(places):
            sizes.append(size)
    return places, sizes or [2]


def ratio(places: list[NetworkPath], sizes: list[int]) -> float:
    """Total distance of the planner's cells over the smallest that is possible."""
    view = fleet(*(node(f"n{index:02d}", topology=place) for index, place in enumerate(places)), wanted=0)
    requests = [PlacementRequest(f"c{index}", "d", "east", KIND, size) for index, size in enumerate(sizes)]
    answers = Placement(view).place(requests)
    cells = [[n.topology for n in answer.nodes] for answer in answers.values() if isinstance(answer, Placed)]
    if len(cells) < len(sizes):
        raise RuntimeError(f"cells of {sizes} nodes fit on {places}, but only {len(cells)} were placed")
    found, best = total_distance(cells, DEPTH), smallest_distance(places, sizes, DEPTH)
    return found / best if best else 1.0 + found


def compared(cases: int) -> list[float]:
    """Ratios in rising order; the seed of a case is its number."""
    return sorted(ratio(*small_case(random.Random(seed))) for seed in range(cases))


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def speed_rows() -> list[tuple[str, ...]]:
    rows = []
    for shape in SHAPES:
        seconds, requested, placed, pairs, distance = timed(shape)
        sizes = ", ".join(map(str, shape.sizes)) + (f" under one of level {shape.within}" if shape.within else "")
        mean = f"{distance / pairs:.3f}" if pairs else "0"
        rows.append((str(shape.rack), f"{shape.spare:.0%}", sizes, str(requested), str(placed), f"{seconds:.2f}", mean))
    return rows


def quality_rows(ratios: list[float]) -> list[tuple[str, ...]]:
    def at(share: float) -> str:
        return f"{ratios[min(len(ratios) - 1, int(share * len(ratios)))]:.4f}"

    optimal = sum(found <= 1.0 for found in ratios) / len(ratios)
    within = sum(found <= 1.02 for found in ratios) / len(ratios)
    mean = f"{sum(ratios) / len(ratios):.5f}"
    return [
        (str(len(ratios)), f"{optimal:.2%}", f"{within:.2%}", mean, at(0.5), at(0.99), at(0.999), f"{ratios[-1]:.4f}")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "bench" / "placement.md")
    chosen = parser.parse_args()
    speed = table(
        (
            "machines a rack",
            "of them spare",
            "nodes a cell",
            "cells requested",
            "placed",
            "CPU s",
            "levels between two nodes",
        ),
        speed_rows(),
    )
    quality = table(
        ("random cases", "optimal", "within 2 %", "mean ratio", "p50", "p99", "p99.9", "max"),
        quality_rows(compared(chosen.cases)),
    )
    text = (
        "# Placement\n\nWritten by `bench/placement.py`; do not edit.\n\n"
        f"Placing all cells of a region with {NODES} spares, in processor seconds of one core:\n\n{speed}\n\n"
        "Total network distance over the exact optimum, small random cases (4 to 14 machines, cells of 2 to 6):\n\n"
        f"{quality}\n"
    )
    chosen.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
