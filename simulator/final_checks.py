"""Checks of a world at the end of a run: each yields one sentence for everything that is not as it must be."""

from collections.abc import Iterable, Iterator

from fleet.planning.states import CellState
from simulator.world import World


def not_all_ready(world: World) -> Iterator[str]:
    """Places that lack cells, or have too many."""
    for name, spec in world.store.deployments.items():
        for region, wanted in spec.cells_wanted.items():
            cells = [c for c in world.store.cells.values() if (c.deployment, c.region) == (name, region)]
            ready = [cell for cell in cells if cell.state is CellState.READY]
            if len(ready) != wanted or len(cells) != wanted:
                states = ", ".join(f"{cell.id} {cell.state}: {cell.reason}" for cell in cells if cell not in ready)
                yield f"{name} in {region}: {len(ready)} of {wanted} cells are ready; {states or 'none other is there'}"


def not_serving(world: World) -> Iterator[str]:
    """Cells that are called ready and would not answer."""
    for cell in world.store.cells.values():
        if cell.state is CellState.READY and not world.engines.is_serving(cell.id, cell.generation):
            yield f"{cell.id} is called ready and does not answer"


def all_well(world: World) -> Iterator[str]:
    """What a fleet that healed must be."""
    yield from not_all_ready(world)
    yield from not_serving(world)


def never_touched(world: World, kinds: Iterable[str]) -> Iterator[str]:
    """Things that were written down and must not have happened."""
    for kind in kinds:
        if count := world.timeline.counts[kind]:
            example = next(entry for entry in world.timeline.entries if entry.kind == kind)
            yield f"{kind} happened {count} times, first at {example.at_s:.1f} s: {example.subject}: {example.text}"


def mixed_versions(world: World) -> Iterator[str]:
    """Deployments whose cells run several versions, or another than their own."""
    for name, spec in world.store.deployments.items():
        versions = {cell.version for cell in world.store.cells.values() if cell.deployment == name}
        if name not in world.store.rollouts and versions - {spec.version}:
            yield f"{name} should serve {spec.version}; its cells run {', '.join(sorted(versions))}"


def touched_cells(world: World) -> set[str]:
    """Cells that were taken down or broke at any time."""
    kinds = {"cell.draining", "cell.failed", "cell.lost"}
    return {entry.subject for entry in world.timeline.entries if entry.kind in kinds}
