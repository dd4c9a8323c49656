"""Decides which releases of the agent the control plane no longer keeps. Pure: what lies where, and what runs from it,
is for `fleet.services.release_retention` to see."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetentionSettings:
    """How many are kept though nothing names them.

    `newest`: releases that became known last. `rollouts`: agents' rollouts that ended last, with both of their
    releases: the way back.
    """

    newest: int = 5
    rollouts: int = 5


RETENTION = RetentionSettings()


@dataclass(frozen=True, slots=True)
class RolloutReleases:
    """A rollout of agents, as far as it names releases."""

    id: int
    source: str
    target: str
    is_active: bool


@dataclass(frozen=True, slots=True)
class Removal:
    """What goes: rollouts first, because they name releases. `kept`: the releases that stay."""

    rollouts: tuple[int, ...]
    releases: tuple[str, ...]
    kept: frozenset[str]


def plan_removal(
    newest_first: Sequence[str],
    named: Collection[str],
    rollouts: Sequence[RolloutReleases],
    settings: RetentionSettings = RETENTION,
) -> Removal:
    """What of the releases known goes. `named`: those that are current, carried here, run by an agent, or ordered."""
    ended = sorted((rollout for rollout in rollouts if not rollout.is_active), key=lambda each: -each.id)
    forgotten = ended[settings.rollouts :]
    gone = {rollout.id for rollout in forgotten}
    told_of = {name for each in rollouts if each.id not in gone for name in (each.source, each.target)}
    kept = frozenset({*newest_first[: settings.newest], *named, *told_of} - {""})
    return Removal(
        rollouts=tuple(sorted(gone)), releases=tuple(name for name in newest_first if name not in kept), kept=kept
    )
