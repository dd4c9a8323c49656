"""Decides how a node that is out of use is repaired: the ladder of restarting its engine, resetting its device,
rebooting its machine and replacing it. A rung is tried only if the evidence allows it, it is possible there, and it did
not fail for this fault before. Deep checks follow each attempt. Replacing is always possible and ends the ladder.

Sources of `RUNGS`: for XIDs, the column "Immediate Action" of
https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html (RESTART_APP, RESET_GPU, RESTART_BM); for memory,
https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/ (a pending row remap needs a reset, a failed one a new GPU); for
recovery actions and errors of NVML, nvml.h; for Neuron, "Hardware Errors" of
https://awsdocs-neuron.readthedocs-hosted.com/en/latest/neuron-runtime/nrt-troubleshoot.html, which asks to terminate or
stop the instance, or to reload the driver or reboot."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from engine_agent.protocol.signatures import CLOUD_ALARM_GRAVE, FaultScope, FaultSignature, is_hard
from fleet.faults.planning.views import Attempt, Rung, SignalView
from fleet.reconcile.planning.settings import FaultSettings

RESTART, RESET, REBOOT, REPLACE = Rung.RESTART, Rung.RESET, Rung.REBOOT, Rung.REPLACE
FROM_RESTART, FROM_RESET, FROM_REBOOT = (RESTART, RESET, REBOOT, REPLACE), (RESET, REBOOT, REPLACE), (REBOOT, REPLACE)

RUNGS: Mapping[str, tuple[Rung, ...]] = {
    FaultSignature.NVIDIA_XID: FROM_RESTART,
    FaultSignature.NVIDIA_XID_FATAL: FROM_RESET,
    FaultSignature.NVIDIA_GPU_LOST: FROM_REBOOT,
    FaultSignature.NVIDIA_DRIVER_SILENT: FROM_REBOOT,
    FaultSignature.NVIDIA_ECC_UNCORRECTABLE: FROM_RESET,
    FaultSignature.NVIDIA_ECC_CONTAINED: FROM_RESTART,
    FaultSignature.NVIDIA_RECOVERY_NEEDED: FROM_REBOOT,
    FaultSignature.NVIDIA_ROW_REMAP_FAILED: (REPLACE,),
    FaultSignature.NVIDIA_ROW_REMAP_PENDING: FROM_RESET,
    FaultSignature.ACCELERATOR_MISSING: FROM_REBOOT,
    FaultSignature.NEURON_SRAM_UNCORRECTABLE: (REPLACE,),
    FaultSignature.NEURON_CORE_UNCORRECTABLE: (REPLACE,),
    FaultSignature.NEURON_HBM_UNCORRECTABLE: (REPLACE,),
    FaultSignature.NEURON_HBM_REPAIRABLE: FROM_RESET,
    FaultSignature.NEURON_DMA_ERROR: (REPLACE,),
    FaultSignature.NEURON_COLLECTIVES_HANG: (RESTART, REPLACE),
    FaultSignature.NEURON_COMPUTE_HANG: (REPLACE,),
    FaultSignature.NEURON_NETWORK_PROXY: (RESTART, REBOOT, REPLACE),
    FaultSignature.NEURON_HARDWARE_ERROR: FROM_RESTART,
    FaultSignature.EFA_ERRORS: (RESTART, REBOOT, REPLACE),
    FaultSignature.EFA_PORT_DOWN: FROM_REBOOT,
    FaultSignature.DEEP_CHECK_FAILED: (REPLACE,),
    FaultSignature.LINK_CHECK_FAILED: FROM_REBOOT,
    CLOUD_ALARM_GRAVE: (REPLACE,),
}
"""Signature -> the rungs that may help, lowest first, unless `DETAILED` knows its detail."""
DETAILED: Mapping[tuple[str, str], tuple[Rung, ...]] = {
    (FaultSignature.NVIDIA_XID_FATAL, "79"): FROM_REBOOT,
    (FaultSignature.NVIDIA_GPU_LOST, "16"): FROM_RESET,
    (FaultSignature.NVIDIA_RECOVERY_NEEDED, "1"): FROM_RESET,
    (FaultSignature.DEEP_CHECK_FAILED, "matmul"): FROM_RESET,
}
"""(signature, detail): XID 79 (the GPU fell off the bus), NVML's error 16 (a reset is required), its recovery action 1
(reset), and a wrong result of computing on an accelerator."""
COME_BACK = frozenset({FaultSignature.NVIDIA_ECC_CONTAINED, FaultSignature.NEURON_HBM_REPAIRABLE})
"""Soft signatures that end the engine and mean a device that needs a reset if they come back. Others, such as an
application's XID, may come from the program as often as it runs."""
RESET_CHECK = "reset"
"""The name under which an agent reports a reset, before its deep checks (`engine_agent.node.checks.reset`)."""
REPAIRING = frozenset({RESET, REBOOT})
"""Rungs that a node climbs while it is out of use. The engine is restarted by its cell, and a replacement needs no
order here."""


@dataclass(frozen=True, slots=True)
class Step:
    """One rung of a ladder. `state`: `skipped`, `failed`, `running`, `next`, `later`."""

    rung: Rung
    state: str
    reason: str

    def as_evidence(self) -> dict[str, Any]:
        return {"rung": self.rung.value, "state": self.state, "reason": self.reason}


@dataclass(frozen=True, slots=True)
class Ladder:
    """All rungs, lowest first. `next`: what to try now; None while an attempt runs."""

    steps: tuple[Step, ...]
    next: Rung | None
    reason: str = ""
    running: Attempt | None = None
    devices: tuple[str, ...] = field(default=())


def rungs_of(signal: SignalView) -> tuple[Rung, ...]:
    """Rungs that may cure a fault, lowest first."""
    return DETAILED.get((signal.signature, signal.detail)) or RUNGS.get(signal.signature, (REPLACE,))


def is_grave(signal: SignalView, settings: FaultSettings) -> bool:
    """Whether a fault takes its node out of use: a hard one, or a soft one that restarts of the engine did not cure."""
    lasted_s = (signal.last_at - signal.first_at).total_seconds()
    came_back = signal.count > settings.restarts_allowed and lasted_s <= settings.repairs_window_s
    return is_hard(signal.signature) or (signal.signature in COME_BACK and came_back)


def plan_ladder(
    signals: Collection[SignalView],
    impossible: Mapping[Rung, str],
    attempts: Sequence[Attempt],
    settings: FaultSettings,
    now: datetime,
) -> Ladder:
    """The ladder of a node with these unsettled signals, of which the grave ones count. `impossible`: rung -> why it
    cannot be tried there. `attempts`: of this node, oldest first."""
    hard = sorted((s for s in signals if is_grave(s, settings)), key=lambda s: (s.first_at, s.signature))
    since = min((signal.first_at for signal in hard), default=now)
    steps: list[Step] = []
    next_rung: Rung | None = None
    running = next((attempt for attempt in attempts if attempt.ended_at is None), None)
    for rung in Rung:
        state, reason = _state_of(rung, hard, impossible, attempts, since, settings, now)
        if state == "next" and (next_rung is not None or running is not None):
            state, reason = "later", f"if the {(running.rung if running else next_rung or rung).noun} does not help"
        elif state == "next":
            next_rung = rung
        steps.append(Step(rung, state, reason))
    devices = tuple(dict.fromkeys(signal.device for signal in hard if signal.device))
    reason = f"{hard[0].signature}: {hard[0].summary}" if hard else ""
    return Ladder(tuple(steps), next_rung, reason, running, devices)


def _state_of(
    rung: Rung,
    hard: Sequence[SignalView],
    impossible: Mapping[Rung, str],
    attempts: Sequence[Attempt],
    since: datetime,
    settings: FaultSettings,
    now: datetime,
) -> tuple[str, str]:
    mine = [attempt for attempt in attempts if attempt.rung is rung]
    if mine and mine[-1].ended_at is None:
        return "running", mine[-1].reason
    if rung is RESTART and (soft := next((s for s in hard if not is_hard(s.signature)), None)):
        return "failed", f"{soft.signature} came back {soft.count - 1} times"
    for_this = [attempt for attempt in mine if attempt.at >= since]
    if for_this:
        return "failed", for_this[-1].result
    if unsuited := next((signal for signal in hard if rung not in rungs_of(signal)), None):
        detail = f" {unsuited.detail}" if unsuited.detail else ""
        return "skipped", f"it does not cure {unsuited.signature}{detail}"
    if rung in impossible:
        return "skipped", impossible[rung]
    recent = [attempt for attempt in mine if now - attempt.at <= timedelta(seconds=settings.repairs_window_s)]
    if len(recent) >= settings.attempts_allowed:
        days = settings.repairs_window_s / 86400
        return "skipped", f"it was tried {len(recent)} times in {days:.0f} days, and the fault came back"
    return "next", hard[0].summary if hard else ""


def verdict_of(
    attempt: Attempt, seen_again: Iterable[str], settings: FaultSettings, now: datetime
) -> tuple[bool, str] | None:
    """Whether an attempt cured its fault, with the reason; None while it runs. `seen_again`: summaries of faults that
    were reported since its checks began."""
    if attempt.checks is not None:
        if failed := [f"{name}: {found}" for name, ok, found in attempt.checks if ok is False]:
            return False, "; ".join(failed)
        if again := list(seen_again):
            return False, f"seen again: {again[0]}"
        if attempt.rung is RESET and not any(name == RESET_CHECK and ok for name, ok, _ in attempt.checks):
            return False, "its agent did not reset the device"
        if not any(ok for name, ok, _ in attempt.checks if name != RESET_CHECK):
            return False, "no deep check could run"
        passed = sum(ok is True for name, ok, _ in attempt.checks if name != RESET_CHECK)
        return True, f"{passed} deep checks passed"
    limit_s = settings.reboot_limit_s if attempt.rung is REBOOT else settings.reset_limit_s
    if (now - attempt.at).total_seconds() > limit_s:
        return False, f"no result within {limit_s / 60:.0f} min"
    return None


def _named(nodes: Collection[str]) -> str:
    return ", ".join(sorted(nodes)[:3])


def why_impossible(
    *,
    device_count: int,
    devices: Collection[str],
    is_connected: bool,
    scope: FaultScope,
    no_reboot: str,
    others: Collection[str],
    sharing: Collection[str] = (),
) -> dict[Rung, str]:
    """Rung -> why it cannot be tried on a node. `devices`: those that the evidence names. `no_reboot`: why
    its machine cannot be rebooted, or "". `others`: nodes of the same machine that are in use; `sharing`: those of them
    with the same broken device or machine."""
    serve = f"{_named(others)} of its machine {'are' if len(others) > 1 else 'is'} in use" if others else ""
    found: dict[Rung, str] = {RESTART: "a restart of the engine does not cure broken hardware"}
    if scope is FaultScope.MACHINE:
        found[RESET] = "the fault is not of a device"
    elif not device_count:
        found[RESET] = "the node has no accelerator"
    elif any(device.startswith("MIG-") for device in devices):
        found[RESET] = "its device is a MIG instance, and a reset would end the other instances of its GPU"
    elif serve and any(device.startswith("neuron") for device in devices):
        found[RESET] = f"Neuron devices are reset together by reloading their driver, and {serve}"
    elif sharing:
        found[RESET] = f"{_named(sharing)} {'use' if len(sharing) > 1 else 'uses'} the same device"
    elif not is_connected:
        found[RESET] = "its agent is not connected"
    if no_reboot:
        found[REBOOT] = no_reboot
    elif serve:
        found[REBOOT] = serve
    return found
