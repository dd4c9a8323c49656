"""How many cells of a region have which role, and which role a rollout moves next. Prefill cells compute prompts for
decode cells and answer no requests. Decode cells answer, and compute prompts themselves while no prefill cell is
available. Mixed cells do both. A place with cells never has only prefill cells."""

from collections.abc import Iterable
from dataclasses import dataclass

from engine_agent.protocol.states import CellRole

ORDER = (CellRole.PREFILL, CellRole.DECODE, CellRole.MIXED)
"""Order of a rollout: a new prefill cell waits for no other, and the first new decode cell finds it."""
NEEDED_FIRST = (CellRole.DECODE, CellRole.MIXED, CellRole.PREFILL)
"""Order of missing cells: those that answer first."""


@dataclass(frozen=True, slots=True)
class RoleSplit:
    mixed: int = 0
    prefill: int = 0
    decode: int = 0

    @property
    def total(self) -> int:
        return self.mixed + self.prefill + self.decode

    @property
    def answering(self) -> int:
        return self.mixed + self.decode

    @property
    def is_apart(self) -> bool:
        return self.prefill > 0

    def of(self, role: CellRole) -> int:
        return {CellRole.MIXED: self.mixed, CellRole.PREFILL: self.prefill, CellRole.DECODE: self.decode}[role]

    def __str__(self) -> str:
        if not self.prefill and not self.decode:
            return f"{self.mixed} mixed"
        parts = [f"{self.prefill} prefill", f"{self.decode} decode"]
        return ", ".join([*parts, f"{self.mixed} mixed"] if self.mixed else parts)


def answers(role: CellRole) -> bool:
    """Whether requests are sent to cells of this role."""
    return role is not CellRole.PREFILL


def counted(roles: Iterable[CellRole]) -> RoleSplit:
    found = list(roles)
    return RoleSplit(*(found.count(role) for role in (CellRole.MIXED, CellRole.PREFILL, CellRole.DECODE)))


def split_within(total: int, prefill: int, decode: int) -> RoleSplit:
    """`total` cells with the stated prefill and decode cells; the rest is mixed. If they do not fit, their proportion
    is kept with at least one of each. A single cell is mixed, and so are all without one of the roles."""
    if prefill == 0 or decode == 0 or total < 2:
        return RoleSplit(mixed=total)
    if prefill + decode <= total:
        return RoleSplit(total - prefill - decode, prefill, decode)
    fewer = min(max(1, total * prefill // (prefill + decode)), total - 1)
    return RoleSplit(0, fewer, total - fewer)


def most_lacking(there: RoleSplit, wanted: RoleSplit) -> CellRole | None:
    """The most important missing role, or None. A first cell that answers comes first: the last mixed cell may change
    only once there is a decode cell."""
    missing = [role for role in NEEDED_FIRST if there.of(role) < wanted.of(role)]
    if not missing:
        return None
    if there.of(missing[0]) == 0 and answers(missing[0]):
        return missing[0]
    return min(missing, key=lambda role: (there.of(role) / wanted.of(role), ORDER.index(role)))


def next_to_move(moved: RoleSplit, wanted: RoleSplit) -> tuple[CellRole, ...]:
    """Roles in the order in which a rollout moves the next cell after `moved` of `wanted`: the role with the smallest
    moved share first. So old and new cells keep their proportion and their pairs as long as each role has two cells."""
    return tuple(
        sorted(
            (role for role in ORDER if moved.of(role) < wanted.of(role)),
            key=lambda role: (moved.of(role) / wanted.of(role), ORDER.index(role)),
        )
    )


def beyond(there: RoleSplit, wanted: RoleSplit) -> frozenset[CellRole]:
    """Roles with more cells than wanted."""
    return frozenset(role for role in ORDER if there.of(role) > wanted.of(role))
