"""Reasons for a low clock in NVML's bit mask, and their sums over time."""

import pytest

from engine_agent.node.telemetry.throttling import NVML_REASONS, ClockMeter, active_reasons
from engine_agent.protocol.signatures import SLOW_CLOCK_REASONS
from engine_agent.protocol.telemetry_messages import DeviceClocks


@pytest.mark.parametrize(
    ("mask", "names"),
    [
        (0x0, ()),
        (0x1, ("gpu_idle",)),
        (0x4, ("sw_power_cap",)),
        (0x24, ("sw_power_cap", "sw_thermal_slowdown")),
        (0x48, ("hw_slowdown", "hw_thermal_slowdown")),
        (0x88, ("hw_slowdown", "hw_power_brake_slowdown")),
        (0x1000, ()),
    ],
)
def test_a_mask_names_its_reasons(mask: int, names: tuple[str, ...]) -> None:
    assert active_reasons(mask) == names


def test_trouble_of_the_machine_is_slow_and_limits_by_choice_are_normal() -> None:
    names = [name for _, name in NVML_REASONS]
    assert set(names) >= set(SLOW_CLOCK_REASONS)
    assert [name for name in names if name not in SLOW_CLOCK_REASONS] == [
        "gpu_idle", "applications_clocks_setting", "sw_power_cap", "sync_boost", "display_clock_setting",
    ]  # fmt: skip
    assert [bit for bit, _ in NVML_REASONS] == [1 << place for place in range(9)]


HOT = DeviceClocks(990, 1980, ("hw_thermal_slowdown",))
FAST = DeviceClocks(1980, 1980, ("sw_power_cap",))


def test_time_is_summed_by_clock_and_by_reason() -> None:
    meter = ClockMeter()
    meter.add(HOT, 5000)
    seen = meter.add(FAST, 3000)
    assert (seen.clock_mhz, seen.reasons) == (1980, ("sw_power_cap",))
    assert (seen.sampled_ms, seen.full_clock_ms, seen.reason_ms) == (8000, 5500, {"hw_thermal_slowdown": 5000})


@pytest.mark.parametrize(
    ("now", "elapsed_ms"),
    [(DeviceClocks(345, 1980, ("gpu_idle",)), 5000), (HOT, 0), (HOT, 60_000), (DeviceClocks(990, 0, ()), 5000)],
)
def test_idle_and_unknown_time_does_not_count(now: DeviceClocks, elapsed_ms: int) -> None:
    seen = ClockMeter().add(now, elapsed_ms)
    assert (seen.sampled_ms, seen.full_clock_ms, seen.reason_ms) == (0, 0, {})
