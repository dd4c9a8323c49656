"""Accelerators of any make: devices with their use, memory and error counters, and faults. There is one reader per
make, only on machines with its hardware. An error in a reader must not end the agent; it becomes the reader's
`trouble`, which the node reports."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

from engine_agent.node.devices import own_devices
from engine_agent.protocol.machine_messages import NodeResources
from engine_agent.protocol.messages import Fault
from engine_agent.protocol.signatures import FaultSignature, is_hard
from engine_agent.protocol.telemetry_messages import Accelerator

log = logging.getLogger(__name__)

REPEATED_AFTER_S = 60.0
MAX_RECENT_FAULTS = 64

OnFault = Callable[[Fault], None]


@dataclass(frozen=True, slots=True)
class Restarts:
    """How often a failing reader is restarted. A run of `stable_s` seconds clears the count."""

    at_most: int = 8
    first_pause_s: float = 1.0
    longest_pause_s: float = 60.0
    stable_s: float = 600.0

    def counted(self, failures: int, ran_s: float) -> int:
        """Earlier failures that still count after a run of `ran_s` seconds."""
        return 0 if ran_s >= self.stable_s else failures

    def pause_s(self, failures: int) -> float:
        """Seconds to wait after this many failures in a row."""
        return min(self.longest_pause_s, self.first_pause_s * 2.0 ** min(failures - 1, 30))


class AcceleratorReader(Protocol):
    """All devices of one make on this machine."""

    @property
    def kind(self) -> str:
        """The make, as in `Accelerator.kind`."""

    @property
    def devices(self) -> Sequence[Accelerator]: ...

    @property
    def trouble(self) -> str:
        """Why the last readings may be out of date or missing; empty if all is well."""

    async def prepare(self) -> None:
        """Finds the devices, within seconds. Errors become `trouble`."""

    async def run(self) -> None:
        """Reads until cancelled, or until it gives up, which `trouble` then says."""

    async def release(self) -> None:
        """Closes its session with the driver until `resume`; returns when it is closed, or after some seconds."""

    def resume(self) -> None:
        """Opens a session again."""


class AcceleratorMonitor:
    """All readers of a machine; without accelerators there are none. `owns`: what a node owns of it; None: all."""

    def __init__(self, readers: Sequence[AcceleratorReader] = (), owns: NodeResources | None = None) -> None:
        self.readers = readers
        self.owns = owns

    async def prepare(self) -> None:
        """Finds all devices, for the inventory."""
        await asyncio.gather(*(reader.prepare() for reader in self.readers))
        for line in self.inventory():
            log.info("accelerator %s", line)
        self._log_trouble()

    async def run(self) -> None:
        await asyncio.gather(*(reader.run() for reader in self.readers))
        self._log_trouble()
        await asyncio.Event().wait()  # a reader that gave up stays off until the agent restarts

    def inventory(self) -> tuple[str, ...]:
        """One line per device: `nvidia 0: NVIDIA H100 80GB HBM3, 80 GiB`."""
        return tuple(str(device) for device in self.devices())

    def devices(self) -> tuple[Accelerator, ...]:
        """The node's devices."""
        return own_devices(self.owns, self.machine_devices())

    def machine_devices(self) -> tuple[Accelerator, ...]:
        return tuple(device for reader in self.readers for device in reader.devices)

    def trouble(self) -> dict[str, str]:
        """By make, why its devices may be out of date or missing."""
        return {reader.kind: reader.trouble for reader in self.readers if reader.trouble}

    @asynccontextmanager
    async def released(self) -> AsyncIterator[None]:
        """Closes the sessions with drivers meanwhile."""
        for reader in self.readers:
            await reader.release()
        try:
            yield
        finally:
            for reader in self.readers:
                reader.resume()

    def _log_trouble(self) -> None:
        for reader in self.readers:
            if reader.trouble:
                log.warning("%s telemetry: %s", reader.kind, reader.trouble)


class RepeatedFaults:
    """Passes on a fault unless the same one was passed on within `REPEATED_AFTER_S`: counters are read every few
    seconds and a kernel log may be flooded."""

    def __init__(self, on_fault: OnFault, clock: Callable[[], float] = monotonic) -> None:
        self._on_fault = on_fault
        self._clock = clock
        self._passed_on_s: dict[tuple[str, str], float] = {}

    def __call__(self, fault: Fault) -> None:
        now_s, what = self._clock(), (fault.signature, fault.summary)
        recent = {key: at_s for key, at_s in self._passed_on_s.items() if now_s - at_s < REPEATED_AFTER_S}
        if what not in recent and len(recent) < MAX_RECENT_FAULTS:
            recent[what] = now_s
            log.error("%s: %s", fault.signature, fault.summary)
            self._on_fault(fault)
        self._passed_on_s = recent


def hardware_fault(signature: FaultSignature, summary: str, evidence: Mapping[str, object]) -> Fault:
    """A fault whose evidence says whether the hardware must be replaced."""
    return Fault(signature=signature, summary=summary, evidence={**evidence, "hard": is_hard(signature)})


def grown(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    """The growth of each counter. A new one counts from 0; a lower one was reset with its driver."""
    return {name: more for name, count in now.items() if (more := count - min(before.get(name, 0), count)) > 0}
