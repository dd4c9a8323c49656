"""Pages of a region that is an ECS cluster, with its tasks as machines."""

import pytest

from fleet.machines.models import Machine
from tests.controlplane.dashboard.clients import signed_in
from tests.fleet.clouds.ecs.cluster_fleet import ClusterFleet

pytestmark = [pytest.mark.cloud, pytest.mark.slow]


def test_pages_show_the_region_and_its_tasks(cluster_fleet: ClusterFleet) -> None:
    cluster_fleet.order(2)
    cluster_fleet.provision()
    cluster_fleet.order(8)
    cluster_fleet.provision()
    machine, client = Machine.objects.all()[0], signed_in()
    urls = ("/regions/", "/regions/us-east-1/", "/machines/", f"/machines/{machine.id}/")
    answers = {url: client.get(url) for url in urls}

    assert {url: answer.status_code for url, answer in answers.items()} == dict.fromkeys(urls, 200)
    assert machine.provider_id in answers[f"/machines/{machine.id}/"].text
    api = client.get(f"/api/v1/machines/{machine.id}/").json()
    assert (api["provider"], api["cloud_state"], api["zone"]) == ("ecs", "PENDING", "us-east-1a")
