"""The severity of an incident and the runbook for it. Pure."""

from enum import StrEnum

from fleet.faults.planning.views import NO_USABLE_CELL, NODE_LOST, REGION_LOST, IncidentKind
from kernel.tones import Tone


class Severity(StrEnum):
    """`critical`: users' requests fail or nothing heals. `major`: capacity or a safeguard is lost. `minor`: an early
    sign, or something that can wait for working hours. `info`: a rule in shadow mode."""

    CRITICAL = "critical"
    MAJOR = "major"
    MINOR = "minor"
    INFO = "info"


SEVERITY_TONE = {
    Severity.CRITICAL: Tone.BAD,
    Severity.MAJOR: Tone.BAD,
    Severity.MINOR: Tone.WARN,
    Severity.INFO: Tone.IDLE,
}
CRITICAL = frozenset(
    {NO_USABLE_CELL, REGION_LOST, IncidentKind.ALL_SILENT, "control-loop-stale", "certificate-ends-now"}
)
MINOR = frozenset(
    {
        IncidentKind.SOFT, IncidentKind.SLOW, IncidentKind.CLOUD_NOTICE, IncidentKind.WITNESSED, "budget",
        "certificate-ends-soon", "cloud-alarm", "garbage-held", "hardware-differs", "notices-unread", "power-meter",
        "request-queue-unread", "speculation-drift", "token-drift",
    }
)  # fmt: skip


def severity_of(kind: str, *, shadow: bool) -> Severity:
    if shadow:
        return Severity.INFO
    return Severity.CRITICAL if kind in CRITICAL else Severity.MINOR if kind in MINOR else Severity.MAJOR


RUNBOOK_OF_KIND = {
    NODE_LOST: "node-lost",
    "cell-failed": "cell-failed",
    "cell-lost": "node-lost",
    NO_USABLE_CELL: "no-usable-cell",
    REGION_LOST: "no-usable-cell",
    IncidentKind.HARDWARE: "faulty-hardware",
    IncidentKind.MACHINE: "faulty-hardware",
    IncidentKind.UNATTRIBUTED: "faulty-hardware",
    IncidentKind.SOFT: "faulty-hardware",
    IncidentKind.SLOW: "faulty-hardware",
    IncidentKind.REPEATED_REPAIRS: "faulty-hardware",
    IncidentKind.COMMON_CAUSE: "faulty-hardware",
    IncidentKind.FROZEN: "faulty-hardware",
    IncidentKind.ALL_SILENT: "every-node-silent",
    IncidentKind.WITNESSED: "node-lost",
    IncidentKind.UNREACHABLE: "node-lost",
    IncidentKind.CLOUD_NOTICE: "cloud-notice",
    "certificate-ends-now": "certificate-ends",
    "certificate-ends-soon": "certificate-ends",
    "cloud-alarm": "clouds",
    "cloud-read-only": "clouds",
    "cluster-unread": "clouds",
    "control-host": "control-plane-down",
    "control-loop-stale": "control-loop-stale",
    "garbage-held": "clouds",
    "launch-refused": "clouds",
    "no-quota": "clouds",
    "notices-unread": "clouds",
    "power-meter": "power-meter",
    "request-queue-unread": "clouds",
    "speculation-drift": "speculation-drift",
    "task-not-started": "clouds",
    "token-drift": "token-drift",
}
