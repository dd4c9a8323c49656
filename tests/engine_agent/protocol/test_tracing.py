"""Trace context and spans, as the standards have them."""

from collections.abc import Callable

import pytest

from engine_agent.cell_proxy.wire import Headers
from engine_agent.protocol.tracing import (
    SpanContext,
    TraceSettings,
    TracingOff,
    begin_span,
    span_json,
    trace_settings,
    with_context,
)

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GIVEN: Headers = [(b"traceparent", f"00-{TRACE}-{PARENT}-01".encode()), (b"tracestate", b"a=b")]


def bits(value: int) -> Callable[[int], int]:
    return lambda count: value & (2**count - 1)


def test_a_request_of_a_recorded_trace_is_a_span_of_it() -> None:
    span = begin_span(GIVEN, 0.0, bits(0xABC))
    assert span == SpanContext(TRACE, "0000000000000abc", PARENT)
    assert with_context(GIVEN, span) == [
        (b"tracestate", b"a=b"),
        (b"traceparent", f"00-{TRACE}-0000000000000abc-01".encode()),
    ]


def test_a_request_of_a_trace_that_nobody_records_is_none() -> None:
    assert begin_span([(b"traceparent", f"00-{TRACE}-{PARENT}-00".encode())], 1.0, bits(1)) is None


@pytest.mark.parametrize(
    "value",
    [b"", b"nonsense", f"ff-{TRACE}-{PARENT}-01".encode(), b"00-" + b"0" * 32 + b"-" + PARENT.encode() + b"-01"],
)
def test_without_a_valid_trace_one_begins_for_its_share_of_requests(value: bytes) -> None:
    headers = [(b"traceparent", value), (b"tracestate", b"a=b")]
    assert begin_span(headers, 0.0, bits(5)) is None
    assert begin_span(headers, 0.5, bits(2**127 + 2**63)) is None
    span = begin_span(headers, 0.5, bits(2**63 - 1))
    assert span is not None
    assert span.parent_id == ""
    assert with_context(headers, span) == [(b"traceparent", span.header())]


def test_a_version_to_come_is_understood() -> None:
    headers = [(b"traceparent", f"01-{TRACE}-{PARENT}-01-more".encode())]
    span = begin_span(headers, 0.0, bits(1))
    assert span is not None
    assert span.trace_id == TRACE


def test_a_span_is_json_as_collectors_read_it() -> None:
    span = span_json(SpanContext("t", "s", "p"), "POST /v1/x", 1, 2, True, a=1, b="x", c=None, d=0.5)
    assert span == {
        "traceId": "t",
        "spanId": "s",
        "parentSpanId": "p",
        "name": "POST /v1/x",
        "kind": 2,
        "startTimeUnixNano": "1",
        "endTimeUnixNano": "2",
        "attributes": [
            {"key": "a", "value": {"intValue": "1"}},
            {"key": "b", "value": {"stringValue": "x"}},
            {"key": "d", "value": {"doubleValue": 0.5}},
        ],
        "status": {"code": 2},
    }


@pytest.mark.parametrize(
    ("environment", "settings"),
    [
        ({}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "true"}, None),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318/"},
            TraceSettings("c", 4318, "/v1/traces", "switchyard-cell-proxy", 1.0),
        ),
        (
            {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:9/x", "OTEL_TRACES_SAMPLER_ARG": "0.1"},
            TraceSettings("c", 9, "/x", "switchyard-cell-proxy", 0.1),
        ),
        (
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c",
                "OTEL_SERVICE_NAME": "me",
                "OTEL_TRACES_SAMPLER": "parentbased_always_off",
            },
            TraceSettings("c", 4318, "/v1/traces", "me", 0.0),
        ),
    ],
)
def test_the_environment_says_where_spans_go(environment: dict[str, str], settings: TraceSettings | None) -> None:
    assert trace_settings(environment) == settings


@pytest.mark.parametrize(
    ("environment", "right"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "https://c:4318"}, "must be http://HOST:PORT"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "c:x"}, "must be http://HOST:PORT"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_TRACES_SAMPLER_ARG": "2"}, "a number from 0 to 1"),
    ],
)
def test_what_is_not_supported_is_said(environment: dict[str, str], right: str) -> None:
    with pytest.raises(TracingOff, match=right):
        trace_settings(environment)
