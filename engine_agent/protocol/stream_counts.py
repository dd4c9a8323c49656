"""Counts of streams that may continue at other cells: by relays, in reports of ingresses, in the control plane. Pure.
Counts only grow, and are added and subtracted by member."""

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, TypeVar

from msgspec import Meta, Struct, field

from engine_agent.protocol.metrics import BUCKETS

MOST = 2**53
Count = Annotated[int, Meta(ge=0, le=MOST)]
Reason = Annotated[str, Meta(pattern=r"^[a-z_]{1,40}$")]
Bucket = Annotated[int, Meta(ge=0, lt=BUCKETS)]
_Key = TypeVar("_Key", str, int)


class PoolStreams(Struct, frozen=True, omit_defaults=True):
    """Streams of a pool whose deployment lets them continue at other cells.

    `relayed_total`: streams that passed a relay. `continued_total` by the reason why they left their cell. `cut_total`:
    ended early, by the reason why no other cell continued them; `unable_total`: could not have continued, whatever
    happened to them; both by code of `engine_agent.relay.continuable.LIMITS`. `repeated_total`: answers that were
    requested again because their cell failed before the client had anything. `pauses`: of streams that continued, by
    bucket of `engine_agent.protocol.metrics`."""

    relayed_total: Count = 0
    continued_total: dict[Reason, Count] = field(default_factory=dict)
    cut_total: dict[Reason, Count] = field(default_factory=dict)
    unable_total: dict[Reason, Count] = field(default_factory=dict)
    repeated_total: Count = 0
    pauses: dict[Bucket, Count] = field(default_factory=dict)


class StreamTotals(Struct, frozen=True):
    """Streams by pool. `since` names the count, which outlives agents and relays; of many pools, reports contain some
    in turns."""

    since: str
    pools: dict[str, PoolStreams] = field(default_factory=dict)


def growth_of(now: PoolStreams, before: PoolStreams) -> PoolStreams:
    """What was counted between two readings of one count."""
    return PoolStreams(
        relayed_total=max(0, now.relayed_total - before.relayed_total),
        continued_total=_less(now.continued_total, before.continued_total),
        cut_total=_less(now.cut_total, before.cut_total),
        unable_total=_less(now.unable_total, before.unable_total),
        repeated_total=max(0, now.repeated_total - before.repeated_total),
        pauses=_less(now.pauses, before.pauses),
    )


def sum_of(one: PoolStreams, other: PoolStreams) -> PoolStreams:
    """The sum, of which no count exceeds `MOST`."""
    return PoolStreams(
        relayed_total=min(MOST, one.relayed_total + other.relayed_total),
        continued_total=_more(one.continued_total, other.continued_total),
        cut_total=_more(one.cut_total, other.cut_total),
        unable_total=_more(one.unable_total, other.unable_total),
        repeated_total=min(MOST, one.repeated_total + other.repeated_total),
        pauses=_more(one.pauses, other.pauses),
    )


def _more(one: Mapping[_Key, int], other: Mapping[_Key, int]) -> dict[_Key, int]:
    return {name: min(MOST, count) for name, count in (Counter(one) + Counter(other)).items()}


def _less(now: Mapping[_Key, int], before: Mapping[_Key, int]) -> dict[_Key, int]:
    left = {name: count - before.get(name, 0) for name, count in now.items()}
    return {name: count for name, count in left.items() if count > 0}
