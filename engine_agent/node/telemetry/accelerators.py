"""What accelerators of any make look like to the agent: devices with their use, memory and error counters, and faults.

Readers fill this in, one per make, and only where its hardware is. None of them may end the agent: what goes wrong in
one is its `trouble`, which the node reports.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

from engine_agent.protocol.messages import Accelerator, Fault
from engine_agent.protocol.signatures import FaultSignature, is_hard

log = logging.getLogger(__name__)

REPEATED_AFTER_S = 60.0
MAX_RECENT_FAULTS = 64

OnFault = Callable[[Fault], None]


@dataclass(frozen=True, slots=True)
class Restarts:
    """How often what reads is started again after it failed. A run that lasted `stable_s` seconds clears the count."""

    at_most: int = 8
    first_pause_s: float = 1.0
    longest_pause_s: float = 60.0
    stable_s: float = 600.0

    def counted(self, failures: int, ran_s: float) -> int:
        """Earlier failures that still count after a run of `ran_s` seconds."""
        return 0 if ran_s >= self.stable_s else failures

    def pause_s(self, failures: int) -> float:
        """Seconds to wait after so many failures in a row."""
        return min(self.longest_pause_s, self.first_pause_s * 2.0 ** min(failures - 1, 30))


class AcceleratorReader(Protocol):
    """Everything of one make on this machine."""

    @property
    def kind(self) -> str:
        """The make, as in `Accelerator.kind`."""

    @property
    def devices(self) -> Sequence[Accelerator]: ...

    @property
    def trouble(self) -> str:
        """Why what was last read may be old or missing; empty: all is well."""

    async def prepare(self) -> None:
        """Find the devices, within seconds. What goes wrong becomes `trouble`."""

    async def run(self) -> None:
        """Read until cancelled, or until reading is given up for good, which `trouble` then says."""


class AcceleratorMonitor:
    """All readers of a machine, as the agent uses them: none, and silent, where there are no accelerators."""

    def __init__(self, readers: Sequence[AcceleratorReader] = ()) -> None:
        self.readers = readers

    async def prepare(self) -> None:
        """Find all devices, for the inventory."""
        await asyncio.gather(*(reader.prepare() for reader in self.readers))
        for line in self.inventory():
            log.info("accelerator %s", line)
        self._log_trouble()

    async def run(self) -> None:
        await asyncio.gather(*(reader.run() for reader in self.readers))
        self._log_trouble()
        await asyncio.Event().wait()  # what was given up stays so until the agent starts again

    def inventory(self) -> tuple[str, ...]:
        """One line per device: `nvidia 0: NVIDIA H100 80GB HBM3, 80 GiB`."""
        return tuple(str(device) for device in self.devices())

    def devices(self) -> tuple[Accelerator, ...]:
        """All devices as they were last read."""
        return tuple(device for reader in self.readers for device in reader.devices)

    def trouble(self) -> dict[str, str]:
        """By make, why its devices may be old or missing."""
        return {reader.kind: reader.trouble for reader in self.readers if reader.trouble}

    def _log_trouble(self) -> None:
        for reader in self.readers:
            if reader.trouble:
                log.warning("%s telemetry: %s", reader.kind, reader.trouble)


class RepeatedFaults:
    """Hands on a fault, unless the same one was handed on less than `REPEATED_AFTER_S` ago: counters are read every few
    seconds and a kernel log may be flooded, but a node's faults are few."""

    def __init__(self, on_fault: OnFault, clock: Callable[[], float] = monotonic) -> None:
        self._on_fault = on_fault
        self._clock = clock
        self._handed_on_s: dict[tuple[str, str], float] = {}

    def __call__(self, fault: Fault) -> None:
        now_s, what = self._clock(), (fault.signature, fault.summary)
        recent = {key: at_s for key, at_s in self._handed_on_s.items() if now_s - at_s < REPEATED_AFTER_S}
        if what not in recent and len(recent) < MAX_RECENT_FAULTS:
            recent[what] = now_s
            log.error("%s: %s", fault.signature, fault.summary)
            self._on_fault(fault)
        self._handed_on_s = recent


def hardware_fault(signature: FaultSignature, summary: str, evidence: Mapping[str, object]) -> Fault:
    """A fault message; its evidence says whether the hardware must be replaced."""
    return Fault(signature=signature, summary=summary, evidence={**evidence, "hard": is_hard(signature)})


def grown(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    """By how much each counter grew; one not seen before counts from 0, one that fell was reset with its driver."""
    return {name: more for name, count in now.items() if (more := count - min(before.get(name, 0), count)) > 0}
