"""Markets of a deployment: requests, errors, and launches."""

from typing import Any

import pytest

from fleet.capacity.planning.pools import Market
from fleet.clouds.base import Machine
from fleet.deployments.models import Deployment
from fleet.nodes.models import Node
from fleet.nodes.services.nodes import machine_store, nodes_launch
from fleet.reconcile.planning.decisions import LaunchNodes
from fleet.reconcile.selectors.snapshot import fleet_view
from fleet.regions.models import Region
from kernel.models import Event
from tests.controlplane.api.client import bearer, rules
from tests.fleet import rows
from tests.fleet.rows import KIND, NOW

pytestmark = pytest.mark.django_db

URL = "/api/v1/deployments/sim-70b"
FIRM = frozenset({Market.RESERVED, Market.ON_DEMAND})


@pytest.fixture(autouse=True)
def deployment() -> None:
    rows.deployment()
    rows.region("us-west-2")
    Region.objects.filter(name="us-east-1").update(provider="aws")


def change(**body: Any) -> Any:
    return bearer("operator").patch(URL, body, format="json")


def messages(response: Any) -> str:
    assert response.status_code == 400
    return " ".join(error["message"] for error in response.json()["errors"])


@pytest.mark.slow
def test_markets_are_stated_and_taken_back_and_each_change_is_recorded() -> None:
    assert change(markets=["on_demand", "reserved"]).json()["markets"] == ["reserved", "on_demand"]
    assert fleet_view(now=NOW).deployments["sim-70b"].markets == FIRM
    assert change(markets=["reserved", "on_demand"]).status_code == 200
    event = Event.objects.get(kind="deployment.changed")
    assert event.detail == {"markets": ["reserved", "on_demand"]}
    assert change(markets=[]).json()["markets"] == []


def test_a_deployment_is_created_with_its_markets() -> None:
    new = {"name": "chat", "model_version": "sim-70b@1", "instance_types": [KIND], "markets": ["spot"]}
    response = bearer("ada").post("/api/v1/deployments", new | {"regions": _cells("us-east-1")}, format="json")
    assert response.json()["markets"] == ["spot"]
    other = new | {"name": "other", "regions": _cells("us-west-2")}
    assert rules(bearer("ada").post("/api/v1/deployments", other, format="json")) == {"markets": "provider"}
    assert not Deployment.objects.filter(name="other").exists()


def test_a_market_that_does_not_exist_is_named_with_those_that_do() -> None:
    response = change(markets=["spott"])
    assert rules(response) == {"markets": "market"}
    assert "'spott' is not a market; choose from: reserved, block, open" in messages(response)
    assert rules(change(markets=["spot", "spot"])) == {"markets": "market"}
    assert change(markets="spot").status_code == 400
    assert change(markets=["spot"] * 7).status_code == 400
    assert Deployment.objects.get().markets == []


def test_a_region_whose_machines_are_of_no_market_is_named() -> None:
    assert change(markets=["spot"]).status_code == 200
    refused = change(regions=_cells("us-west-2"))
    assert rules(refused) == {"markets": "provider"}
    assert "provider local of us-west-2 has no markets" in messages(refused)
    assert change(regions=[{"region": "us-west-2", "cells": 0}]).status_code == 200
    assert change(markets=[], regions=_cells("us-west-2")).status_code == 200
    assert rules(change(markets=["spot"])) == {"markets": "provider"}


def test_a_node_may_be_of_what_it_was_ordered_in_until_its_machine_is_known() -> None:
    nodes_launch(LaunchNodes("us-east-1", KIND, 1, "needed", there=0, markets=FIRM), now=NOW)
    node = Node.objects.get()
    assert (node.markets, fleet_view(now=NOW).nodes[node.id].markets) == (["reserved", "on_demand"], FIRM)
    machine_store(node=node.id, machine=Machine(market="reserved"))
    assert fleet_view(now=NOW).nodes[node.id].markets == {Market.RESERVED}


def test_stored_markets_that_make_no_sense_are_the_problem_of_their_deployment_alone() -> None:
    Deployment.objects.update(markets=["gone"])
    view = fleet_view(now=NOW).deployments["sim-70b"]
    assert "'gone' is not a market" in view.problem


def _cells(region: str) -> list[dict[str, Any]]:
    return [{"region": region, "cells": 1}]
