"""Pairs machines of a cloud by their described topology, launched in random order, and compares the total network
distance with the best known: local search with twenty times the exchanges.

    .venv/bin/python bench/cloud_pairing.py [--machines 256] [--seeds 20]

Needs nothing but the checkout. Also prints how long the calls take that ask for the topology, at the rate EC2 allows.
"""

import argparse
import random
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fleet.planning.call_budget import TOPOLOGY_CALL_EVERY_S
from fleet.planning.cloud_topology import PlacedMachine, batches, path_of
from fleet.planning.placement import local_search
from fleet.planning.placement.distance import Path as NetworkPath
from fleet.planning.placement.distance import total_distance
from fleet.planning.placement.planner import Placed, Placement, PlacementRequest
from fleet.planning.snapshot import NodeView
from tests.fleet.planning.fleets import KIND, NOW, fleet, node

DEPTH = 4
"""Zone, and three network nodes."""
TIMES = 20
SHARE = 1.05


def machines_of(count: int, seed: int) -> list[NodeView]:
    """Machines as EC2 gives them: of two zones, in uneven groups below three levels of network nodes, in random order
    of launch. One in five of the places has been taken by others."""
    chance = random.Random(seed)
    places: list[NetworkPath] = []
    number = 0
    while len(places) < count:
        spine, leaf = number // 16, number // 4 % 4
        zone = f"use1-az{1 + spine % 2}"
        here = path_of(zone, (f"nn-{spine}", f"nn-{spine}-{leaf}", f"nn-{spine}-{leaf}-{number // 2 % 2}"))
        places += [here] * chance.choice((0, 1, 1, 2, 3))
        number += 1
    places = places[:count]
    chance.shuffle(places)
    return [node(f"n-{index:04d}", topology=path) for index, path in enumerate(places)]


def paired(machines: Iterable[NodeView], size: int, times: int) -> tuple[int, float]:
    """Total distance of all cells that there are machines for, and the processor seconds that it took."""
    there = list(machines)
    view = replace(fleet(), nodes={one.id: one for one in there})
    orders = [PlacementRequest(f"c{n}", "llama", "east", KIND, size) for n in range(len(there) // size)]
    began = time.process_time()
    with patch.object(local_search, "MAX_EXCHANGES", local_search.MAX_EXCHANGES * times):
        results = Placement(view).place(orders).values()
    took = time.process_time() - began
    cells = [[one.topology for one in result.nodes] for result in results if isinstance(result, Placed)]
    if len(cells) != len(orders):
        raise RuntimeError(f"{len(orders) - len(cells)} cells found no place")
    return total_distance(cells, DEPTH), took


def in_order(machines: Iterable[NodeView], size: int) -> int:
    """As they were launched."""
    paths = [one.topology for one in machines]
    return total_distance([paths[at : at + size] for at in range(0, len(paths) - size + 1, size)], DEPTH)


def main() -> int:
    """Print the table; 1 if a total is beyond the goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=256)
    parser.add_argument("--seeds", type=int, default=20)
    args = parser.parse_args()
    print(f"{args.machines} machines, {args.seeds} seeds; means, and the worst share of the best known")
    print("| nodes a cell | in order of launch | paired | best known | paired / best, worst | CPU s |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    worst_of_all = 0.0
    for size in (2, 4):
        rows = []
        for seed in range(args.seeds):
            machines = machines_of(args.machines, seed)
            (found, took), (best, _) = paired(machines, size, 1), paired(machines, size, TIMES)
            rows.append((in_order(machines, size), found, min(best, found), took))
        launched, found, best, took = (sum(column) / len(rows) for column in zip(*rows, strict=True))
        worst = max(row[1] / row[2] if row[2] else float(row[1] == 0) for row in rows)
        worst_of_all = max(worst_of_all, worst)
        print(f"| {size} | {launched:.1f} | {found:.1f} | {best:.1f} | {worst:.3f} | {took:.3f} |")
    asked = batches((PlacedMachine(f"i-{number}", NOW) for number in range(args.machines)), NOW)
    took_s = len(asked) * TOPOLOGY_CALL_EVERY_S
    print(f"topology of {args.machines} machines: {len(asked)} calls, {took_s:.2f} s at our rate")
    return int(worst_of_all > SHARE)


if __name__ == "__main__":
    sys.exit(main())
