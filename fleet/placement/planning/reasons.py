"""Words for placement: why a cell was placed where it is, or what is missing. Decides nothing."""

from collections.abc import Sequence
from dataclasses import dataclass

from fleet.placement.planning.distance import common_prefix, distance, failure_domain
from fleet.reconcile.planning.snapshot import NodeView

WAITS = "; waits: "
"""Separates why a cell broke from what its repair waits for."""


@dataclass(frozen=True, slots=True)
class SpareCounts:
    """Spares of a pool: `free` for this cell, of which it may use `allowed`; the largest numbers with the same software
    and also near enough together; `other_markets`: those that it may not use."""

    free: int
    allowed: int
    same_software: int
    near_enough: int
    other_markets: int = 0


def placed(deployment: str, nodes: Sequence[NodeView], depth: int, left: int, others: int) -> str:
    """Why a whole cell is on these nodes. `left`: spares remaining in the group of its first node; `others`: other
    cells of the deployment in its failure domain."""
    names = ", ".join(node.id for node in nodes)
    domain = failure_domain(nodes[0].topology)
    sentence = f"placed on {names}, {_togetherness_text(nodes, depth)}"
    if not domain:
        return sentence
    spread = f"the first cell of {deployment} under {domain}"
    if others:
        spread = f"with {others} other {_plural(others, 'cell')} of {deployment} under {domain}"
    return f"{sentence}: {spread}, leaving {left} {_plural(left, 'spare')} next to it"


def cheaper(taken: Sequence[NodeView], left: Sequence[NodeView]) -> str:
    """The effect of prices among spares of one group, or ""."""
    prices = [node.price_per_hour for node in taken if node.price_per_hour is not None]
    dearer = [node.price_per_hour for node in left if node.price_per_hour is not None]
    if not prices or not dearer or max(prices) >= min(dearer):
        return ""
    return f"; at {max(prices):.2f} $/h, cheaper than the remaining ones at {min(dearer):.2f} $/h"


def joined(staying: Sequence[NodeView], joining: Sequence[NodeView], depth: int) -> str:
    """Why these nodes join those that stay."""
    names = ", ".join(node.id for node in joining)
    verb = "replaces" if len(joining) == 1 else "replace"
    if not all(node.topology for node in (staying[0], *joining)):
        return f"{names} {verb} the lost nodes; the distance to {staying[0].id} is unknown"
    levels = max(distance(node.topology, staying[0].topology, depth) for node in joining)
    return f"{names} {verb} the lost nodes, {_apart_text(levels)} {staying[0].id}: no spare is nearer"


def refused(kind: str, count: int, staying: Sequence[NodeView], within: int, depth: int, seen: SpareCounts) -> str:
    """The first thing that a cell lacks, with the available number."""
    sentence = _missing_text(kind, count, staying, within, depth, seen)
    if not seen.other_markets:
        return sentence
    are = "is of a market" if seen.other_markets == 1 else "are of markets"
    others = _plural(seen.other_markets, "other spare")
    return f"{sentence}; {seen.other_markets} {others} {are} that its deployment does not use"


def _missing_text(
    kind: str, count: int, staying: Sequence[NodeView], within: int, depth: int, seen: SpareCounts
) -> str:
    needs = f"needs {count} {kind}"
    if seen.free < count:
        return f"{needs}; {_spare_text(seen.free)}"
    if staying:
        return (
            f"{needs} {_software_text(staying, within, depth)}; none of {seen.free} {_plural(seen.free, 'spare')} fits"
        )
    if seen.allowed < count:
        kept = seen.free - seen.allowed
        return f"{needs}; {_spare_text(seen.free)} and {kept} of them kept for repair"
    if seen.same_software < count:
        return f"{needs} with the same software; largest group has {seen.same_software}"
    return f"{needs} {_within_text(within, depth)}; largest group has {seen.near_enough}"


def waiting(reason: str, refusal: str, *, is_broken: bool) -> str:
    """The reason of a waiting cell. A broken one keeps the reason of its failure."""
    return f"{reason.partition(WAITS)[0]}{WAITS}{refusal}" if is_broken else refusal


def _togetherness_text(nodes: Sequence[NodeView], depth: int) -> str:
    if not all(node.topology for node in nodes):
        return "whose place in the network is unknown"
    shared = common_prefix([node.topology for node in nodes])
    if len(shared) >= depth:
        return f"under network node {shared[-1]}"
    below = f" under {shared[-1]}" if shared else ""
    return f"at most {_levels(depth - len(shared))} apart{below}"


def _software_text(staying: Sequence[NodeView], within: int, depth: int) -> str:
    names = ", ".join(node.id for node in staying)
    near = f" {_within_text(within, depth)}" if within else ""
    return f"with the software of {names}{near}"


def _within_text(within: int, depth: int) -> str:
    return "under one network node" if within >= depth else f"under one network node of level {within}"


def _apart_text(levels: int) -> str:
    return f"{_levels(levels)} away from" if levels else "under the same network node as"


def _levels(levels: int) -> str:
    return f"{levels} {_plural(levels, 'level')}"


def _spare_text(count: int) -> str:
    return f"{count} {'is' if count == 1 else 'are'} spare"


def _plural(count: int, word: str) -> str:
    return word if count == 1 else word + "s"
