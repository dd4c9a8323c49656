"""Parses the output of `neuron-ls` and `neuron-monitor` into devices. Pure, and tolerant: both tools leave fields out
or null them while no application runs, and rename fields between releases. So every field may be missing. Formats:
https://github.com/aws-neuron/aws-neuron-sdk, tools/neuron-sys-tools/neuron-monitor-user-guide.rst and neuron-ls.rst."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine_agent.protocol.telemetry_messages import Accelerator

KIND = "neuron"
ECC_COUNTERS = (
    "mem_ecc_corrected",
    "mem_ecc_uncorrected",
    "mem_ecc_repairable_uncorrected",
    "sram_ecc_corrected",
    "sram_ecc_uncorrected",
)
PHYSICAL_CORES_IN_GROUPS = 8
"""Of a Trainium2 or Trainium3 device. Only their cores can be grouped into logical ones (LNC, by default 2)."""
EXECUTION_TROUBLE = ("completed_with_err", "timed_out", "failed_to_queue")


class UnreadableOutput(ValueError):
    """Not the output of the tool; the text says what it is."""


@dataclass(frozen=True, slots=True)
class MonitorReport:
    """One line of `neuron-monitor`. Utilisation in percent and memory in bytes by core; counters by device index.
    `executions` counts errors and outcomes of the period that the line covers, over all applications."""

    device_type: str = ""
    cores_per_device: int = 0
    device_count: int = 0
    device_memory_bytes: int | None = None
    core_utilisation: Mapping[int, float] = field(default_factory=dict)
    core_memory_bytes: Mapping[int, int] = field(default_factory=dict)
    counters: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    executions: Mapping[str, int] = field(default_factory=dict)
    errors: tuple[str, ...] = ()


def parse_neuron_ls(text: str | bytes) -> tuple[Accelerator, ...]:
    """Devices by index, from `neuron-ls -j`: a list, or in some releases an object with the list. Grouped physical
    cores are counted as logical ones, as applications and `neuron-monitor` number them. Raises UnreadableOutput if it
    is neither."""
    listed = _json(text, "neuron-ls")
    if isinstance(listed, dict):
        lists = [value for value in listed.values() if isinstance(value, list)]
        listed = next((rows for rows in lists if any("neuron_device" in _object(row) for row in rows)), None)
    if not isinstance(listed, list):
        raise UnreadableOutput("neuron-ls printed no list of devices")
    rows = [row for row in map(_object, listed) if _whole_number(row.get("neuron_device")) is not None]
    devices = (
        Accelerator(
            index=_whole_number(row["neuron_device"]) or 0,
            kind=KIND,
            name=str(row.get("instance_type") or row.get("bdf") or "unnamed"),
            cores=_listed_cores(row),
            memory_total_bytes=_whole_number(row.get("memory_size")),
        )
        for row in rows
    )
    return tuple(sorted(devices, key=lambda device: device.index))


def _listed_cores(row: dict[str, Any]) -> int | None:
    ids = _list(row.get("neuroncore_ids"))
    return len(ids) or _logical(_whole_number(row.get("nc_count")), row) or None


def _logical(cores: int | None, described: dict[str, Any]) -> int:
    """Cores of a device as applications count them. The tools report either number for grouped ones: AWS documents 4
    for a trn2n.48xlarge, whose devices have 8."""
    group = _whole_number(described.get("logical_neuroncore_config")) or 1
    return (cores or 0) // (group if group > 1 and cores == PHYSICAL_CORES_IN_GROUPS else 1)


def parse_monitor_line(line: str | bytes) -> MonitorReport:
    """Parses one report. Raises UnreadableOutput if the line is not a JSON object."""
    report = _json(line, "neuron-monitor")
    if not isinstance(report, dict):
        raise UnreadableOutput(f"neuron-monitor printed a JSON {type(report).__name__} instead of an object")
    hardware = _object(report.get("neuron_hardware_info"))
    groups = [_object(_object(row).get("report")) for row in _list(report.get("neuron_runtime_data"))]
    system = _object(report.get("system_data"))
    return MonitorReport(
        device_type=str(hardware.get("neuron_device_type") or ""),
        cores_per_device=_logical(_whole_number(hardware.get("neuroncore_per_device_count")), hardware),
        device_count=_whole_number(hardware.get("neuron_device_count")) or 0,
        device_memory_bytes=_whole_number(hardware.get("neuron_device_memory_size")),
        core_utilisation=_core_utilisation(groups),
        core_memory_bytes=_core_memory(groups),
        counters=_counters(system),
        executions=_executions(groups),
        errors=_errors(report, groups, system),
    )


def with_report(known: Sequence[Accelerator], report: MonitorReport) -> tuple[Accelerator, ...]:
    """The devices updated by the report. It adds devices that `neuron-ls` did not show."""
    devices = {device.index: device for device in known}
    indices = set(devices) | set(report.counters) | set(range(report.device_count))
    return tuple(_device(index, devices.get(index), report) for index in sorted(indices))


def _device(index: int, known: Accelerator | None, report: MonitorReport) -> Accelerator:
    cores = (known.cores if known is not None else None) or report.cores_per_device
    own = range(index * cores, (index + 1) * cores)
    total = report.device_memory_bytes or (known.memory_total_bytes if known is not None else None)
    return Accelerator(
        index=index,
        kind=KIND,
        name=report.device_type or (known.name if known is not None else "unnamed"),
        cores=cores or None,
        utilisation_percent=round(sum(report.core_utilisation.get(c, 0.0) for c in own) / cores, 2) if cores else None,
        memory_used_bytes=sum(report.core_memory_bytes.get(core, 0) for core in own) if cores else None,
        memory_total_bytes=total,
        errors=dict(report.counters.get(index, known.errors if known is not None else {})),
    )


def _core_utilisation(groups: Sequence[dict[str, Any]]) -> dict[int, float]:
    """By core: the sum over applications, at most 100."""
    used: dict[int, float] = {}
    for group in groups:
        cores = _object(_object(group.get("neuroncore_counters")).get("neuroncores_in_use"))
        for core, counters in cores.items():
            percent = _number(_object(counters).get("neuroncore_utilization"))
            if core.isdecimal() and percent is not None:
                used[int(core)] = min(100.0, used.get(int(core), 0.0) + percent)
    return used


def _core_memory(groups: Sequence[dict[str, Any]]) -> dict[int, int]:
    used: dict[int, int] = {}
    for group in groups:
        memory = _object(_object(group.get("memory_used")).get("neuron_runtime_used_bytes"))
        cores = _object(_object(memory.get("usage_breakdown")).get("neuroncore_memory_usage"))
        for core, parts in cores.items():
            if core.isdecimal():
                own = sum(_whole_number(size) or 0 for size in _object(parts).values())
                used[int(core)] = used.get(int(core), 0) + own
    return used


def _counters(system: dict[str, Any]) -> dict[int, dict[str, int]]:
    counters: dict[int, dict[str, int]] = {}
    for row in map(_object, _list(_object(system.get("neuron_hw_counters")).get("neuron_devices"))):
        index = _whole_number(row.get("neuron_device_index"))
        if index is not None:
            values = {name: _whole_number(row.get(name)) for name in ECC_COUNTERS}
            counters[index] = {name: count for name, count in values.items() if count is not None}
    return counters


def _executions(groups: Sequence[dict[str, Any]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for group in groups:
        stats = _object(group.get("execution_stats"))
        errors = {f"{name}_errors": count for name, count in _object(stats.get("error_summary")).items()}
        outcomes = _object(stats.get("execution_summary"))
        for name, count in {**errors, **{name: outcomes.get(name) for name in EXECUTION_TROUBLE}}.items():
            if whole := _whole_number(count):
                total[name] = total.get(name, 0) + whole
    return total


def _errors(report: dict[str, Any], groups: Sequence[dict[str, Any]], system: dict[str, Any]) -> tuple[str, ...]:
    rows = [_object(row) for row in _list(report.get("neuron_runtime_data"))]
    parts = [*rows, _object(report.get("neuron_hardware_info"))]
    parts += [_object(part) for group in (*groups, system) for part in group.values()]
    return tuple(dict.fromkeys(str(part["error"]) for part in parts if part.get("error")))


def _json(text: str | bytes, tool: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableOutput(f"{tool} printed no JSON: {error}") from error


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 2**63 else None  # NaN is not below any number


def _whole_number(value: Any) -> int | None:
    number = _number(value)
    return int(number) if number is not None else None
