"""An order that came of a request says so in the log and in the request's trace; one that came of none does not."""

import logging

import pytest

from engine_agent.cell_proxy.span_export import SpanExporter
from engine_agent.node.order_trace import OrderTrace, order_trace
from engine_agent.protocol.messages import Cause, Desired
from engine_agent.protocol.tracing import TraceSettings

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CAUSE = Cause("r-1", f"00-{TRACE}-{PARENT}-01")


def test_the_log_names_the_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with OrderTrace("n-1", None).taking(Desired("n-1", 4, None, cause=CAUSE)):
        pass
    (line,) = caplog.records
    assert line.getMessage() == "order 4 came of request r-1"
    assert (line.__dict__["request_id"], line.__dict__["trace_id"]) == ("r-1", TRACE)


def test_the_span_belongs_to_the_requests_trace() -> None:
    trace = OrderTrace("n-1", None)
    trace.exporter = SpanExporter(TraceSettings("127.0.0.1", 9, "/v1/traces", "s", 1.0), {})
    with trace.taking(Desired("n-1", 4, None, cause=CAUSE)):
        pass
    (span,) = trace.exporter._waiting
    assert (span["traceId"], span["parentSpanId"], span["name"]) == (TRACE, PARENT, "take order")


def test_an_order_of_no_request_is_taken_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with OrderTrace("n-1", None).taking(Desired("n-1", 4, None)):
        pass
    assert caplog.records == []


def test_a_collector_that_cannot_be_used_is_said_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    order_trace("n-1", {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://collector"})
    assert "no traces" in caplog.text
