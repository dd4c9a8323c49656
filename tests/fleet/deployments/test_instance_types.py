"""Deployments on several instance types: requests, errors, rows and planners' views."""

from typing import Any

import pytest

from fleet.autoscaling.planning.policy import CellPools
from fleet.cells.models import Cell
from fleet.cells.selectors import cells_by_type
from fleet.cells.services import cell_create
from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.deployments.services.deployments import deployment_change, deployment_create, deployment_scale
from fleet.nodes.selectors import desired_for
from fleet.quotas.selectors import quota_uses
from fleet.quotas.services import quota_set
from fleet.reconcile.planning.decisions import CreateCell
from fleet.reconcile.planning.states import CellState
from fleet.reconcile.selectors.snapshot import fleet_view
from fleet.rollouts.services import rollout_propose
from kernel.models import Event
from kernel.refusals import Conflict, InvalidInput
from models_registry.instance_types.models import InstanceType
from models_registry.versions.models import ModelVersion
from tests.fleet import rows
from tests.fleet.rows import KIND, NOW

pytestmark = pytest.mark.django_db

EAST, OTHER = "us-east-1", "local.big"
BOTH = [KIND, OTHER]


@pytest.fixture(autouse=True)
def deployment() -> Deployment:
    InstanceType.objects.create(name=OTHER, accelerator="cpu", price_per_hour=3.0)
    row = rows.deployment(cells=3, nodes=1)
    state_both(row.model_version)
    Deployment.objects.update(instance_types=BOTH)
    row.refresh_from_db()
    return row


def state_both(version: ModelVersion, nodes: int = 2) -> None:
    ModelVersion.objects.filter(pk=version.pk).update(parallelism={KIND: {"nodes": 1}, OTHER: {"nodes": nodes}})


def change(**columns: Any) -> Deployment:
    return deployment_change(name="sim-70b", actor="ada", now=NOW, **columns)


def test_planners_see_its_version_on_each_type() -> None:
    rows.cell("c1", rows.node("n-1"), instance_type_id=OTHER)
    view = fleet_view(now=NOW)
    spec = view.deployments["sim-70b"]
    assert spec.instance_types == (KIND, OTHER)
    assert (spec.of("sim-70b@1", KIND).nodes_per_cell, spec.of("sim-70b@1", OTHER).nodes_per_cell) == (1, 2)
    assert spec.of_cell(view.cells["c1"]).nodes_per_cell == 2
    assert view.regions[EAST].prices == {OTHER: 3.0}, "of a type without a price nothing is known"


def test_a_cell_is_created_on_a_type_and_rendered_for_it() -> None:
    cell_create(CreateCell("sim-70b", EAST, OTHER, "wanted"), now=NOW)
    assert Cell.objects.get().instance_type_id == OTHER
    assert cells_by_type() == {("sim-70b", EAST): {OTHER: 1}}
    Cell.objects.all().delete()
    big = InstanceType.objects.get(name=OTHER)
    node = rows.node("n-1", instance_type=big)
    rows.cell("c1", node, instance_type_id=OTHER)
    assignment = desired_for(["n-1"])["n-1"].assignment
    assert assignment is not None
    assert assignment.cell == "c1"


def test_a_new_deployment_lists_its_types_in_order() -> None:
    made = deployment_create(
        name="other", model_version="sim-70b@1", instance_types=[OTHER, KIND], cells={EAST: 2}, actor="ada", now=NOW,
        by_type={EAST: {KIND: 1}},
    )  # fmt: skip
    assert made.instance_types == [OTHER, KIND]
    assert made.regions.get().by_type == {KIND: 1}


@pytest.mark.parametrize(
    ("types", "rule", "words"),
    [
        ([], "list", "is empty"),
        ([KIND, KIND], "list", "repeats a name"),
        ([KIND, "mars"], "exists", "unknown instance type 'mars'"),
    ],
)
def test_a_list_of_types_that_makes_no_sense_is_refused(types: list[str], rule: str, words: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        change(instance_types=types)
    assert (refused.value.field, refused.value.rule) == ("instance_types", rule)
    assert words in str(refused.value)


def test_a_version_that_says_nothing_of_a_listed_type_is_refused_by_name() -> None:
    ModelVersion.objects.update(parallelism={KIND: {"nodes": 1}})
    with pytest.raises(InvalidInput, match=f"parallelism has no entry for instance type '{OTHER}'"):
        deployment_create(
            name="other", model_version="sim-70b@1", instance_types=BOTH, cells={EAST: 1}, actor="ada", now=NOW
        )
    with pytest.raises(InvalidInput, match=OTHER):
        change(instance_types=[OTHER, KIND])


def test_a_rollout_to_a_version_that_says_nothing_of_a_listed_type_is_refused_by_name() -> None:
    rows.version("2", nodes=1)
    with pytest.raises(InvalidInput, match=f"sim-70b@2: parallelism has no entry for instance type '{OTHER}'"):
        rollout_propose(deployment="sim-70b", version="sim-70b@2", policy={})
    state_both(rows.version("2"))
    assert rollout_propose(deployment="sim-70b", version="sim-70b@2", policy={}).version.reference == "sim-70b@2"


def test_a_mix_is_stated_by_region_said_and_ended() -> None:
    change(by_type={EAST: {OTHER: 2}})
    assert DeploymentRegion.objects.get().by_type == {OTHER: 2}
    assert fleet_view(now=NOW).deployments["sim-70b"].claim(EAST).by_type == {OTHER: 2}
    event = Event.objects.filter(kind="deployment.changed").latest("id")
    assert event.message == "sim-70b changed by ada: by_type.us-east-1"
    before = Event.objects.count()
    change(by_type={EAST: {OTHER: 2}})
    assert Event.objects.count() == before, "nothing has changed"
    deployment_scale(name="sim-70b", cells={EAST: 5}, actor="ada", now=NOW)
    assert DeploymentRegion.objects.get().by_type == {OTHER: 2}, "another number leaves the mix as it is"
    change(by_type={EAST: {}})
    assert DeploymentRegion.objects.get().by_type == {}


@pytest.mark.parametrize(
    ("by_type", "field", "words"),
    [
        (
            {EAST: {"mars": 1}},
            f"by_type.{EAST}",
            "'mars' is not one of its instance types: local.cpu, local.big",
        ),
        ({"mars": {KIND: 1}}, "by_type.mars", "the deployment is not in 'mars'; its regions: us-east-1"),
        ({EAST: {KIND: 0, OTHER: 0}}, f"by_type.{EAST}", "has 0 cells on every instance type"),
    ],
)
def test_a_mix_that_cannot_be_is_refused(by_type: dict[str, dict[str, int]], field: str, words: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        change(by_type=by_type)
    assert refused.value.field == field
    assert words in str(refused.value)


def test_a_type_is_taken_off_the_list_once_nothing_is_on_it_and_nothing_wants_it() -> None:
    cell = rows.cell("c1", rows.node("n-1"), instance_type_id=OTHER)
    with pytest.raises(Conflict, match=r"sim-70b has cells on local\.big, such as c1"):
        change(instance_types=[KIND])
    Cell.objects.filter(pk=cell.pk).update(state=CellState.STOPPED.value)
    change(by_type={EAST: {OTHER: 1}})
    with pytest.raises(Conflict, match=r"us-east-1 has a target of 1 cells on local\.big; set 0 for it"):
        change(instance_types=[KIND])
    change(by_type={EAST: {OTHER: 0, KIND: 1}})
    assert change(instance_types=[KIND]).instance_types == [KIND]
    assert DeploymentRegion.objects.get().by_type == {KIND: 1}


def test_cells_by_role_are_of_one_type() -> None:
    for refused_change in (
        lambda: deployment_scale(name="sim-70b", cells={EAST: CellPools(1, 2)}, actor="ada", now=NOW),
        lambda: change(scaling={"roles": "planned"}),
    ):
        with pytest.raises(InvalidInput, match="cells with roles need a single instance type, but 2 are listed"):
            refused_change()
    change(instance_types=[KIND])
    deployment_scale(name="sim-70b", cells={EAST: CellPools(1, 2)}, actor="ada", now=NOW)
    with pytest.raises(InvalidInput, match="but 2 are listed"):
        change(instance_types=BOTH)


def test_what_a_team_uses_is_counted_by_the_type_of_each_cell() -> None:
    Deployment.objects.update(team="search")
    for kind in BOTH:
        quota_set(team="search", instance_type=kind, machines=4, borrow_most=None, actor="ada", now=NOW)
    big = InstanceType.objects.get(name=OTHER)
    rows.cell("c1", rows.node("n-1"))
    rows.cell("c2", rows.node("n-2", instance_type=big), rows.node("n-3", instance_type=big), instance_type_id=OTHER)
    uses = {use.quota.instance_type_id: use for use in quota_uses()}
    assert {kind: use.used for kind, use in uses.items()} == {KIND: 1, OTHER: 2}
    assert {kind: use.wanted for kind, use in uses.items()} == {KIND: 2, OTHER: 2}, "the third may come on the first"
    assert {kind: use.deployments for kind, use in uses.items()} == {KIND: ("sim-70b",), OTHER: ("sim-70b",)}
