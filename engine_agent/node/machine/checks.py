"""What keeps a host from joining, a sentence each with the remedy. Pure: what was found and measured is given."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine_agent.protocol.machine_messages import MachineFacts

GIB = 1024**3
DISK_LEAST_BYTES = 2 * GIB
"""For releases, logs and journals; weights want their own room, of which a low disk's notice speaks."""
CLOCK_MOST_S = 60.0
"""Certificates last for a day, and reports are judged by their age: seconds do no harm, minutes do."""


@dataclass(frozen=True, slots=True)
class HostFindings:
    """By make, accelerators without a driver."""

    driverless: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Seen:
    """What the control plane says of the host. `trouble`: why it does not reach it; `local`: the address is its own."""

    address: str
    local: bool
    trouble: str


def failures(facts: MachineFacts, findings: HostFindings, seen: Seen, taken: Sequence[int], ports: str) -> list[str]:
    """Everything that must be set right first, in the order in which one would. `taken`: ports of `ports` in use."""
    found = []
    if abs(facts.clock_ahead_s) > CLOCK_MOST_S:
        direction = "ahead of" if facts.clock_ahead_s > 0 else "behind"
        found.append(
            f"the clock is {abs(facts.clock_ahead_s):.0f} s {direction} the control plane's; set it, such as by"
            " `timedatectl set-ntp true`, and run the line again"
        )
    if facts.disk_free_bytes < DISK_LEAST_BYTES:
        found.append(
            f"{facts.disk_free_bytes / GIB:.1f} GiB of disk are free, and {DISK_LEAST_BYTES / GIB:.0f} are needed;"
            " make room, or name a folder on another disk with SWITCHYARD_PREFIX"
        )
    for make, count in findings.driverless.items():
        found.append(f"{count} {make} accelerators have no driver; install the {make} driver, or take them out")
    if facts.driver:
        found.append(
            f"the driver of the accelerators does not answer ({facts.driver}); see its own tools and the kernel's log"
        )
    if taken:
        more = f" and {len(taken) - 3} more" if len(taken) > 3 else ""
        named = ", ".join(map(str, taken[:3]))
        found.append(
            f"port {named}{more} of {ports} is in use; end what listens there, or give the first of other free ports"
            " with --port"
        )
    elif not seen.local:
        found.append(
            f"the control plane sees this host as {seen.address}, which is no address of its own; a host behind address"
            " translation cannot be reached by others: give it an address that they reach"
        )
    elif seen.trouble:
        found.append(
            f"the control plane does not reach this host: {seen.trouble}; let TCP to ports {ports} pass from the"
            " control plane and from the ingresses"
        )
    return found
