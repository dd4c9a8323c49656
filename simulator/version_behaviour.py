"""What engines of a version really do, which planners can only find out: how long they load, whether they start, last,
answer right and in time. Data, and the counts that follow from it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache

from engine_agent.protocol.metrics import bucket_of
from fleet.planning.load.counters import CellCounters

SPREAD = ((0.6, 0.1), (0.8, 0.2), (1.0, 0.3), (1.2, 0.2), (1.5, 0.12), (2.0, 0.06), (3.0, 0.02))
"""How latencies spread around the typical one: factor, share. A heavy tail, as serving has."""
TTFT_S = 0.2
ITL_S = 0.02
TOKENS_PER_REQUEST = 20


@dataclass(frozen=True, slots=True)
class VersionBehaviour:
    """Seconds; `load_spread` is the share by which loading varies. `fails_after_s`: it ends so long after it was ready.

    `error_share` of its requests fail, `slowness` multiplies its latencies, `requests_per_s` is what a cell serves.
    """

    load_s: float = 20.0
    load_spread: float = 0.2
    never_starts: bool = False
    fails_after_s: float | None = None
    answers_wrong: bool = False
    error_share: float = 0.0
    slowness: float = 1.0
    requests_per_s: float = 5.0


def counted(behaviour: VersionBehaviour, generation: int, served_s: float) -> CellCounters:
    """What a cell has counted after so long in service, as its proxy would say."""
    requests = int(behaviour.requests_per_s * served_s)
    errors = int(requests * behaviour.error_share)
    answered = requests - errors
    return CellCounters(
        generation=generation,
        requests=requests,
        errors=errors,
        ttft=_counts(TTFT_S * behaviour.slowness, answered),
        itl=_counts(ITL_S * behaviour.slowness, answered * TOKENS_PER_REQUEST),
    )


@lru_cache(maxsize=4096)
def _counts(typical_s: float, samples: int) -> Mapping[int, int]:
    """Cells that came into service together have counted the same."""
    return {bucket: int(share * samples) for bucket, share in _shares(typical_s).items()}


@cache
def _shares(typical_s: float) -> Mapping[int, float]:
    shares: dict[int, float] = {}
    for factor, share in SPREAD:
        bucket = bucket_of(typical_s * factor)
        shares[bucket] = shares.get(bucket, 0.0) + share
    return shares
