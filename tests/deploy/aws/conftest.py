"""The stacks of an install with all that can be switched on, and of one region, in the cloud of tests."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.layers import ROOT, marks_of

if TYPE_CHECKING:
    from lab.cloud.server import World

INSTALL = "sw-0123456789ab"
KEY = "arn:aws:kms:us-east-1:123456789012:key/0a1b"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test that judges what all others on the cloud did is none of a run of some of them."""
    some = [item for item in items if item.get_closest_marker("whole_layer") is not None]
    if not some:
        return
    there = {path for path in (ROOT / "tests").rglob("test_*.py") if "cloud" in marks_of(path)}
    asked = config.option
    chosen = asked.keyword or asked.markexpr or any("::" in argument for argument in config.args)
    if chosen or not there <= {item.path for item in items}:
        items[:] = [item for item in items if item not in some]
        config.hook.pytest_deselected(items=some)


@dataclass
class Deployed:
    world: "World"
    base: dict[str, str]
    region: dict[str, str]


@pytest.fixture(scope="package")
def deployed() -> Iterator[Deployed]:
    """Deployed once, for it takes 2 s, and only looked at."""
    from lab.cloud.server import World, serve  # every worker loads this file, and moto takes 1.5 CPU seconds
    from lab.cloud.stack import deploy_base, deploy_region

    world = World()
    with serve(world):
        base = deploy_base(world, INSTALL, ArtifactKeyArn=KEY, HostedZoneId="Z0ENTRY", AlarmEmail="a@example.com")
        names = {"ZoneC": "us-east-1c", "EntryName": "llm.example.com", "PlainHttp": "yes", "Grpc": "yes"}
        yield Deployed(world, base, deploy_region(world, "us-east-1", base, **names))
    assert world.bugs == []
