"""Which members of a cell run the same software, as their agents reported, before an engine has started.

Pure. The engines compare again when they meet, with flags and weights; this is what a placement, a page and the gate
before `ready` can know. A node that has reported nothing yet is left out: that is no difference.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine_agent.protocol.fingerprint import (
    Difference,
    Fingerprint,
    Rank,
    differing_fields,
    engine_fingerprint,
    fingerprint_digest,
)


@dataclass(frozen=True, slots=True)
class StackGroup:
    """Members that run the same, in the order of their ranks."""

    digest: str
    ranks: tuple[Rank, ...]


@dataclass(frozen=True, slots=True)
class StackComparison:
    """Members grouped by what they run, the group of the lowest rank first; `differing` has values by `ranks`."""

    ranks: tuple[Rank, ...]
    groups: tuple[StackGroup, ...]
    differing: tuple[Difference, ...]


def stack_digest(machine: Fingerprint, engine: str) -> str:
    """Equal for nodes that may be in one cell of this engine; empty for a node that has not reported what it runs."""
    return fingerprint_digest(engine_fingerprint(machine, engine)) if machine else ""


def member_stacks(engine: str, members: Iterable[tuple[int, str, Fingerprint]]) -> tuple[Rank, ...]:
    """What members (rank, node, fingerprint of the machine) run of this engine, by rank."""
    known = (Rank(rank, node, engine_fingerprint(machine, engine)) for rank, node, machine in members if machine)
    return tuple(sorted(known, key=lambda rank: rank.rank))


def compare_stacks(ranks: Sequence[Rank]) -> StackComparison:
    """Groups and differing fields of the members of a cell."""
    groups: dict[str, list[Rank]] = {}
    for rank in ranks:
        groups.setdefault(fingerprint_digest(rank.fingerprint), []).append(rank)
    return StackComparison(
        ranks=tuple(ranks),
        groups=tuple(StackGroup(digest, tuple(members)) for digest, members in groups.items()),
        differing=differing_fields([rank.fingerprint for rank in ranks]),
    )
