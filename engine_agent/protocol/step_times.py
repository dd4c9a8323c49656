"""The buckets in which both sides sort decode steps by their batch size, so that only like is compared with like. Pure.

Bucket b holds steps of more than 2^(b-1) and at most 2^b sequences: bucket 0 of one, 1 of two, 2 of three and four, …
"""

LARGEST_BUCKET = 16
"""Batches of 65,536 sequences and more."""


def batch_bucket(sequences: int) -> int:
    """Index of the bucket of a step with so many sequences, at least 1."""
    return min(max(sequences - 1, 0).bit_length(), LARGEST_BUCKET)
