"""Signatures of hardware faults, defined once for the agents that notice them and the planners that act on them.
Sources: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/neuron-runtime/nrt-troubleshoot.html (hardware errors),
https://docs.nvidia.com/deploy/xid-errors/ and https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class FaultSignature(StrEnum):
    """A fault of accelerators, network or checks; the value is `Fault.signature`."""

    NEURON_SRAM_UNCORRECTABLE = "neuron_sram_uncorrectable"
    NEURON_CORE_UNCORRECTABLE = "neuron_core_uncorrectable"
    NEURON_HBM_UNCORRECTABLE = "neuron_hbm_uncorrectable"
    NEURON_HBM_REPAIRABLE = "neuron_hbm_repairable"
    NEURON_DMA_ERROR = "neuron_dma_error"
    NEURON_COLLECTIVES_HANG = "neuron_collectives_hang"
    NEURON_COMPUTE_HANG = "neuron_compute_hang"
    NEURON_NETWORK_PROXY = "neuron_network_proxy"
    NEURON_HARDWARE_ERROR = "neuron_hardware_error"
    NVIDIA_XID_FATAL = "nvidia_xid_fatal"
    NVIDIA_XID = "nvidia_xid"
    NVIDIA_GPU_LOST = "nvidia_gpu_lost"
    NVIDIA_DRIVER_SILENT = "nvidia_driver_silent"
    NVIDIA_ECC_UNCORRECTABLE = "nvidia_ecc_uncorrectable"
    NVIDIA_ECC_CONTAINED = "nvidia_ecc_contained"
    NVIDIA_RECOVERY_NEEDED = "nvidia_recovery_needed"
    NVIDIA_ROW_REMAP_FAILED = "nvidia_row_remap_failed"
    NVIDIA_ROW_REMAP_PENDING = "nvidia_row_remap_pending"
    ACCELERATOR_MISSING = "accelerator_missing"
    EFA_ERRORS = "efa_errors"
    EFA_PORT_DOWN = "efa_port_down"
    DEEP_CHECK_FAILED = "deep_check_failed"
    LINK_CHECK_FAILED = "link_check_failed"


HARD_SIGNATURES = frozenset(
    {
        FaultSignature.NEURON_SRAM_UNCORRECTABLE,
        FaultSignature.NEURON_CORE_UNCORRECTABLE,
        FaultSignature.NEURON_HBM_UNCORRECTABLE,
        FaultSignature.NEURON_DMA_ERROR,
        FaultSignature.NEURON_COLLECTIVES_HANG,
        FaultSignature.NEURON_COMPUTE_HANG,
        FaultSignature.NVIDIA_XID_FATAL,
        FaultSignature.NVIDIA_GPU_LOST,
        FaultSignature.NVIDIA_DRIVER_SILENT,
        FaultSignature.NVIDIA_ECC_UNCORRECTABLE,
        FaultSignature.NVIDIA_RECOVERY_NEEDED,
        FaultSignature.NVIDIA_ROW_REMAP_FAILED,
        FaultSignature.ACCELERATOR_MISSING,
        FaultSignature.DEEP_CHECK_FAILED,
    }
)
"""The hardware cannot be trusted and a restart does not help (design.md, faults). Other faults pass, or need a
reload."""

CLOUD_ALARM, CLOUD_ALARM_GRAVE = "cloud_alarm", "cloud_alarm_grave"
"""Of nodes whose machine is in an alarm of CloudWatch. Agents cannot report them. The grave one is of an alarm that may
replace machines without other evidence (`fleet.clouds.planning.alarms`)."""

UNATTRIBUTED_SIGNATURES = frozenset(
    {
        FaultSignature.NEURON_COLLECTIVES_HANG,
        FaultSignature.NEURON_NETWORK_PROXY,
        FaultSignature.EFA_ERRORS,
        FaultSignature.LINK_CHECK_FAILED,
    }
)
"""Every rank of a cell sees these when one of them is broken: they identify the cell, not the node."""


SLOW_CLOCK_REASONS: Mapping[str, str] = {
    "hw_slowdown": "its hardware halves the clock or more",
    "sw_thermal_slowdown": "it is too hot",
    "hw_thermal_slowdown": "it is so hot that its hardware halves the clock or more",
    "hw_power_brake_slowdown": "its machine's power supply asks for less power",
}
"""Reasons of an NVIDIA driver for a lower clock that are trouble of the machine: cooling, power supply, hardware. The
others are normal: a GPU that is idle (`gpu_idle`), limited by an operator (`applications_clocks_setting`,
`display_clock_setting`, `sync_boost`), or at its power limit under full load (`sw_power_cap`). Source: nvml.h,
`nvmlClocksEventReasons`."""


class FaultScope(StrEnum):
    """The part of a machine that a fault concerns: one device, which only its node uses, or the machine with all of its
    nodes."""

    DEVICE = "device"
    MACHINE = "machine"


MACHINE_SIGNATURES = frozenset(
    {FaultSignature.EFA_PORT_DOWN, FaultSignature.NVIDIA_DRIVER_SILENT, CLOUD_ALARM, CLOUD_ALARM_GRAVE}
)
"""Of the network card and of the driver, which all nodes of a machine use, and alarms about the machine."""
XID_SIGNATURES = frozenset({FaultSignature.NVIDIA_XID, FaultSignature.NVIDIA_XID_FATAL})
HOST_CHECKS = frozenset({"memory", "disk", "matmul cpu"})
"""Deep checks of what all nodes of a machine use (`engine_agent.node.checks`)."""


def fault_scope(signature: str, evidence: Mapping[str, Any]) -> FaultScope:
    """The part that a fault concerns. An XID without a device concerns the machine: its driver no longer knows which
    GPU it was."""
    is_of_machine = (
        signature in MACHINE_SIGNATURES
        or (signature == FaultSignature.DEEP_CHECK_FAILED and evidence.get("check") in HOST_CHECKS)
        or (signature in XID_SIGNATURES and "device" in evidence and evidence["device"] is None)
    )
    return FaultScope.MACHINE if is_of_machine else FaultScope.DEVICE


def fault_detail(signature: str, evidence: Mapping[str, Any]) -> str:
    """What a repair depends on besides the signature: the XID, NVML's error or recovery action, or the failed check.
    Empty if there is none."""
    named: dict[str, str] = {
        FaultSignature.NVIDIA_XID: "xid",
        FaultSignature.NVIDIA_XID_FATAL: "xid",
        FaultSignature.NVIDIA_GPU_LOST: "nvml_error",
        FaultSignature.NVIDIA_RECOVERY_NEEDED: "recovery_action",
        FaultSignature.DEEP_CHECK_FAILED: "check",
    }
    return str(evidence.get(named.get(signature, ""), ""))[:64]


def fault_device(signature: str, evidence: Mapping[str, Any]) -> str:
    """The device in a fault's evidence: its UUID, or as `neuron 3`; empty if it names none."""
    if uuid := evidence.get("uuid"):
        return str(uuid)[:96]
    index, kind = evidence.get("device", evidence.get("nd_id")), signature.partition("_")[0]
    return f"{kind} {index}" if kind in {"nvidia", "neuron"} and str(index).isdecimal() else ""


def is_hard(signature: str) -> bool:
    """Whether the hardware with this fault must be replaced."""
    return signature in HARD_SIGNATURES or signature == CLOUD_ALARM_GRAVE
