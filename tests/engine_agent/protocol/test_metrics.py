"""Batch sizes and their buckets."""

import pytest

from engine_agent.protocol.metrics import LARGEST_BATCH_BUCKET, batch_bucket


@pytest.mark.parametrize(("sequences", "bucket"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4), (64, 6)])
def test_a_bucket_ends_at_a_power_of_two(sequences: int, bucket: int) -> None:
    assert batch_bucket(sequences) == bucket


def test_there_is_a_largest_bucket() -> None:
    assert batch_bucket(10**9) == LARGEST_BATCH_BUCKET
