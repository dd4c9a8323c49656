"""The buckets in which both sides count latencies. Pure.

Buckets grow by 2^(1/8) from 0.1 ms, so a percentile is right to about 4.5 % whatever the load.
"""

import math

FIRST_EDGE_S = 1e-4
BUCKETS_PER_DOUBLING = 8
DOUBLINGS = 23
"""Up to 839 s, beyond the longest silence of a request."""
BUCKETS = BUCKETS_PER_DOUBLING * DOUBLINGS + 2
"""One below the first edge, one above the last."""


def bucket_of(value_s: float) -> int:
    """Index of the bucket whose upper edge is the first one >= `value_s`."""
    if value_s <= FIRST_EDGE_S:
        return 0
    index = math.ceil(math.log2(value_s / FIRST_EDGE_S) * BUCKETS_PER_DOUBLING - 1e-9)
    return min(index, BUCKETS - 1)


def upper_edge_s(index: int) -> float:
    """Upper edge of a bucket in seconds."""
    return FIRST_EDGE_S * math.exp2(index / BUCKETS_PER_DOUBLING)


def middle_s(index: int) -> float:
    """Geometric middle of a bucket in seconds: the value with the smallest relative error."""
    return upper_edge_s(index) * math.exp2(-0.5 / BUCKETS_PER_DOUBLING)
