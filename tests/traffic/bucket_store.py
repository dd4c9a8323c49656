"""A store in a bucket of the test cloud, with all calls of this host directed there."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest

from fleet.clouds.aws import calls
from fleet.clouds.aws import objects as object_stream
from lab.cloud.server import World, serve
from lab.cloud.world import Ending, Fault, When

FILES = "s3://switchyard-files/east"


@contextmanager
def cloud_of_files(patch: pytest.MonkeyPatch, *buckets: str) -> Iterator[World]:
    """A cloud with these buckets; calls go there and are not retried."""
    world = World()
    with serve(world):
        clients = cache(world.client)
        patch.setattr(calls, "client", lambda service, region, once: clients(service, region))
        patch.setattr(object_stream, "PAUSE_S", 0.0)
        s3 = clients("s3", "us-east-1")
        for bucket in ("switchyard-files", *buckets):
            s3.create_bucket(Bucket=bucket)
        yield world
        world.faults.clear()
        for bucket in ("switchyard-files", *buckets):  # names are global, also for the next test
            for key in keys(world, bucket):
                s3.delete_object(Bucket=bucket, Key=key)
            s3.delete_bucket(Bucket=bucket)
    assert world.bugs == []


def keys(world: World, bucket: str = "switchyard-files") -> list[str]:
    found = world.client("s3").list_objects_v2(Bucket=bucket).get("Contents", ())
    return [each["Key"] for each in found]


def uploads(world: World, bucket: str = "switchyard-files") -> list[Any]:
    return list(world.client("s3").list_multipart_uploads(Bucket=bucket).get("Uploads", ()))


def lost_answer(operation: str) -> Fault:
    """The call is carried out, but its response is lost."""
    return Fault(operation, when=When.AFTER, ending=Ending.RESET)


def torn_body(operation: str = "GetObject", times: int = 1) -> Fault:
    return Fault(operation, when=When.AFTER, ending=Ending.CUT, times=times)
