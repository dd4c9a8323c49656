"""Which measured configuration is best for a use, and which are best at something: the Pareto set. Pure.

Two are compared only if they were measured under the same workload and objective; machines may differ, so that what is
compared is per chip, per user, per token.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class Aim(StrEnum):
    """What is wanted most: requests inside the objective per chip, a fast stream, few dollars, or few joules."""

    GOODPUT = "goodput"
    SPEED = "speed"
    COST = "cost"
    ENERGY = "energy"


@dataclass(frozen=True, slots=True)
class Measured:
    """A benchmark that is done, at the rate that held. `split`: how its cells were told apart by role, empty: all were
    mixed. None: not known, as of a machine without a price."""

    benchmark: int
    version: str
    instance_type: str
    split: str
    goodput_per_chip: float
    tokens_per_s_per_chip: float
    tokens_per_s_per_user: float | None
    dollars_per_mtoken: float | None
    joules_per_token: float | None

    @property
    def text(self) -> str:
        """What runs, where, and how its cells are told apart."""
        return f"{self.version} on {self.instance_type}" + (f" as {self.split}" if self.split else "")


@dataclass(frozen=True, slots=True)
class Best:
    chosen: Measured
    reason: str


_WORDS: Mapping[Aim, tuple[str, Callable[[Measured], float | None], bool]] = MappingProxyType(
    {
        Aim.GOODPUT: ("requests a second and chip", lambda one: one.goodput_per_chip, True),
        Aim.SPEED: ("tokens a second for each user", lambda one: one.tokens_per_s_per_user, True),
        Aim.COST: ("dollars a million tokens", lambda one: one.dollars_per_mtoken, False),
        Aim.ENERGY: ("joules a token", lambda one: one.joules_per_token, False),
    }
)


def best_configuration(measured: Iterable[Measured], aim: Aim) -> Best | None:
    """The best, and why; None where nothing was measured that says so. Of equals the newest."""
    words, value, is_more = _WORDS[aim]
    known = [(number, one) for one in measured if (number := value(one)) is not None]
    if not known:
        return None
    ranked = sorted(known, key=lambda pair: (-pair[0] if is_more else pair[0], -pair[1].benchmark))
    number, chosen = ranked[0]
    others = [pair for pair in ranked if pair[1].text != chosen.text]
    reason = f"{number:.4g} {words}"
    if not others:
        return Best(chosen, f"{reason}; nothing else was measured so")
    second, other = others[0]
    return Best(chosen, f"{reason}, {second:.4g} of {other.text} behind it")


def pareto_set(points: Mapping[int, tuple[float, float]]) -> frozenset[int]:
    """Those that no other beats in both numbers, more being better."""
    front, best = set(), float("-inf")
    by_first = sorted(points, key=lambda name: (-points[name][0], -points[name][1]))
    for name in by_first:
        if points[name][1] > best:
            front.add(name)
            best = points[name][1]
    return frozenset(front)
