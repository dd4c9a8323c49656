"""Tables: the type of a machine, the machine of a launch, notices, and warm spares of a region."""

import re
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.protocol.machine_messages import Device, MachineFacts, is_machine_id, machine_id_of
from fleet.machines.planner import (
    InvalidWarmSpares,
    NoMachine,
    PooledMachine,
    WarmSpares,
    describe,
    hardware_difference,
    instance_type_of,
    machine_notices,
    parse_warm_spares,
    plan_machine,
    shape_found,
    why_unfit,
)
from models_registry.instance_types.planner import INSTANCE_TYPES, NAME, shape_problems

GIB = 2**30
H100 = Device("nvidia", "NVIDIA H100 80GB HBM3", memory_bytes=int(79.6 * GIB))
TRAINIUM = Device("neuron", "trn1.32xlarge", cores=2, memory_bytes=32 * GIB)
INFERENTIA = Device("neuron", "inf2.48xlarge", cores=2, memory_bytes=32 * GIB)
BARE = MachineFacts("10.0.0.7", 14000, cores=8, memory_bytes=32 * GIB, disk_free_bytes=200 * GIB)


L40S = Device("nvidia", "NVIDIA L40S", memory_bytes=45776 * 2**20)
L4 = Device("nvidia", "NVIDIA L4", memory_bytes=22888 * 2**20)
T4G = Device("nvidia", "NVIDIA T4G", memory_bytes=16384 * 2**20)


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
        (having(L40S, 1), "g6e.2xlarge"),
        (having(msgspec.structs.replace(L4, memory_bytes=2861 * 2**20), 1), "g6f.xlarge"),
        (msgspec.structs.replace(having(T4G, 1), system="Linux 6.1 aarch64"), "g5g.2xlarge"),
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


def test_among_equal_types_a_preferred_one_is_chosen() -> None:
    shapes = [*INSTANCE_TYPES.values(), replace(INSTANCE_TYPES["p5.48xlarge"], name="own.8xh100")]
    assert instance_type_of(having(H100, 8), shapes, preferred={"own.8xh100"}) == "own.8xh100"
    assert instance_type_of(having(H100, 8), shapes) in {"p5.48xlarge", "own.8xh100"}


def test_a_type_is_made_of_what_an_agent_found() -> None:
    arm = msgspec.structs.replace(having(H100, 2), system="Linux 6.8.0 aarch64")
    shape = shape_found(arm)
    assert shape is not None
    assert (shape.name, shape.accelerator, shape.chips, shape.cores) == ("found.2xh100-80gib-arm64", "h100", 2, 2)
    assert (shape.vendor, shape.arch, shape.cpu_arch, shape.vcpus) == ("nvidia", "9.0", "arm64", 8)
    assert why_unfit(arm, shape) == ""
    own = shape_found(having(Device("nvidia", "NVIDIA GeForce RTX 4090", memory_bytes=24 * GIB), 1))
    assert own is not None
    assert own.name == "found.1xgeforce-rtx-4090-24gib"
    small = shape_found(msgspec.structs.replace(BARE, memory_bytes=GIB))
    assert small is not None
    assert (small.name, small.accelerator, small.memory_gib) == ("found.cpu-8x-1gib", "cpu", 1)
    neuron = shape_found(having(TRAINIUM, 3))
    assert neuron is not None
    assert (neuron.accelerator, neuron.cores, neuron.vendor) == ("trainium", 6, "neuron")


@pytest.mark.parametrize(
    "facts",
    [
        having(Device("nvidia", "NVIDIA H100"), 2),
        msgspec.structs.replace(BARE, devices=(H100, L4)),
        having(Device("nvidia", "…", memory_bytes=GIB), 1),
        having(Device("rocm", "AMD Instinct MI300X", memory_bytes=192 * GIB), 1),
        having(Device("nvidia", "NVIDIA H100", memory_bytes=2**70), 1),
        having(Device("nvidia", "NVIDIA H100", memory_bytes=-1), 1),
        msgspec.structs.replace(BARE, memory_bytes=2**80),
        msgspec.structs.replace(BARE, cores=0, memory_bytes=GIB),
    ],
)
def test_no_type_is_made_of_what_cannot_be_one(facts: MachineFacts) -> None:
    assert shape_found(facts) is None


AMOUNTS = st.none() | st.integers(-(2**70), 2**70) | st.integers(1, 2**40)


@given(
    st.builds(
        Device,
        kind=st.sampled_from(["nvidia", "neuron", "", "x" * 99]),
        name=st.text(max_size=80) | st.sampled_from(["NVIDIA L4", "trn2.48xlarge", "NVIDIA " + "ab-" * 30]),
        cores=AMOUNTS | st.integers(1, 8),
        memory_bytes=AMOUNTS,
    ),
    st.integers(0, 256),
    st.integers(-(2**70), 2**70) | st.integers(1, 2**45),
)
def test_whatever_a_machine_reports_makes_a_sound_type_or_none(device: Device, count: int, memory_bytes: int) -> None:
    facts = msgspec.structs.replace(having(device, count), memory_bytes=memory_bytes)
    shape = shape_found(facts)
    if shape is not None:
        assert why_unfit(facts, shape) == ""
        assert list(shape_problems(shape)) == []
        assert re.match(NAME, shape.name)
        assert len(shape.name) <= 64


def test_a_machine_that_is_not_its_type_is_a_difference_with_evidence() -> None:
    p5 = INSTANCE_TYPES["p5.48xlarge"]
    found = hardware_difference("m-1", having(H100, 7), p5, is_stated=True)
    assert found is not None
    assert found.summary == "m-1 is stated as p5.48xlarge, but has 7 chips of h100 instead of 8"
    assert found.evidence == {
        "instance_type": "p5.48xlarge",
        "stated": True,
        "difference": "has 7 chips of h100 instead of 8",
        "found": "7 x NVIDIA H100 80GB HBM3, 8 cores, 32 GiB",
    }
    arm = msgspec.structs.replace(having(H100, 8), system="Linux 6.8.0 aarch64")
    assert why_unfit(arm, p5) == "has a processor of arm64 instead of x86_64"
    assert hardware_difference("m-1", having(H100, 8), p5, is_stated=False) is None


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
