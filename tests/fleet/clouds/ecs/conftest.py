"""An ECS cluster in the test cloud, whose clock is the services'. Imported before Django is set up."""

from typing import TYPE_CHECKING, Any

import pytest

from tests.lab.cloud.conftest import world

if TYPE_CHECKING:
    from lab.cloud.server import World
    from tests.fleet.clouds.ecs.cluster_fleet import ClusterFleet

__all__ = ["cluster_fleet", "world"]


@pytest.fixture
def cluster_fleet(db: None, world: "World", monkeypatch: pytest.MonkeyPatch, settings: Any) -> "ClusterFleet":
    from functools import cache

    from tests.fleet.clouds.aws.cloud_fleet import moment
    from tests.fleet.clouds.ecs.cluster_fleet import make_cluster_fleet

    settings.AGENT_URLS = ["https://control.example:8000"]
    clients = cache(world.client)
    monkeypatch.setattr("kernel.clock.now", lambda: moment(world))
    monkeypatch.setattr("fleet.clouds.aws.calls.client", lambda service, region, once: clients(service, region))
    return make_cluster_fleet(world)
