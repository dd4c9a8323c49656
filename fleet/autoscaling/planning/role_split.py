"""How many cells of a region have which role, and which of them a rollout moves next. Pure arithmetic.

Prefill cells read prompts for decode cells and answer nobody. Decode cells answer, and read prompts themselves while no
prefill cell is there for them. Mixed cells do both. So a place that has cells never has prefill cells alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from engine_agent.protocol.states import CellRole

ORDER = (CellRole.PREFILL, CellRole.DECODE, CellRole.MIXED)
"""Of a rollout: a new prefill cell waits for nobody, and the first new decode cell finds it."""
NEEDED_FIRST = (CellRole.DECODE, CellRole.MIXED, CellRole.PREFILL)
"""Of cells that are missing: those first that answer."""


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
        """Those that requests are sent to."""
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
    """`total` cells of which so many are stated to be prefill and decode cells, and the rest mixed. Where they do not
    fit, as while machines are short, their proportion is kept, with one of each; a single cell is mixed, and so are all
    where either has none."""
    if prefill == 0 or decode == 0 or total < 2:
        return RoleSplit(mixed=total)
    if prefill + decode <= total:
        return RoleSplit(total - prefill - decode, prefill, decode)
    fewer = min(max(1, total * prefill // (prefill + decode)), total - 1)
    return RoleSplit(0, fewer, total - fewer)


def most_lacking(there: RoleSplit, wanted: RoleSplit) -> CellRole | None:
    """The role of which cells are missing that counts most; None: none is. A first one that answers comes before all:
    the last mixed cell of a place may become another one only once a decode cell is there."""
    missing = [role for role in NEEDED_FIRST if there.of(role) < wanted.of(role)]
    if not missing:
        return None
    if there.of(missing[0]) == 0 and answers(missing[0]):
        return missing[0]
    return min(missing, key=lambda role: (there.of(role) / wanted.of(role), ORDER.index(role)))


def next_to_move(moved: RoleSplit, wanted: RoleSplit) -> tuple[CellRole, ...]:
    """Roles in the order in which a rollout should move one cell more, after it has moved `moved` of `wanted`: that of
    which it has moved the least part. So new and old cells keep their proportion, and both have their pairs for as long
    as there are two cells of each role."""
    return tuple(
        sorted(
            (role for role in ORDER if moved.of(role) < wanted.of(role)),
            key=lambda role: (moved.of(role) / wanted.of(role), ORDER.index(role)),
        )
    )


def beyond(there: RoleSplit, wanted: RoleSplit) -> frozenset[CellRole]:
    """Roles of which there are more cells than wanted."""
    return frozenset(role for role in ORDER if there.of(role) > wanted.of(role))
