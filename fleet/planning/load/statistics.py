"""Compares two sets of samples that were counted in buckets: quantiles, shares, and whether a difference is chance.

Pure. A bucket's number stands for its samples' rank: what lies in one bucket is a tie.
"""

import math
from collections.abc import Mapping

Counts = Mapping[int, int]
"""Bucket -> number of samples; buckets are ordered by their number."""


def total(counts: Counts) -> int:
    return sum(counts.values())


def quantile_bucket(counts: Counts, q: float) -> int:
    """The bucket in which the `q` quantile (0..1) lies.

    Raises:
        ValueError: there are no samples.
    """
    wanted, seen = max(1, math.ceil(q * total(counts))), 0
    for bucket in sorted(counts):
        seen += counts[bucket]
        if seen >= wanted:
            return bucket
    raise ValueError("no samples have no quantile")


def count_above(counts: Counts, bucket: int) -> int:
    """Number of samples in higher buckets."""
    return sum(count for other, count in counts.items() if other > bucket)


def greater_by_chance(one: Counts, other: Counts) -> float:
    """Probability that samples of one kind would be split into these two with `one` ranking this high above `other`.

    Mann-Whitney U, one-sided, normal approximation with continuity and tie correction (Lehmann, Nonparametrics, 1.4);
    good from about 20 samples each. 1.0 where either is empty or all samples are alike.
    """
    n, m = total(one), total(other)
    if not n or not m:
        return 1.0
    below, u, ties = 0, 0.0, 0.0
    for bucket in sorted({*one, *other}):
        here, there = one.get(bucket, 0), other.get(bucket, 0)
        u += here * (below + there / 2)
        below += there
        ties += (here + there) ** 3 - (here + there)
    size = n + m
    variance = n * m / 12 * (size + 1 - ties / (size * (size - 1)))
    if variance <= 0:
        return 1.0
    return _upper_tail((u - n * m / 2 - 0.5) / math.sqrt(variance))


def more_by_chance(hits: int, tries: int, other_hits: int, other_tries: int) -> float:
    """Probability that `hits` or more of all hits fall among these tries if both kinds of tries are alike.

    Fisher's exact test, one-sided: the hypergeometric tail. 1.0 without tries or hits.
    """
    all_hits, all_tries = hits + other_hits, tries + other_tries
    if not tries or not other_tries or not all_hits:
        return 1.0
    whole = _log_choose(all_tries, tries)
    most = min(all_hits, tries)
    chances = (
        math.exp(_log_choose(all_hits, k) + _log_choose(all_tries - all_hits, tries - k) - whole)
        for k in range(max(hits, tries - (all_tries - all_hits)), most + 1)
    )
    return min(1.0, math.fsum(chances))


def _upper_tail(z: float) -> float:
    return 0.5 * math.erfc(z / math.sqrt(2))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
