"""A benchmark target gets its version first and its cells by role after that."""

from datetime import timedelta
from typing import Any

import pytest

from engine_agent.protocol.states import CellRole
from fleet.cells.models import Cell
from fleet.deployments.models import DeploymentRegion
from fleet.deployments.services.deployments import deployment_change, deployment_scale
from fleet.rollouts.models import Rollout
from models_registry.benchmarks.selectors import ServeRequest, ServingState
from tests.fleet import rows
from tests.fleet.rows import NOW
from traffic.routing.services.ingress_client import benchmark_describe, benchmark_serve

pytestmark = pytest.mark.django_db
EAST = "us-east-1"
APART = {"prefill": 1, "decode": 2}


@pytest.fixture(autouse=True)
def four_cells() -> None:
    rows.deployment(cells=4, nodes=1)
    for number in range(4):
        rows.cell(f"c{number}", rows.node(f"n-{number}"))


def serve(version: str = "sim-70b@1", **fields: Any) -> tuple[ServingState, str]:
    found = benchmark_serve(ServeRequest("sim-70b", EAST, version, "ada", NOW, NOW + timedelta(minutes=1), **fields))
    return found.state, found.reason


def become(prefill: int, decode: int, mixed: int = 0) -> None:
    roles = [CellRole.PREFILL] * prefill + [CellRole.DECODE] * decode + [CellRole.MIXED] * mixed
    cells = list(Cell.objects.order_by("id"))
    for cell, role in zip(cells, roles, strict=False):
        Cell.objects.filter(pk=cell.pk).update(role=role.value, state="ready")
    for cell in cells[len(roles) :]:
        Cell.objects.filter(pk=cell.pk).update(state="stopped")


def stated() -> tuple[int, int, int]:
    place = DeploymentRegion.objects.get()
    return place.cells, place.prefill, place.decode


def test_cells_that_serve_the_version_are_left_alone() -> None:
    assert serve() == (ServingState.SERVES, "")
    assert serve(cells=4) == (ServingState.SERVES, "")
    assert not Rollout.objects.exists()


def test_cells_by_role_are_waited_for() -> None:
    assert serve(cells=APART) == (ServingState.MOVING, "scaling to 1p+2d; it has 4 mixed")
    assert stated() == (3, 1, 2)
    become(1, 2, 1)
    assert serve(cells=APART)[0] is ServingState.MOVING, "one mixed cell is too many"
    become(1, 2)
    assert serve(cells=APART) == (ServingState.SERVES, "")


def test_another_version_is_rolled_out_while_all_cells_are_mixed() -> None:
    other = rows.version("2", nodes=1, state="validated")
    deployment_scale(name="sim-70b", cells={EAST: 3}, actor="ada", now=NOW)
    become(0, 0, 3)
    assert serve(cells=APART)[0] is ServingState.MOVING
    become(1, 2)
    assert serve(other.reference, cells=APART) == (
        ServingState.MOVING, "scaling to 3; it has 1 prefill, 2 decode",
    )  # fmt: skip
    assert not Rollout.objects.exists()
    become(0, 0, 3)
    assert serve(other.reference, cells=APART)[0] is ServingState.MOVING
    rollout = Rollout.objects.get()
    assert rollout.to_version == other
    Rollout.objects.update(state="succeeded")
    Cell.objects.update(model_version=other)
    type(rollout.deployment).objects.update(model_version=other)
    assert serve(other.reference, cells=APART) == (ServingState.MOVING, "scaling to 1p+2d; it has 3 mixed")


def test_cells_that_no_region_has_are_refused() -> None:
    state, reason = serve(cells={"prefill": 1, "decode": 100_000})
    assert state is ServingState.REFUSED
    assert "it must be an object with prefill and decode" in reason


def test_what_is_measured_says_how_its_cells_are_told_apart_and_what_was_stated() -> None:
    plain = benchmark_describe("sim-70b", EAST)
    assert (plain.split, plain.stated) == ("", 4)
    deployment_scale(name="sim-70b", cells={EAST: 4}, actor="ada", now=NOW)
    assert serve(cells={"prefill": 1, "decode": 3})[0] is ServingState.MOVING
    become(1, 3)
    apart = benchmark_describe("sim-70b", EAST)
    assert (apart.split, apart.stated) == ("1p+3d", {"prefill": 1, "decode": 3})


def test_cells_that_the_load_decides_over_are_not_stated() -> None:
    deployment_change(name="sim-70b", scaling={"roles": "planned"}, actor="ada", now=NOW)
    assert benchmark_describe("sim-70b", EAST).stated is None
