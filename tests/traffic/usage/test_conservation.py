"""Conservation of money, energy and emissions with meters that ramp, wrap, restart, misreport or stop: tenants + idle =
cells, cells + spares = bill, in whole units and never below 0."""

import random
from collections.abc import Mapping
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from django.db.models import Sum

from engine_agent.node.planning.energy import Reading
from engine_agent.node.telemetry.energy import EnergyMonitor
from engine_agent.node.telemetry.nvml import Nvml
from fleet.cells.models import Cell
from fleet.nodes.models import Node, NodeReport
from fleet.regions.models import Region
from models_registry.instance_types.models import InstanceType
from tests.engine_agent.node.telemetry.nvml_library import Library
from tests.fleet import rows
from tests.fleet.rows import NOW
from traffic.routing.models import IngressReport
from traffic.routing.services.ingresses import ingress_create
from traffic.usage.models import CellHour, CostShare, UsageHour, UsageMark
from traffic.usage.planning.energy import TOLERANCE
from traffic.usage.planning.figures import By, UsageQuery
from traffic.usage.selectors.costs import cost_answer
from traffic.usage.services.machine_hours import machine_hours_count

pytestmark = pytest.mark.django_db
LOOK = timedelta(seconds=15)
MICRO = 1_000_000
WATTS = 1_000
RAPL_RANGE = 400_000 * MICRO
"""Wraps after minutes at full power, at most twice in ten minutes."""
NODES = ("n-a", "n-b", "n-c", "n-spare")


class Machine:
    """Fake counters of a machine and the agent that reads them: two GPUs behind NVML's functions, and wrapping
    processor counters in microjoules. `drawn` is the true energy by part."""

    def __init__(self, name: str, chance: random.Random) -> None:
        self.name, self.now_s = name, 0.0
        self._chance = chance
        self._library = Library(devices=2)
        self._library.millijoules = {0: 0, 1: 0}
        self._rapl = 0
        self._start_agent()
        self.drawn = 0

    def _start_agent(self) -> None:
        self._nvml = Nvml(self._library)
        self._monitor = EnergyMonitor([_Gpus(self), _Processors(self)], lambda: f"{self._chance.random()}")

    def gpus(self) -> Mapping[str, Reading]:
        found = {f"nvidia{index}": self._nvml.energy(index) for index in range(2)}
        return {name: reading for name, reading in found.items() if reading is not None}

    def processors(self) -> Mapping[str, Reading]:
        return {"package-0": Reading(microjoules=self._rapl, most_watts=300.0, wraps_at=RAPL_RANGE)}

    def run(self, seconds: int, watts: int) -> None:
        """Draws this power, a fifth of it in processors, and reads every five seconds."""
        for _ in range(seconds // 5):
            self.now_s += 5
            for index in (0, 1):
                self._library.millijoules[index] += watts * 5 * 1000 * 2 // 5
            self._rapl = (self._rapl + watts * 5 * MICRO // 5) % RAPL_RANGE
            self.drawn += watts * 5 * MICRO
            self._monitor.read()

    def misbehave(self) -> str:
        """One fault of counters or agents."""
        what = self._chance.choice(["driver restarts", "goes back", "jumps", "lost", "found", "agent restarts", "late"])
        match what:
            case "driver restarts":
                self._library.millijoules = {0: 0, 1: 0}
            case "goes back":
                self._library.millijoules[0] = max(0, self._library.millijoules[0] - 10_000_000)
            case "jumps":
                self._library.millijoules[1] += 10**12
                self._rapl = (self._rapl + RAPL_RANGE // 2) % RAPL_RANGE
            case "lost":
                self._library.lost.add(1)
            case "found":
                self._library.lost.clear()
            case "agent restarts":
                self._start_agent()
        return what

    def report(self) -> None:
        said = msgspec.to_builtins(self._monitor.meters())
        NodeReport.objects.filter(node_id=self.name).update(telemetry={"energy": said}, connected=True)


class _Gpus:
    name, covers = "nvidia", "accelerators"

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def read(self) -> tuple[float, Mapping[str, Reading]] | None:
        return self._machine.now_s, self._machine.gpus()


class _Processors:
    name, covers = "rapl", "host"

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def read(self) -> tuple[float, Mapping[str, Reading]] | None:
        return self._machine.now_s, self._machine.processors()


def a_fleet() -> None:
    """Two deployments, one of two nodes and one of one, and a spare, on separate machines."""
    Region.objects.create(name="us-east-1", provider="machines")
    kind = InstanceType.objects.create(name=rows.KIND, accelerator="h100", chips=1, price_per_hour=7.77, watts=WATTS)
    nodes = {name: rows.node(name, instance_type=kind) for name in NODES}
    rows.cell("c", nodes["n-a"], nodes["n-b"])
    rows.cell("d", nodes["n-c"], deployment=rows.deployment("other", nodes=1))


def in_flight(cells: Mapping[str, int]) -> None:
    telemetry = {"cells": {cell: {"in_flight": count} for cell, count in cells.items()}}
    IngressReport.objects.update(telemetry=telemetry, connected=True)


def tokens(hour: datetime, chance: random.Random) -> None:
    """Tokens of tenants of both deployments in an hour."""
    for deployment, tenant in (("sim-70b", "ada"), ("sim-70b", "bob"), ("other", "eve"), ("other", "")):
        account: dict[str, Any] = {
            "tenant": tenant,
            "serving_class": "realtime",
            "hour": hour,
            "deployment": deployment,
        }
        UsageHour.objects.get_or_create(**account)
        CostShare.objects.create(
            **account, version="sim-70b@1", region="us-east-1", instance_type=rows.KIND,
            prompt_tokens=chance.randrange(10**6), completion_tokens=chance.randrange(10**5),
        )  # fmt: skip


def assert_conserved() -> None:
    whole = CellHour.objects.filter(settled=True)
    assert whole.exists()
    for row in whole:
        shares: dict[str, Any] = CostShare.objects.filter(hour=row.hour, deployment=row.deployment).aggregate(
            cost=Sum("cost"), energy=Sum("energy_uj"), carbon=Sum("carbon_ug")
        )
        assert (shares["cost"] or Decimal(0)) + row.idle == row.cost
        assert (shares["energy"] or 0) + row.idle_uj == row.energy_uj
        assert (shares["carbon"] or 0) + row.idle_carbon_ug == row.carbon_ug
        assert row.idle >= 0
        assert min(row.idle_uj, row.idle_carbon_ug, row.measured_uj, row.estimated_uj, row.rated_uj) >= 0
        assert row.measured_uj + row.rated_uj + row.estimated_uj == row.energy_uj
        most_uj = (row.machine_ms + 4 * 20_000) * WATTS * TOLERANCE * 1000
        assert row.energy_uj <= most_uj, "at most the machines' maximum power"
    answer = cost_answer(UsageQuery(NOW - timedelta(days=2), NOW + timedelta(days=2), by=By.TOTAL), most=10)
    total, spares = answer.totals.sums, answer.spares
    assert spares is not None
    assert total.cost + total.idle_cost == total.cells_cost
    assert total.energy_uj + total.idle_uj == total.cells_uj
    bill: dict[str, Any] = whole.aggregate(cost=Sum("cost"), energy=Sum("energy_uj"))
    assert total.cells_cost + spares.idle_cost == bill["cost"]
    assert total.cells_uj + spares.idle_uj == bill["energy"]


def run(seed: int, liar: str = "", minutes: int = 75) -> dict[str, Machine]:
    """Over an hour of a fleet in passes of 15 s: ramps on all machines, faults on some."""
    chance = random.Random(seed)
    machines = {name: Machine(name, random.Random(f"{seed} {name}")) for name in NODES}
    for minute in range(minutes):
        now = NOW + timedelta(minutes=minute)
        if minute % 7 == 0:
            in_flight({"c": chance.randrange(2), "d": chance.randrange(2)})
        for name, machine in machines.items():
            trouble = machine._chance.random() < 0.15
            what = machine.misbehave() if trouble and liar in ("", name) else ""
            machine.run(60, (minute * 13) % 900 + 50)
            if what != "late":
                machine.report()
        machine_hours_count(now=now + timedelta(seconds=59))
    return machines


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)])
def test_nothing_is_lost_or_invented_whatever_meters_do(seed: int) -> None:
    a_fleet()
    ingress_of_all()
    machine_hours_count(now=NOW)
    tokens(NOW, random.Random(seed))
    run(seed)
    assert_conserved()
    assert CellHour.objects.aggregate(refused=Sum("refused"))["refused"] > 0, "implausible readings are reported"


def test_honest_ramps_are_measured_to_the_millionth_of_a_joule() -> None:
    a_fleet()
    ingress_of_all()
    machine_hours_count(now=NOW)
    machines = run(1, liar="nobody", minutes=30)
    row = CellHour.objects.get(deployment="sim-70b", hour=NOW)
    drawn = machines["n-a"].drawn + machines["n-b"].drawn
    first_reading = 2 * 5 * 50 * MICRO  # a counter's start is unknown
    assert row.measured_uj == drawn - first_reading
    assert row.refused == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_node_that_lies_changes_nothing_for_tenants_of_another_deployment(seed: int) -> None:
    def bill_of_others() -> list[tuple[Any, ...]]:
        names = ("tenant", "cost", "energy_uj", "carbon_ug")
        return list(CostShare.objects.filter(deployment="other").order_by("tenant").values_list(*names))

    found = []
    for liar in ("nobody", "n-a"):
        for model in (CostShare, CellHour, UsageHour):
            model.objects.all().delete()
        if not Cell.objects.exists():
            a_fleet()
            ingress_of_all()
        reset_marks()
        machine_hours_count(now=NOW)
        tokens(NOW, random.Random(seed))
        run(seed, liar=liar)
        assert_conserved()
        found.append(bill_of_others())
    assert found[0] == found[1]
    assert all(amount > 0 for amount in found[0][0][1:])


def ingress_of_all() -> None:
    gate = ingress_create(region=rows.region(), address="127.0.0.1", port=8080, now=NOW)
    IngressReport.objects.update_or_create(ingress=gate, defaults={"telemetry": {"cells": {}}, "connected": True})


def reset_marks() -> None:
    UsageMark.objects.all().delete()
    NodeReport.objects.update(telemetry={})
    assert Node.objects.count() == len(NODES)
