"""Rows of a small fleet in the database, for service tests."""

from datetime import UTC, datetime
from typing import Any

import msgspec

from engine_agent.protocol.machine_messages import MachineFacts
from fleet.cells.models import Cell, CellMember
from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.machines.models import Machine
from fleet.nodes.models import Node, NodeReport
from fleet.reconcile.planning.states import CellState, MachineState, NodeState
from fleet.regions.models import Region
from models_registry.instance_types.models import InstanceType
from models_registry.versions.models import Model, ModelVersion

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
KIND = "local.cpu"


def region(name: str = "us-east-1", **columns: Any) -> Region:
    return Region.objects.get_or_create(name=name, defaults=columns)[0]


def version(name: str = "1", *, nodes: int = 2, **columns: Any) -> ModelVersion:
    model, _ = Model.objects.get_or_create(name="sim-70b", defaults={"created_at": NOW})
    own = {"engine": "sim", "state": "released", "parallelism": {KIND: {"nodes": nodes}}, "created_at": NOW}
    defaults = {**own, **columns}
    return ModelVersion.objects.get_or_create(model=model, version=name, defaults=defaults)[0]


def deployment(name: str = "sim-70b", *, cells: int = 1, where: str = "us-east-1", nodes: int = 2) -> Deployment:
    InstanceType.objects.get_or_create(name=KIND, defaults={"accelerator": "cpu"})
    row, _ = Deployment.objects.get_or_create(
        name=name, defaults={"model_version": version(nodes=nodes), "instance_types": [KIND], "created_at": NOW}
    )
    DeploymentRegion.objects.get_or_create(deployment=row, region=region(where), defaults={"cells": cells})
    return row


def node(name: str, *, where: str = "us-east-1", connected: bool = True, **columns: Any) -> Node:
    """A spare node that reported at `NOW`; `report=` columns are given as a dict."""
    report = {"connected": connected, "connection": "k", "last_seen_at": NOW, "connection_changed_at": NOW}
    report |= columns.pop("report", {})
    kind, _ = InstanceType.objects.get_or_create(name=KIND, defaults={"accelerator": "cpu"})
    defaults = {
        "region": region(where),
        "instance_type": kind,
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
    defaults = {
        "deployment": deployment(),
        "region": region(),
        "instance_type_id": KIND,
        "model_version": version(),
        "state": CellState.READY.value,
        "generation": 1,
        "created_at": NOW,
        "state_since": NOW,
    }
    row = Cell.objects.create(id=name, **{**defaults, **columns})
    for rank, member in enumerate(nodes):
        CellMember.objects.create(cell=row, node=member, rank=rank)
        member.report.cell, member.report.generation, member.report.state = name, row.generation, "ready"
        member.report.save()
    return row


FACTS = MachineFacts(address="10.0.0.7", port_base=14000, cores=8, memory_bytes=32 * 2**30, disk_free_bytes=200 * 2**30)


def machine(name: str, *, where: str = "pool", **columns: Any) -> Machine:
    """A free, connected machine of a region's own pool, of the type `KIND`."""
    kind, _ = InstanceType.objects.get_or_create(name=KIND, defaults={"accelerator": "cpu"})
    defaults = {
        "provider": "machines",
        "provider_id": name,
        "region": region(where, provider="machines"),
        "state": MachineState.POOL.value,
        "instance_type": kind,
        "address": FACTS.address,
        "port_base": FACTS.port_base,
        "facts": msgspec.to_builtins(FACTS),
        "connected": True,
        "last_seen_at": NOW,
        "created_at": NOW,
        "state_since": NOW,
    }
    return Machine.objects.create(id=name, **{**defaults, **columns})
