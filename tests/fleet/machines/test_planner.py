"""Tables: the type of a machine, the machine of a launch, notices, and warm spares of a region."""

from typing import Any

import msgspec
import pytest

from engine_agent.protocol.machine_messages import Device, MachineFacts, is_machine_id, machine_id_of
from fleet.machines.planner import (
    InvalidWarmSpares,
    NoMachine,
    PooledMachine,
    WarmSpares,
    describe,
    instance_type_of,
    machine_notices,
    parse_warm_spares,
    plan_machine,
    why_unfit,
)
from models_registry.versions.planning.machines import INSTANCE_TYPES

GIB = 2**30
H100 = Device("nvidia", "NVIDIA H100 80GB HBM3", memory_bytes=int(79.6 * GIB))
TRAINIUM = Device("neuron", "trn1.32xlarge", cores=2, memory_bytes=32 * GIB)
INFERENTIA = Device("neuron", "inf2.48xlarge", cores=2, memory_bytes=32 * GIB)
BARE = MachineFacts("10.0.0.7", 14000, cores=8, memory_bytes=32 * GIB, disk_free_bytes=200 * GIB)


def having(device: Device, count: int) -> MachineFacts:
    return msgspec.structs.replace(BARE, devices=(device,) * count)


def pooled(name: str, facts: MachineFacts = BARE, kind: str = "local.cpu", *, connected: bool = True) -> PooledMachine:
    return PooledMachine(name, kind, connected, facts)


@pytest.mark.parametrize(
    ("facts", "kind"),
    [
        (BARE, "local.cpu"),
        (having(H100, 8), "p5.48xlarge"),
        (having(TRAINIUM, 16), "trn1.32xlarge"),
        (having(INFERENTIA, 12), "inf2.48xlarge"),
        (having(H100, 7), ""),
        (msgspec.structs.replace(BARE, memory_bytes=GIB), ""),
    ],
)
def test_a_machine_is_the_type_that_its_devices_are(facts: MachineFacts, kind: str) -> None:
    assert instance_type_of(facts, INSTANCE_TYPES.values()) == kind


@pytest.mark.parametrize(
    ("facts", "kind", "lacks"),
    [
        (having(H100, 7), "p5.48xlarge", "has 7 chips of h100 instead of 8"),
        (having(H100, 8), "local.cpu", "has 8 accelerators instead of none"),
        (msgspec.structs.replace(BARE, memory_bytes=2 * GIB), "local.cpu", "has 2.0 GiB of memory instead of 4"),
        (
            having(Device("neuron", "trn1.32xlarge", cores=1), 16),
            "trn1.32xlarge",
            "has 16 cores of trainium instead of 32",
        ),
        (
            having(Device("nvidia", "H100", memory_bytes=40 * GIB), 8),
            "p5.48xlarge",
            "has 320 GiB on its accelerators instead of 640",
        ),
    ],
)
def test_what_it_lacks_is_named(facts: MachineFacts, kind: str, lacks: str) -> None:
    assert why_unfit(facts, INSTANCE_TYPES[kind]) == lacks


def test_a_launch_takes_the_connected_one_with_the_least_to_spare() -> None:
    big = msgspec.structs.replace(BARE, memory_bytes=64 * GIB)
    away = pooled("m-00000001", connected=False)
    chosen = plan_machine(INSTANCE_TYPES["local.cpu"], [away, pooled("m-00000002", big), pooled("m-00000003")])
    assert isinstance(chosen, PooledMachine)
    assert chosen.id == "m-00000003"


def test_a_stated_type_counts_whatever_the_agent_found() -> None:
    chosen = plan_machine(INSTANCE_TYPES["p5.48xlarge"], [pooled("m-00000001", kind="p5.48xlarge")])
    assert isinstance(chosen, PooledMachine)


def test_why_none_fits_is_said() -> None:
    shape = INSTANCE_TYPES["p5.48xlarge"]
    assert plan_machine(shape, []) == NoMachine("no machine is free; `switchyard machine add` invites one")
    assert plan_machine(shape, [pooled("m-1", connected=False)]) == NoMachine(
        "none of the 1 free machines is connected"
    )
    assert plan_machine(shape, [pooled(f"m-{number}") for number in range(5)]) == NoMachine(
        "no free machine is p5.48xlarge: m-0 has 0 chips of h100 instead of 8, "
        "m-1 has 0 chips of h100 instead of 8, m-2 has 0 chips of h100 instead of 8, and 2 more"
    )


def test_notices_name_what_an_operator_should_know() -> None:
    odd = msgspec.structs.replace(BARE, clock_ahead_s=-40.0, disk_free_bytes=3 * GIB, notices=("Cron is missing.",))
    stated = INSTANCE_TYPES["trn1.32xlarge"]
    assert machine_notices(facts=odd, stated=stated, found="trn1.32xlarge", silent_s=90) == (
        "Its machine agent has been silent for 90 s.",
        "It was invited as trn1.32xlarge, but has 0 chips of trainium instead of 16.",
        "Its clock is 40 s behind the control plane's.",
        "It has 3 GiB of disk free.",
        "Cron is missing.",
    )
    assert machine_notices(facts=having(H100, 3), stated=None, found="", silent_s=1) == (
        "No instance type fits it: 3 x NVIDIA H100 80GB HBM3, 8 cores, 32 GiB. Invite it with an instance type.",
    )
    assert machine_notices(facts=BARE, stated=None, found="local.cpu", silent_s=1) == ()


def test_a_machine_in_one_line() -> None:
    assert describe(BARE) == "no accelerators, 8 cores, 32 GiB"


def test_an_id_follows_from_the_nonce() -> None:
    name = machine_id_of("ab" * 32)
    assert is_machine_id(name)
    assert name == machine_id_of("ab" * 32) != machine_id_of("ac" * 32)
    assert not is_machine_id("m-0123456")
    assert not is_machine_id("m-01234567\n")


def test_a_number_keeps_so_many_for_anybody() -> None:
    assert parse_warm_spares({"a": 2, "b": 0}) == {"a": WarmSpares(2), "b": WarmSpares(0)}


def test_some_can_be_for_repair_alone() -> None:
    assert parse_warm_spares({"a": {"warm": 3, "repair_only": 1}, "b": {"warm": 1}}) == {
        "a": WarmSpares(3, 1),
        "b": WarmSpares(1),
    }


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("two", "spares.a: warm is 'two'; it must be a whole number to 10000"),
        (True, "warm is True"),
        (-1, "warm is -1"),
        ({"repair_only": 1}, 'it must be a number or {"warm": …, "repair_only": …}'),
        ({"warm": 1, "growth": 1}, 'it must be a number or {"warm": …, "repair_only": …}'),
        ({"warm": 1, "repair_only": 2}, "spares.a: repair_only is 2; it must be at most 1"),
    ],
)
def test_nonsense_is_refused_with_what_would_be_right(value: Any, message: str) -> None:
    with pytest.raises(InvalidWarmSpares) as refused:
        parse_warm_spares({"a": value})
    assert message in str(refused.value)
