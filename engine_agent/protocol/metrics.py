"""Metrics that all processes share: buckets of latencies and of batch sizes, and Prometheus's text format 0.0.4.
Latency buckets grow by 2^(1/8) from 0.1 ms, so percentiles are right to about 4.5 % at any load. Decode steps are
sorted by batch size so that only similar steps are compared: bucket b holds steps of more than 2^(b-1) and at most 2^b
sequences, bucket 0 of 1, bucket 1 of 2, bucket 2 of 3 and 4, …"""

import math
from collections.abc import Mapping

FIRST_EDGE_S = 1e-4
BUCKETS_PER_DOUBLING = 8
DOUBLINGS = 23
"""Up to 839 s, beyond the longest silence of a request."""
BUCKETS = BUCKETS_PER_DOUBLING * DOUBLINGS + 2
"""One below the first edge and one above the last."""


def bucket_of(value_s: float) -> int:
    """Index of the first bucket whose upper edge is >= `value_s`."""
    if value_s <= FIRST_EDGE_S:
        return 0
    index = math.ceil(math.log2(value_s / FIRST_EDGE_S) * BUCKETS_PER_DOUBLING - 1e-9)
    return min(index, BUCKETS - 1)


def upper_edge_s(index: int) -> float:
    return FIRST_EDGE_S * math.exp2(index / BUCKETS_PER_DOUBLING)


def midpoint_s(index: int) -> float:
    """Geometric middle of a bucket in seconds, the value with the smallest relative error."""
    return upper_edge_s(index) * math.exp2(-0.5 / BUCKETS_PER_DOUBLING)


LARGEST_BATCH_BUCKET = 16
"""Batches of 65,536 sequences and more."""


def batch_bucket(sequences: int) -> int:
    """Bucket of a decode step with this many sequences (>= 1)."""
    return min(max(sequences - 1, 0).bit_length(), LARGEST_BATCH_BUCKET)


CONTENT_TYPE = b"text/plain; version=0.0.4"


def family(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


def sample(name: str, labels: Mapping[str, str], value: float) -> str:
    text = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels.items())
    return f"{name}{{{text}}} {value}"


def single(name: str, kind: str, text: str, labels: Mapping[str, str], value: float) -> list[str]:
    return [*family(name, kind, text), sample(name, labels, value)]


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
