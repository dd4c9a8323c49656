"""Services on real rows, and a test cloud that shares their clock. Imported before Django is set up."""

from typing import TYPE_CHECKING, Any

import pytest

from tests.lab.cloud.conftest import world

if TYPE_CHECKING:
    from lab.cloud.server import World
    from tests.fleet.clouds.aws.cloud_fleet import CloudFleet

__all__ = ["cloud_fleet", "world"]


@pytest.fixture
def cloud_fleet(
    db: None,
    world: "World",
    monkeypatch: pytest.MonkeyPatch,
    settings: Any,
) -> "CloudFleet":
    from functools import cache

    from tests.fleet.clouds.aws.cloud_fleet import make_fleet, moment

    settings.AGENT_URLS = ["https://control.example:8000"]
    clients = cache(world.client)
    monkeypatch.setattr("kernel.clock.now", lambda: moment(world))
    monkeypatch.setattr("fleet.clouds.aws.calls.client", lambda service, region, once: clients(service, region))
    return make_fleet(world)
