"""Shipped types are stored and updated, and types are created, changed and deleted unless something uses them."""

from dataclasses import asdict, fields, replace
from typing import Any

import pytest

from fleet.deployments.selectors import instance_types_wanted
from fleet.reconcile.planning.states import NodeState
from fleet.regions.models import Region
from kernel.models import Event
from kernel.refusals import Conflict, InvalidInput
from models_registry.instance_types import selectors
from models_registry.instance_types.models import InstanceType, Origin
from models_registry.instance_types.planner import INSTANCE_TYPES, InstanceShape
from models_registry.instance_types.selectors import instance_shapes, type_uses
from models_registry.instance_types.services import (
    instance_type_change,
    instance_type_create,
    instance_type_delete,
    instance_type_named,
    instance_types_ship,
)
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db


def create(name: str = "own.2xh100", **columns: Any) -> InstanceType:
    stated = {"accelerator": "h100", "chips": 2, "memory_gib": 160.0, **columns}
    return instance_type_create(name=name, actor="ada", now=NOW, why="bought", **stated)


def change(name: str, **columns: Any) -> InstanceType:
    return instance_type_change(name=name, actor="ada", now=NOW, **columns)


def delete(name: str) -> None:
    instance_type_delete(name=name, actor="ada", now=NOW, why="sold")


def test_every_field_of_a_shape_is_a_column() -> None:
    columns = {column.name for column in InstanceType._meta.concrete_fields}
    assert {field.name for field in fields(InstanceShape)} == columns - {"origin", "changed_by", "changed_at"}


def test_the_shipped_types_are_stored_once_and_updated_unless_an_operator_changed_them() -> None:
    InstanceType.objects.create(**asdict(replace(INSTANCE_TYPES["g6.xlarge"], price_per_hour=9)), origin="shipped")
    InstanceType.objects.create(**asdict(replace(INSTANCE_TYPES["g5.xlarge"], price_per_hour=9)), origin="operator")
    assert instance_types_ship() == len(INSTANCE_TYPES) - 1
    assert instance_types_ship() == 0
    assert instance_shapes()["g6.xlarge"] == INSTANCE_TYPES["g6.xlarge"]
    assert instance_shapes()["g5.xlarge"].price_per_hour == 9
    assert instance_shapes().keys() == INSTANCE_TYPES.keys()


def test_a_shipped_type_gets_its_row_when_it_is_first_named() -> None:
    assert instance_shapes(["p5.48xlarge", "none.such"]) == {"p5.48xlarge": INSTANCE_TYPES["p5.48xlarge"]}
    row = instance_type_named("p5.48xlarge")
    assert (row.shape(), row.origin) == (INSTANCE_TYPES["p5.48xlarge"], Origin.SHIPPED)
    with pytest.raises(
        InvalidInput, match=r"unknown instance type 'p5.48xlrge' \(did you mean p5.48xlarge or p5.4xlarge\?\)"
    ):
        instance_type_named("p5.48xlrge")


def test_a_new_type_is_completed_from_shipped_ones() -> None:
    row = create()
    assert (row.vendor, row.arch, row.cores, row.tensor_parallel_degree) == ("nvidia", "9.0", 2, 2)
    assert (row.origin, row.changed_by, row.chip_watts) == (Origin.OPERATOR, "ada", 700)
    event = Event.objects.get(kind="instance_type.created")
    assert event.message == "instance type own.2xh100 was created by ada: bought"


@pytest.mark.parametrize(
    ("columns", "field"),
    [
        ({"chips": 0}, "chips"),
        ({"memory_gib": float("nan")}, "memory_gib"),
        ({"tensor_parallel_degree": 10**400}, "tensor_parallel_degree"),
        ({"memory_gib": -1.0}, "memory_gib"),
        ({"chips": 10**9}, "chips"),
        ({"cpu_arch": "sparc"}, "cpu_arch"),
        ({"tensor_parallel_degree": 3}, "tensor_parallel_degree"),
        ({"accelerator": "h" * 65}, "accelerator"),
    ],
)
def test_a_type_that_cannot_be_is_refused_by_field(columns: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        create(**columns)
    assert refused.value.field == field
    assert not InstanceType.objects.exists()


def test_a_taken_or_malformed_name_is_refused() -> None:
    create()
    with pytest.raises(Conflict, match=r"own.2xh100 exists already"):
        create()
    with pytest.raises(Conflict, match=r"p5.48xlarge is a shipped instance type; change it"):
        create("p5.48xlarge")
    with pytest.raises(InvalidInput):
        create("../x")


def test_hardware_of_a_type_in_use_stays_and_its_users_are_named() -> None:
    create()
    rows.version("2", parallelism={"own.2xh100": {}})
    assert type_uses("own.2xh100") == ["version sim-70b@2"]
    with pytest.raises(Conflict, match=r"used by version sim-70b@2, so chips, cores, tensor_parallel_degree cannot"):
        change("own.2xh100", chips=4, cores=4, tensor_parallel_degree=4)
    changed = change("own.2xh100", price_per_hour=4.5, notes="rented")
    assert (changed.price_per_hour, changed.notes, changed.chips) == (4.5, "rented", 2)
    assert change("own.2xh100", price_per_hour=4.5).changed_at == NOW
    assert Event.objects.filter(kind="instance_type.changed").count() == 1
    with pytest.raises(Conflict, match=r"cannot be deleted: it is used by version sim-70b@2"):
        delete("own.2xh100")


def test_everything_of_the_fleet_that_uses_a_type_is_named() -> None:
    rows.deployment()
    rows.node("n-1")
    Region.objects.update(spares={rows.KIND: 1})
    assert [use for use in type_uses(rows.KIND) if not use.startswith("version ")] == [
        "deployment sim-70b", "spares of us-east-1", "node n-1",
    ]  # fmt: skip


def test_what_was_used_keeps_its_type_and_what_never_was_is_deleted() -> None:
    create()
    kind = create("own.other")
    rows.node("n-1", instance_type=kind, state=NodeState.RETIRED.value)
    with pytest.raises(Conflict, match=r"own.other cannot be deleted: the history of nodes names it"):
        delete("own.other")
    delete("own.2xh100")
    assert [row.name for row in InstanceType.objects.filter(name__startswith="own")] == ["own.other"]


def test_a_shipped_type_is_changed_and_restored_but_never_deleted() -> None:
    change("g6.xlarge", price_per_hour=0.5)
    instance_types_ship()
    assert instance_shapes()["g6.xlarge"].price_per_hour == 0.5
    delete("g6.xlarge")
    assert instance_shapes()["g6.xlarge"] == INSTANCE_TYPES["g6.xlarge"]
    with pytest.raises(Conflict, match="it cannot be deleted"):
        delete("g6.xlarge")


def test_without_a_fleet_no_type_passes_for_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selectors, "_fleet", selectors._Registered())
    with pytest.raises(LookupError, match="no fleet has registered"):
        type_uses("p5.48xlarge")


def test_a_cloud_is_asked_only_for_types_that_something_names() -> None:
    instance_types_ship()
    assert instance_types_wanted() == {"c7i.2xlarge"}
    create()
    rows.deployment()
    rows.version("2", parallelism={"trn1.32xlarge": {}})
    Region.objects.update(spares={"g6.xlarge": 1})
    assert instance_types_wanted() == {"c7i.2xlarge", "own.2xh100", rows.KIND, "trn1.32xlarge", "g6.xlarge"}
