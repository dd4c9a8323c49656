"""Common parts of readers: reports, suppressed repetitions of faults, and silence without accelerators."""

import pytest

from engine_agent.node.telemetry.accelerators import (
    REPEATED_AFTER_S,
    AcceleratorMonitor,
    RepeatedFaults,
    Restarts,
    grown,
)
from engine_agent.protocol.messages import Fault
from engine_agent.protocol.telemetry_messages import Accelerator


class Reader:
    kind = "neuron"
    trouble = "neuron-monitor: silent for 30 s"
    devices = (Accelerator(0, "neuron", "trainium2", cores=4, memory_total_bytes=96 * 2**30, errors={"sram": 1}),)

    async def prepare(self) -> None: ...

    async def run(self) -> None: ...

    async def release(self) -> None: ...

    def resume(self) -> None: ...


def test_a_machine_without_accelerators_says_nothing_of_them() -> None:
    assert AcceleratorMonitor().devices() == ()
    assert AcceleratorMonitor().trouble() == {}
    assert AcceleratorMonitor().inventory() == ()


@pytest.mark.asyncio
async def test_devices_and_trouble_are_reported_in_one_form() -> None:
    accelerators = AcceleratorMonitor([Reader()])
    await accelerators.prepare()
    assert accelerators.inventory() == ("neuron 0: trainium2, 4 cores, 96 GiB",)
    assert accelerators.devices() == Reader.devices
    assert accelerators.trouble() == {"neuron": "neuron-monitor: silent for 30 s"}


def test_the_same_fault_is_handed_on_once_a_minute() -> None:
    now_s = 100.0
    handed_on: list[Fault] = []
    take = RepeatedFaults(handed_on.append, clock=lambda: now_s)
    for _ in range(3):
        take(Fault("a", "one"))
        take(Fault("a", "two"))
    assert [fault.summary for fault in handed_on] == ["one", "two"]
    now_s += REPEATED_AFTER_S
    take(Fault("a", "one"))
    assert len(handed_on) == 3


def test_a_flood_of_faults_is_bounded() -> None:
    handed_on: list[Fault] = []
    take = RepeatedFaults(handed_on.append, clock=lambda: 0.0)
    for number in range(1000):
        take(Fault("a", str(number)))
    assert len(handed_on) == 64


def test_counters_grow_from_what_was_seen_and_start_again_with_their_driver() -> None:
    assert grown({}, {"a": 2, "b": 0}) == {"a": 2}
    assert grown({"a": 2}, {"a": 5}) == {"a": 3}
    assert grown({"a": 5}, {"a": 1}) == {}


def test_pauses_between_restarts_grow_and_a_stable_run_clears_the_count() -> None:
    restarts = Restarts(first_pause_s=1, longest_pause_s=10, stable_s=600)
    assert [restarts.pause_s(failures) for failures in (1, 2, 3, 9)] == [1, 2, 4, 10]
    assert (restarts.counted(4, 599), restarts.counted(4, 600)) == (4, 0)
