"""The stacks of an install with all that can be switched on, and of one region, in the cloud of tests."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from bench.cloud.deployment import deploy_base, deploy_region
from bench.cloud.server import World, serve

INSTALL = "sw-0123456789ab"
KEY = "arn:aws:kms:us-east-1:123456789012:key/0a1b"


@dataclass
class Deployed:
    world: World
    base: dict[str, str]
    region: dict[str, str]


@pytest.fixture(scope="package")
def deployed() -> Iterator[Deployed]:
    """Deployed once, for it takes 2 s, and only looked at."""
    world = World()
    with serve(world):
        base = deploy_base(
            world, INSTALL, ArtifactKeyArn=KEY, HostedZoneId="Z0ENTRY", Accelerator="yes", AlarmEmail="a@example.com"
        )
        names = {"ZoneC": "us-east-1c", "EntryName": "llm.example.com", "PlainHttp": "yes"}
        yield Deployed(world, base, deploy_region(world, "us-east-1", base, **names))
    assert world.bugs == []
