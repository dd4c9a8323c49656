"""The output of the Neuron tools on real machines is parsed, also with missing fields."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.node.telemetry.neuron_output import (
    ECC_COUNTERS,
    MonitorReport,
    UnreadableOutput,
    parse_monitor_line,
    parse_neuron_ls,
    with_report,
)
from engine_agent.protocol.telemetry_messages import Accelerator

RECORDED = Path(__file__).parent / "recorded"
GIB = 2**30


def recorded(name: str) -> bytes:
    return (RECORDED / name).read_bytes()


def test_neuron_ls_names_devices_cores_and_memory() -> None:
    assert parse_neuron_ls(recorded("neuron-ls-trn2.json")) == (
        Accelerator(index=0, kind="neuron", name="cc:00.0", cores=4, memory_total_bytes=96 * GIB),
        Accelerator(index=15, kind="neuron", name="f7:00.0", cores=4, memory_total_bytes=96 * GIB),
    )
    (only,) = parse_neuron_ls(recorded("neuron-ls-trn1-2xlarge.json"))
    assert str(only) == "neuron 0: 0000:00:1e.0, 2 cores, 32 GiB"


def test_a_release_that_puts_the_list_into_an_object_is_understood() -> None:
    devices = json.loads(recorded("neuron-ls-trn2.json"))
    text = json.dumps({"instance": {"type": "trn2"}, "ultraservers": [], "neuron_devices": devices})
    assert [device.index for device in parse_neuron_ls(text)] == [0, 15]


@pytest.mark.parametrize("text", ["", "no devices found", "{}", '{"devices": []}', "7"])
def test_what_is_no_list_of_devices_is_said_to_be_none(text: str) -> None:
    with pytest.raises(UnreadableOutput, match="neuron-ls printed no"):
        parse_neuron_ls(text)


def test_a_line_of_the_monitor_gives_use_memory_and_counters_by_device() -> None:
    seen = with_report((), parse_monitor_line(recorded("neuron-monitor-trn2.json")))
    assert len(seen) == 16
    first = seen[0]
    assert (first.name, first.cores, first.memory_total_bytes) == ("trainium2", 4, 96 * GIB)
    assert first.utilisation_percent == pytest.approx((42.01 + 42.02) / 4, abs=0.01)
    assert first.memory_used_bytes == 2 * (193986816 + 176285056 + 20971520)
    assert first.errors == dict.fromkeys(
        ("mem_ecc_corrected", "mem_ecc_uncorrected", "sram_ecc_corrected", "sram_ecc_uncorrected"), 0
    )
    assert (seen[15].utilisation_percent, seen[15].errors) == (0.0, {})


def test_a_core_belongs_to_the_device_that_neuron_ls_gives_its_number_to() -> None:
    """On a trn2n.48xlarge 8 physical cores are 4 logical ones, which both tools number from 0 to 63."""
    line = json.loads(recorded("neuron-monitor-trn2.json"))
    in_use = line["neuron_runtime_data"][0]["report"]["neuroncore_counters"]["neuroncores_in_use"]
    in_use["60"] = in_use.pop("0")
    for physical in (4, 8):  # the number that AWS documents, and that of the hardware
        line["neuron_hardware_info"]["neuroncore_per_device_count"] = physical
        for known in ((), parse_neuron_ls(recorded("neuron-ls-trn2.json"))):
            seen = with_report(known, parse_monitor_line(json.dumps(line)))
            used = {device.index: device.utilisation_percent for device in seen if device.utilisation_percent}
            assert used == {0: pytest.approx(42.02 / 4, abs=0.01), 15: pytest.approx(42.01 / 4, abs=0.01)}
            assert {device.cores for device in seen} == {4}


def test_a_line_of_an_older_release_without_device_type_and_breakdown_is_understood_too() -> None:
    line = json.loads(recorded("neuron-monitor-trn2.json"))
    line["neuron_hardware_info"] = {"neuron_device_count": 1, "neuroncore_per_device_count": 2}
    line["neuron_runtime_data"][0]["report"]["memory_used"] = {"neuron_runtime_used_bytes": {"neuron_device": 5}}
    (device,) = with_report((), parse_monitor_line(json.dumps(line)))
    assert (device.name, device.cores, device.memory_total_bytes) == ("unnamed", 2, None)
    assert device.utilisation_percent == pytest.approx(42.015, abs=0.01)


def test_executions_with_errors_are_counted_and_what_the_tool_could_not_read_is_told() -> None:
    line = json.loads(recorded("neuron-monitor-trn2.json"))
    report = line["neuron_runtime_data"][0]["report"]
    report["execution_stats"]["error_summary"]["hardware"] = 3
    report["execution_stats"]["execution_summary"]["timed_out"] = 2
    line["neuron_hardware_info"]["error"] = "the driver is not running"
    seen = parse_monitor_line(json.dumps(line))
    assert seen.executions == {"hardware_errors": 3, "timed_out": 2}
    assert seen.errors == ("the driver is not running",)


@pytest.mark.parametrize("line", [b"{}", b'{"neuron_runtime_data": null, "system_data": {"neuron_hw_counters": null}}'])
def test_a_line_that_says_nothing_is_no_trouble(line: bytes) -> None:
    report = parse_monitor_line(line)
    assert report == MonitorReport()
    known = (Accelerator(index=3, kind="neuron", name="x", cores=2, errors={ECC_COUNTERS[0]: 4}),)
    assert with_report(known, report)[0].errors == {ECC_COUNTERS[0]: 4}


@pytest.mark.parametrize("line", [b"", b"\xff", b"[" * 100_000, b"[]", b"usage: neuron-monitor [-c FILE]"])
def test_what_is_no_report_is_said_to_be_none(line: bytes) -> None:
    with pytest.raises(UnreadableOutput, match="neuron-monitor printed"):
        parse_monitor_line(line)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(junk=JSON, at=st.integers(0, 200))
def test_no_value_in_any_place_breaks_the_reading(junk: Any, at: int) -> None:
    line = json.loads(recorded("neuron-monitor-trn2.json"))
    places = list(_places(line))
    holder, key = places[at % len(places)]
    holder[key] = junk
    json.dumps([str(device) for device in with_report((), parse_monitor_line(json.dumps(line)))][:3])


def _places(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from _places(inner)
