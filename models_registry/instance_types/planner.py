"""Instance types: what a machine has, the dated table that is shipped with the product (`shipped.csv`), and the rules
that a type must satisfy. Pure. Rows of the database (`models_registry.instance_types.models`) have the same fields and
take precedence; figures of operators and providers take precedence over both (`fleet.capacity.planning.rates`)."""

import csv
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import date
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType

TABLE = Path(__file__).with_name("shipped.csv")
SHIPPED_ON = date(2026, 11, 29)
"""Prices and power ratings of the table are as their sources stated them until then."""
LOCAL_CPU = "local.cpu"
CPU, NO_ACCELERATOR = "cpu", "none"
"""Accelerators of machines without any: engines compute on `cpu`; on `none` there are no cells, only ingresses."""
WITHOUT_CHIPS = frozenset({CPU, NO_ACCELERATOR})
NVIDIA, NEURON, NO_VENDOR = "nvidia", "neuron", "none"
VENDORS = (NVIDIA, NEURON, NO_VENDOR)
CPU_ARCHITECTURES = ("x86_64", "arm64")
NAME = r"^[A-Za-z0-9][-A-Za-z0-9._]*\Z"

VCPU_WATTS, VCPU_IDLE_WATTS = 3.5, 0.74
"""Per vCPU of a machine without accelerators, at full load and idle. Cloud Carbon Footprint, "Methodology", average of
AWS's processors by SPECpower; read on 2026-11-26."""
IDLE_SHARE = VCPU_IDLE_WATTS / VCPU_WATTS
"""Share of its maximum that an idle machine draws."""


@dataclass(frozen=True, slots=True)
class InstanceShape:
    """One instance type; every field is a column of `InstanceType`, which explains it.

    `cores` run one rank each: GPUs, or logical NeuronCores of `lnc` physical ones; 1 without accelerators, 0 if
    unknown. `memory_gib` is the accelerators' memory, or the host's without accelerators. `price_per_hour` in US
    dollars and `watts` are 0 if no list has one; other unknown numbers are None."""

    name: str
    accelerator: str
    chips: int = 0
    cores: int = 0
    memory_gib: float = 0
    price_per_hour: float = 0
    watts: float = 0
    tensor_parallel_degree: int = 1
    vendor: str = ""
    arch: str = ""
    lnc: int = 1
    device_fraction: float = 1.0
    chip_watts: float = 0
    cpu_arch: str = ""
    vcpus: int | None = None
    host_memory_gib: float | None = None
    network_cards: int | None = None
    efa_interfaces: int | None = None
    network_gbps: float | None = None
    local_nvme_gb: int | None = None
    interconnect: str = ""
    interconnect_gb_s: float | None = None
    notes: str = ""
    sources: str = ""

    @property
    def chip_memory_gib(self) -> float:
        """Memory of one accelerator, 0 without any."""
        return self.memory_gib / self.chips if self.chips else 0.0


OF_HARDWARE = (
    *("accelerator", "vendor", "chips", "cores", "memory_gib", "tensor_parallel_degree", "lnc", "device_fraction"),
)
"""Fields from which engines' arguments follow; the others may change while a type is in use."""


def read_table(lines: Iterable[str]) -> dict[str, InstanceShape]:
    """The types of a table with the columns of `shipped.csv`, by name."""
    return {shape.name: shape for shape in map(_shape_of_row, csv.DictReader(lines))}


def _shape_of_row(row: Mapping[str, str]) -> InstanceShape:
    chips, lnc = int(row["devices"]), int(row["default_lnc"] or 1)
    cores = chips * int(row["cores_per_device"]) // lnc if chips else 1
    host_memory_gib = float(row["host_memory_gib"])
    return InstanceShape(
        name=row["name"],
        accelerator=row["accelerator"],
        chips=chips,
        cores=cores,
        memory_gib=round(chips * int(row["memory_mib_per_device"]) / 1024, 3) if chips else host_memory_gib,
        price_per_hour=float(row["usd_per_hour_us_east_1"] or 0),
        watts=_machine_watts(row),
        tensor_parallel_degree=cores,
        vendor=row["vendor"],
        arch=row["arch"],
        lnc=lnc,
        device_fraction=float(row["device_fraction"]),
        chip_watts=float(row["watts_per_device"] or 0) * float(row["device_fraction"]),
        cpu_arch=row["cpu_arch"],
        vcpus=int(row["vcpus"]),
        host_memory_gib=host_memory_gib,
        network_cards=_whole(row["network_cards"]),
        efa_interfaces=_whole(row["efa_interfaces"]),
        network_gbps=_number(row["network_gbps"]),
        local_nvme_gb=_whole(row["local_nvme_gb"]),
        interconnect=row["interconnect"],
        interconnect_gb_s=_number(row["interconnect_gb_s_per_device"]),
        notes=row["notes"],
        sources=row["sources"],
    )


def _machine_watts(row: Mapping[str, str]) -> float:
    """The machine's rating; else those of its accelerators and vCPUs; 0 if its accelerators have none."""
    if row["watts_machine"]:
        return float(row["watts_machine"])
    of_vcpus, chips = int(row["vcpus"]) * VCPU_WATTS, int(row["devices"])
    if not chips:
        return of_vcpus
    of_chips = chips * float(row["device_fraction"]) * float(row["watts_per_device"] or 0)
    return of_chips + of_vcpus if of_chips else 0.0


def _whole(text: str) -> int | None:
    return int(text) if text else None


def _number(text: str) -> float | None:
    return float(text) if text else None


with TABLE.open(encoding="utf-8", newline="") as _lines:
    INSTANCE_TYPES: Mapping[str, InstanceShape] = MappingProxyType(read_table(_lines))
"""The shipped types by name."""


def rated_chip_watts(shape: InstanceShape) -> float:
    """Maximum watts of one accelerator: the type's own rating, else that of a shipped type with the same accelerator, 0
    if neither has one."""
    alike = (one for one in INSTANCE_TYPES.values() if one.accelerator == shape.accelerator)
    return shape.chip_watts or next((one.chip_watts / one.device_fraction for one in alike), 0.0)


def unknown_type_text(name: str, known: Iterable[str]) -> str:
    """The error about a name that no type has."""
    near = _near_names(name.lower(), sorted(known))
    return (
        f"unknown instance type {name!r}" + (f" (did you mean {' or '.join(near)}?)" if near else "")
        + "; `switchyard get instance-types` lists the known ones, and `switchyard create instance-type` adds one"
    )  # fmt: skip


NEAR_MOST = 3


def _near_names(name: str, known: list[str]) -> list[str]:
    """Names that are spelled alike, then those of the same family."""
    family = name.partition(".")[0]
    alike = [each for each in known if family and each.startswith(f"{family}.")]
    alike = alike or [each for each in known if family and each.startswith(family)]
    return list(dict.fromkeys((*get_close_matches(name, known, n=1, cutoff=0.8), *alike)))[:NEAR_MOST]


@dataclass(frozen=True, slots=True)
class ShapeProblem:
    """A broken rule: the field, and a sentence that says what is wrong and what would be right."""

    field: str
    text: str


def shape_problems(shape: InstanceShape) -> Iterator[ShapeProblem]:
    """Yields the rules that a type breaks."""
    if bool(shape.chips) == (shape.accelerator in WITHOUT_CHIPS):
        yield _chips_problem(shape)
        return
    if shape.memory_gib <= 0:
        yield ShapeProblem("memory_gib", "it must be over 0: state the memory of all accelerators, or of a CPU's host")
    if not shape.chips and shape.cores != 1:
        yield ShapeProblem("cores", f"it is {shape.cores}; without accelerators one engine uses the host, so state 1")
    if shape.chips and (shape.cores < 1 or shape.cores % shape.chips):
        text = f"it is {shape.cores}; all chips have the same number, so state a multiple of {shape.chips}"
        yield ShapeProblem("cores", text)
    elif shape.cores % shape.tensor_parallel_degree:
        text = f"it is {shape.tensor_parallel_degree}; it must divide the {shape.cores} cores of the machine"
        yield ShapeProblem("tensor_parallel_degree", text)
    if shape.device_fraction < 1 and shape.chips != 1:
        text = f"it is {shape.device_fraction:g}; only a machine with one accelerator has a part of it, so state 1"
        yield ShapeProblem("device_fraction", text)
    if shape.lnc > 1 and shape.vendor != NEURON:
        yield ShapeProblem("lnc", f"it is {shape.lnc}; only NeuronCores are grouped, so state 1")


def _chips_problem(shape: InstanceShape) -> ShapeProblem:
    if shape.chips:
        text = f"it is {shape.chips}; accelerator {shape.accelerator!r} stands for none, so state 0 or the accelerator"
        return ShapeProblem("chips", text)
    return ShapeProblem("chips", f"it is 0; state the number of {shape.accelerator}, or accelerator {CPU!r}")


def completed(shape: InstanceShape, stated: Iterable[str]) -> InstanceShape:
    """A new type with values for fields that are not `stated`, from shipped types with the same accelerator: vendor,
    architecture, grouping of cores, cores per chip, watts. Default degree: one rank on every core."""
    missing = set(InstanceShape.__dataclass_fields__) - set(stated)
    alike = next((one for one in INSTANCE_TYPES.values() if one.accelerator == shape.accelerator), None)
    values: dict[str, object] = {}
    if alike is not None:
        values = {name: getattr(alike, name) for name in ("vendor", "arch", "lnc", "chip_watts") if name in missing}
    if "cores" in missing:
        per_chip = alike.cores // alike.chips if alike is not None and alike.chips else 1
        values["cores"] = shape.chips * per_chip or 1
    if not shape.chips and "memory_gib" in missing:
        values["memory_gib"] = shape.host_memory_gib or 0.0
    made = replace(shape, **values)  # type: ignore[arg-type] # by name
    return made if "tensor_parallel_degree" in stated else replace(made, tensor_parallel_degree=max(1, made.cores))


SHORT_NAME = 32
"""Longest name that is made of a device's name; it ends with a whole word."""
_WORD = re.compile(r"[^a-z0-9]+")
_FAMILIES: Mapping[str, tuple[str, ...]] = {
    "trainium": ("trainium1", "trn1", "trn1n"),
    "trainium2": ("trn2", "trn2u"),
    "inferentia": ("inferentia1", "inf1"),
    "inferentia2": ("inf2",),
}
"""Other names of Neuron's accelerators, by which its tools name the devices of a machine."""


def is_device_of(device_name: str, accelerator: str) -> bool:
    """Whether a driver's name of a device is this accelerator: `NVIDIA H100 80GB HBM3` is an h100 and no h10,
    `trn1.32xlarge` a trainium."""
    words = f"-{_WORD.sub('-', device_name.lower())}-"
    names = (accelerator.lower(), *_FAMILIES.get(accelerator, ()))
    return any(f"-{_WORD.sub('-', name)}-" in words for name in names)


def accelerator_of(device_name: str) -> str:
    """The accelerator that a driver's name of a device is: a shipped one, else the name in a short form, "" for a name
    without a short word of letters and digits."""
    known = {shape.accelerator for shape in INSTANCE_TYPES.values()} - WITHOUT_CHIPS
    fitting = [name for name in known if is_device_of(device_name, name)]
    words = _WORD.sub("-", device_name.lower()).strip("-").removeprefix("nvidia-")
    short = words if len(words) <= SHORT_NAME else words[: SHORT_NAME + 1].rpartition("-")[0]
    return max(fitting, key=len, default=short)
