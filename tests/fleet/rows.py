"""Rows of a small fleet in the database, for service tests."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TypeVar

from django.db.models import Model as Table

from fleet.models import Cell, CellMember, Deployment, DeploymentRegion, InstanceType, Node, NodeReport, Region
from fleet.planning.states import CellState, NodeState
from models_registry.models import Model, ModelVersion

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
KIND = "local.cpu"

M = TypeVar("M", bound=Table)


def found_or_made(table: type[M], defaults: Callable[[], dict[str, Any]], /, **key: Any) -> M:
    """As `get_or_create`, for tests that create rows alone: no savepoint, and defaults only where they are needed."""
    found = table._default_manager.filter(**key)[:1]
    return found[0] if found else table._default_manager.create(**key, **defaults())


def region(name: str = "us-east-1", **columns: Any) -> Region:
    return found_or_made(Region, lambda: columns, name=name)


def instance_type() -> InstanceType:
    return found_or_made(InstanceType, lambda: {"accelerator": "cpu"}, name=KIND)


def version(name: str = "1", *, nodes: int = 2, **columns: Any) -> ModelVersion:
    model = found_or_made(Model, lambda: {"created_at": NOW}, name="sim-70b")
    own = {"engine": "sim", "state": "released", "parallelism": {KIND: {"nodes": nodes}}, "created_at": NOW}
    return found_or_made(ModelVersion, lambda: {**own, **columns}, model=model, version=name)


def deployment(name: str = "sim-70b", *, cells: int = 1, where: str = "us-east-1", nodes: int = 2) -> Deployment:
    def columns() -> dict[str, Any]:
        return {"model_version": version(nodes=nodes), "instance_type": instance_type(), "created_at": NOW}

    row = found_or_made(Deployment, columns, name=name)
    found_or_made(DeploymentRegion, lambda: {"cells": cells}, deployment=row, region=region(where))
    return row


def node(name: str, *, where: str = "us-east-1", connected: bool = True, **columns: Any) -> Node:
    """A spare node that reported at `NOW`; `report=` columns are given as a dict."""
    report = {"connected": connected, "connection": "k", "last_seen_at": NOW, "connection_changed_at": NOW}
    report |= columns.pop("report", {})
    defaults = {
        "region": region(where),
        "instance_type": instance_type(),
        "state": NodeState.READY.value,
        "address": "127.0.0.1",
        "port_base": 40000 + 20 * Node.objects.count(),
        "topology": ["spine", "rack"],
        "created_at": NOW,
        "state_since": NOW,
        "spare_since": NOW,
    }
    row = Node.objects.create(id=name, **{**defaults, **columns})
    NodeReport.objects.create(node=row, **report)
    return row


def cell(name: str = "sim-70b-us-east-1-1", *nodes: Node, **columns: Any) -> Cell:
    """A ready cell at generation 1 on these nodes."""
    columns = {"state": CellState.READY.value, "generation": 1, "created_at": NOW, "state_since": NOW, **columns}
    for column, default in (("deployment", deployment), ("region", region), ("model_version", version)):
        if column not in columns:
            columns[column] = default()
    row = Cell.objects.create(id=name, **columns)
    CellMember.objects.bulk_create(CellMember(cell=row, node=node, rank=rank) for rank, node in enumerate(nodes))
    for member in nodes:
        member.report.cell, member.report.generation, member.report.state = name, row.generation, "ready"
        member.report.save()
    return row
