"""Why an accelerator runs below its clock, as its driver states, and for how long. Sums over time are reported, so that
a lost report loses nothing and the control plane can compare windows.

Sources: https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html (bits of NVML's mask). Neuron's
tools and driver show no clocks, reasons or temperatures: `neuron-monitor` has no such counters, and the driver's power
file is a measurement without a limit (neuron-monitor-user-guide.rst, neuron-sysfs-user-guide.rst)."""

from dataclasses import dataclass, field

from msgspec import structs

from engine_agent.protocol.signatures import SLOW_CLOCK_REASONS
from engine_agent.protocol.telemetry_messages import DeviceClocks

NVML_REASONS: tuple[tuple[int, str], ...] = (
    (0x001, "gpu_idle"),
    (0x002, "applications_clocks_setting"),
    (0x004, "sw_power_cap"),
    (0x008, "hw_slowdown"),
    (0x010, "sync_boost"),
    (0x020, "sw_thermal_slowdown"),
    (0x040, "hw_thermal_slowdown"),
    (0x080, "hw_power_brake_slowdown"),
    (0x100, "display_clock_setting"),
)
"""Bits and names as `nvidia-smi -q -d PERFORMANCE` has them. Unknown bits are ignored: newer drivers add some."""
IDLE = "gpu_idle"
SUMS = ("sampled_ms", "full_clock_ms", "reason_ms")
LONGEST_SAMPLE_MS = 30_000
"""A longer time between two readings is not known: the driver or the agent was stopped."""


def active_reasons(mask: int) -> tuple[str, ...]:
    """The reasons in NVML's bit mask, in the order of its bits."""
    return tuple(name for bit, name in NVML_REASONS if mask & bit)


@dataclass
class ClockMeter:
    """Sums of one device since its reader started. An idle device lowers its clock and does not count."""

    sums: DeviceClocks = field(default_factory=DeviceClocks)

    def add(self, now: DeviceClocks, elapsed_ms: int) -> DeviceClocks:
        """Adds a reading that held for this time; returns it with the sums."""
        sums = structs.replace(now, **{name: getattr(self.sums, name) for name in SUMS})
        if 0 < elapsed_ms <= LONGEST_SAMPLE_MS and now.max_clock_mhz and IDLE not in now.reasons:
            share = min(1.0, now.clock_mhz / now.max_clock_mhz)
            slow = [name for name in now.reasons if name in SLOW_CLOCK_REASONS]
            sums = structs.replace(
                sums,
                sampled_ms=sums.sampled_ms + elapsed_ms,
                full_clock_ms=sums.full_clock_ms + round(share * elapsed_ms),
                reason_ms={**sums.reason_ms, **{name: sums.reason_ms.get(name, 0) + elapsed_ms for name in slow}},
            )
        self.sums = sums
        return sums
