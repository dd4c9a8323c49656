"""The shipped table is well-formed row by row, types obey their rules, and drivers' names of devices are understood."""

import csv
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models_registry.instance_types.planner import (
    CPU_ARCHITECTURES,
    INSTANCE_TYPES,
    NAME,
    NEURON,
    NVIDIA,
    TABLE,
    VENDORS,
    WITHOUT_CHIPS,
    InstanceShape,
    accelerator_of,
    completed,
    is_device_of,
    rated_chip_watts,
    shape_problems,
    unknown_type_text,
)

ROWS = list(csv.DictReader(TABLE.read_text().splitlines()))


@pytest.mark.parametrize("row", ROWS, ids=[row["name"] for row in ROWS])
def test_a_shipped_row_is_whole_and_agrees_with_itself(row: dict[str, str]) -> None:
    shape = INSTANCE_TYPES[row["name"]]
    assert list(shape_problems(shape)) == []
    assert re.match(NAME, shape.name)
    assert shape.vendor in VENDORS
    assert shape.cpu_arch in {*CPU_ARCHITECTURES, "" if shape.name == "local.cpu" else "x86_64"}
    devices, each_mib = int(row["devices"]), int(row["memory_mib_per_device"])
    assert devices * each_mib / 1024 == pytest.approx(float(row["accelerator_memory_gib"]), abs=0.06)
    assert shape.chip_memory_gib * 1024 == pytest.approx(each_mib, abs=1)
    assert shape.cores == shape.tensor_parallel_degree
    assert shape.vcpus is not None
    assert shape.host_memory_gib is not None
    assert 0 < shape.vcpus <= 256
    assert 0 < shape.host_memory_gib <= 4096
    assert 0 <= shape.price_per_hour < 1000
    assert 0 <= shape.watts < 20_000
    assert shape.watts >= shape.chips * shape.chip_watts
    assert (shape.efa_interfaces or 0) <= (shape.network_cards or 0)
    assert row["sources"]


def test_names_are_unique_and_what_other_parts_name_is_there() -> None:
    assert len(INSTANCE_TYPES) == len(ROWS)
    assert {"local.cpu", "c7i.2xlarge", "trn1.32xlarge", "g5g.xlarge", "p6e-gb200.36xlarge"} <= INSTANCE_TYPES.keys()
    assert not [name for name in INSTANCE_TYPES if "(" in name]


def test_cores_of_neuron_are_logical_ones() -> None:
    trn2, trn1, inf1 = (INSTANCE_TYPES[name] for name in ("trn2.48xlarge", "trn1.32xlarge", "inf1.24xlarge"))
    assert (trn2.lnc, trn2.chips, trn2.cores) == (2, 16, 64)
    assert (trn1.lnc, trn1.cores, inf1.cores) == (1, 32, 64)


def test_watts_are_the_machines_rating_or_the_sum_of_its_parts_or_unknown() -> None:
    assert INSTANCE_TYPES["p5.48xlarge"].watts == 10_200
    assert INSTANCE_TYPES["g6.12xlarge"].watts == 4 * 72 + 48 * 3.5
    assert INSTANCE_TYPES["g6f.large"].watts == 72 / 8 + 2 * 3.5
    assert INSTANCE_TYPES["local.cpu"].watts == 3.5
    assert INSTANCE_TYPES["trn1.32xlarge"].watts == 0
    assert rated_chip_watts(InstanceShape("own", "l4", 2)) == 72
    assert rated_chip_watts(InstanceShape("own", "l4", 2, chip_watts=60)) == 60


H100 = INSTANCE_TYPES["p5.48xlarge"]


@pytest.mark.parametrize(
    ("shape", "field", "says"),
    [
        (replace(H100, chips=0), "chips", "it is 0; state the number of h100, or accelerator 'cpu'"),
        (replace(H100, accelerator="cpu"), "chips", "it is 8; accelerator 'cpu' stands for none"),
        (replace(H100, memory_gib=0), "memory_gib", "it must be over 0"),
        (replace(H100, cores=12), "cores", "it is 12; all chips have the same number, so state a multiple of 8"),
        (replace(H100, cores=0), "cores", "it is 0; all chips have the same number"),
        (replace(H100, tensor_parallel_degree=3), "tensor_parallel_degree", "it must divide the 8 cores"),
        (replace(H100, device_fraction=0.5), "device_fraction", "it is 0.5; only a machine with one accelerator"),
        (replace(H100, lnc=2), "lnc", "it is 2; only NeuronCores are grouped"),
        (InstanceShape("own", "cpu", cores=2, memory_gib=8), "cores", "it is 2; without accelerators"),
    ],
)
def test_a_broken_rule_is_named_with_its_field(shape: InstanceShape, field: str, says: str) -> None:
    (problem, *_) = shape_problems(shape)
    assert problem.field == field
    assert says in problem.text


@given(
    accelerator=st.sampled_from(sorted({shape.accelerator for shape in INSTANCE_TYPES.values()} | {"mi300x"})),
    chips=st.integers(1, 64),
    each_gib=st.floats(0.5, 512),
)
def test_a_type_of_a_few_fields_is_completed_to_a_sound_one(accelerator: str, chips: int, each_gib: float) -> None:
    chips = 0 if accelerator in WITHOUT_CHIPS else chips
    stated = {"chips": chips, "memory_gib": (chips or 1) * each_gib}
    shape = completed(InstanceShape("own", accelerator, **stated), stated)  # type: ignore[arg-type] # by name
    assert list(shape_problems(shape)) == []
    assert shape.cores >= max(chips, 1)
    assert shape.tensor_parallel_degree == shape.cores
    known = {one.accelerator: one.vendor for one in INSTANCE_TYPES.values()}
    assert shape.vendor == known.get(accelerator, "")


def test_stated_fields_stay_when_a_type_is_completed() -> None:
    stated = {"chips": 2, "cores": 8, "tensor_parallel_degree": 4, "memory_gib": 192.0, "lnc": 2}
    shape = completed(InstanceShape("own", "trainium2", **stated), stated)  # type: ignore[arg-type] # by name
    assert (shape.cores, shape.tensor_parallel_degree, shape.lnc, shape.vendor) == (8, 4, 2, NEURON)
    host = completed(InstanceShape("own", "cpu", host_memory_gib=16), {"host_memory_gib"})
    assert (host.cores, host.memory_gib) == (1, 16)


@pytest.mark.parametrize(
    ("device", "accelerator"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("Tesla T4", "t4"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        ("trn1.32xlarge", "trainium"),
        ("trainium1", "trainium"),
        ("trn2.48xlarge", "trainium2"),
        ("inf2.48xlarge", "inferentia2"),
        ("NVIDIA GeForce RTX 4090", "geforce-rtx-4090"),
        ("…", ""),
    ],
)
def test_a_drivers_name_is_understood(device: str, accelerator: str) -> None:
    assert accelerator_of(device) == accelerator


def test_a_device_is_no_other_accelerator_whose_name_it_contains() -> None:
    assert is_device_of("NVIDIA L4", "l4")
    assert not is_device_of("NVIDIA L40S", "l4")
    assert not is_device_of("NVIDIA GB200", "b200")
    assert not is_device_of("trn2.48xlarge", "trainium")
    assert INSTANCE_TYPES["p6e-gb200.36xlarge"].vendor == NVIDIA


def test_an_unknown_name_is_answered_with_a_similar_one() -> None:
    assert "(did you mean p5.48xlarge or p5.4xlarge?)" in unknown_type_text("P5.48xlrge", INSTANCE_TYPES)
    family = "(did you mean p6-b200.48xlarge or p6-b300.48xlarge or p6e-gb200.36xlarge?)"
    assert family in unknown_type_text("p6", INSTANCE_TYPES)
    assert unknown_type_text("zzz", INSTANCE_TYPES).startswith("unknown instance type 'zzz'; `switchyard get instance-")
