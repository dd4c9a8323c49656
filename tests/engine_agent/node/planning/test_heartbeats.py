"""A heartbeat replaces a report only if nothing but gauges has changed."""

from typing import Any

import pytest
from msgspec import structs

from engine_agent.node.planning.heartbeats import GAUGES_EVERY_S, REPORT_AT_LEAST_EVERY_S, still_holds
from engine_agent.protocol.load_messages import Load
from engine_agent.protocol.messages import Health, Observed, Report, StepTimes
from engine_agent.protocol.states import EngineState
from engine_agent.protocol.telemetry_messages import Accelerator, DeviceClocks, EnergyMeter, HostUse, NodeTelemetry

DEVICE = Accelerator(0, "cuda", "H200", utilisation_percent=10.0, errors={"ecc": 1}, uuid="GPU-1", temperature_c=50.0)
SENT = Report(
    seq=1,
    observed=Observed(EngineState.READY, "c1", 1, 0, engine_pid=4711),
    health=Health(ok=True, probe_ms=3.0, checked_s_ago=1.0),
    load=Load(in_flight=1, requests_total=7),
    telemetry=NodeTelemetry(host_cpu_percent=1.0, accelerators=(DEVICE,), host=HostUse(memory_bytes=1)),
    steps=StepTimes({1: 2}),
)
GAUGES = {
    "host_cpu_percent": 2.0,
    "host_memory_used_bytes": 3,
    "agent_rss_bytes": 4,
    "engine_rss_bytes": 5,
    "accelerators": (structs.replace(DEVICE, utilisation_percent=99.0, power_watts=700.0, temperature_c=80.0),),
    "energy": (EnergyMeter("gpu", "accelerators", "boot", microjoules=9),),
    "host": HostUse(memory_bytes=2, network_sent_bytes=3),
}
MOVED: dict[str, Any] = {
    "host_cpu_percent": 11.0,
    "host_memory_used_bytes": 2**30,
    "agent_rss_bytes": 2**30,
    "engine_rss_bytes": 2**30,
    "accelerators": (structs.replace(DEVICE, clocks=DeviceClocks(clock_mhz=900)),),
    "host": HostUse(memory_bytes=1, network_sent_bytes=2**30),
}


def telemetry(**changes: Any) -> Report:
    return structs.replace(SENT, telemetry=structs.replace(SENT.telemetry, **changes))


def test_gauges_alone_are_no_news() -> None:
    probed = structs.replace(telemetry(**GAUGES), health=Health(ok=True, probe_ms=9.0, checked_s_ago=0.1))
    assert still_holds(SENT, structs.replace(probed, seq=2), 2.0)


@pytest.mark.parametrize("gauge", [*GAUGES, "nothing"])
def test_a_gauge_that_moved_is_reported_after_a_while(gauge: str) -> None:
    now = telemetry(**{gauge: MOVED[gauge]}) if gauge in MOVED else SENT
    assert still_holds(SENT, now, GAUGES_EVERY_S - 0.1)
    assert still_holds(SENT, now, GAUGES_EVERY_S) is (gauge not in MOVED)


def test_a_gauge_that_moved_by_less_than_its_step_is_not() -> None:
    slightly = structs.replace(DEVICE, utilisation_percent=12.0, temperature_c=51.0)
    assert still_holds(SENT, telemetry(host_cpu_percent=5.0, accelerators=(slightly,)), GAUGES_EVERY_S)


def test_it_holds_for_a_bounded_time() -> None:
    assert still_holds(SENT, SENT, REPORT_AT_LEAST_EVERY_S - 0.1)
    assert not still_holds(SENT, SENT, REPORT_AT_LEAST_EVERY_S)


@pytest.mark.parametrize(
    "now",
    [
        structs.replace(SENT, observed=structs.replace(SENT.observed, generation=2)),
        structs.replace(SENT, observed=structs.replace(SENT.observed, engine_pid=4712)),
        structs.replace(SENT, health=None),
        structs.replace(SENT, health=Health(ok=True, reason="slow")),
        structs.replace(SENT, load=Load(in_flight=1, requests_total=8)),
        structs.replace(SENT, load=None),
        structs.replace(SENT, steps=StepTimes({1: 3})),
        telemetry(accelerators=()),
        telemetry(accelerators=(structs.replace(DEVICE, errors={"ecc": 2}),)),
        telemetry(refused_order="no"),
    ],
)
def test_everything_else_is_news(now: Report) -> None:
    assert not still_holds(SENT, now, 2.0)


def test_every_field_of_telemetry_that_is_no_gauge_is_news() -> None:
    for field in structs.fields(NodeTelemetry):
        if field.name not in GAUGES:
            assert not still_holds(SENT, telemetry(**{field.name: object()}), 2.0), field.name


@pytest.mark.parametrize("state", [EngineState.STARTING, EngineState.DRAINING, EngineState.FAILED])
def test_in_other_states_each_report_counts(state: EngineState) -> None:
    same = structs.replace(SENT, observed=structs.replace(SENT.observed, state=state))
    assert not still_holds(same, same, 2.0)


def test_each_unhealthy_report_counts() -> None:
    same = structs.replace(SENT, health=Health(ok=False, reason="no answer"))
    assert not still_holds(same, same, 2.0)
