"""The W3C trace context of a request, and its span as OTLP's JSON. Pure: reads headers and settings, sends nothing.
OpenTelemetry's library would do the same at a higher cost: docs/design/dependencies.md#decided-against."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

Headers = list[tuple[bytes, bytes]]
"""Names in lower case."""
TRACEPARENT = b"traceparent"
TRACESTATE = b"tracestate"
_VALID = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_SAMPLED = 1
KINDS = {"internal": 1, "server": 2, "client": 3, "producer": 4, "consumer": 5}
_ERROR_STATUS = 2
TRACES_PATH = "/v1/traces"


class TracingOff(ValueError):
    """The tracing settings are unsupported; the text says why and what is supported."""


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Destination and service name of spans, and the sampled share of requests without a trace context."""

    host: str
    port: int
    path: str
    service: str
    ratio: float


@dataclass(frozen=True, slots=True)
class SpanContext:
    """The place of one span in its trace, ids in hexadecimal. `parent_id` is empty for the root span."""

    trace_id: str
    span_id: str
    parent_id: str = ""

    def header(self) -> bytes:
        """`traceparent` for the next hop."""
        return f"00-{self.trace_id}-{self.span_id}-01".encode()


def trace_settings(environment: Mapping[str, str], service: str = "switchyard-cell-proxy") -> TraceSettings | None:
    """The settings in OpenTelemetry's own variables; None: no tracing. `service` is the default name. Raises TracingOff
    for an unsupported endpoint or sampler."""
    base = environment.get("OTEL_EXPORTER_OTLP_ENDPOINT", "").rstrip("/")
    endpoint = environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "") or (base and base + TRACES_PATH)
    if not endpoint or environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        parts = urlsplit(endpoint)
        port = parts.port or 4318
    except ValueError:
        parts, port = urlsplit(""), 0
    if parts.scheme != "http" or not parts.hostname:
        raise TracingOff(f"the OTLP endpoint is {endpoint!r}; it must be http://HOST:PORT of a collector near by")
    named = environment.get("OTEL_SERVICE_NAME") or service
    return TraceSettings(parts.hostname, port, parts.path or TRACES_PATH, named, _ratio(environment))


def _ratio(environment: Mapping[str, str]) -> float:
    if environment.get("OTEL_TRACES_SAMPLER", "").endswith("always_off"):
        return 0.0
    text = environment.get("OTEL_TRACES_SAMPLER_ARG", "1")
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0.0 <= ratio <= 1.0:
        raise TracingOff(f"OTEL_TRACES_SAMPLER_ARG is {text!r}; it must be a number from 0 to 1")
    return ratio


def begin_span(headers: Headers, ratio: float, random_bits: Callable[[int], int]) -> SpanContext | None:
    """The span of a request with these headers, or None if it is not recorded. The sender of a trace context has
    decided whether it is recorded. Of requests without one, `ratio` are."""
    given = next((match for name, value in headers if name == TRACEPARENT and (match := _VALID.fullmatch(value))), None)
    if given is None:
        trace_id = random_bits(128) or 1
        begins = (trace_id & (2**64 - 1)) < ratio * 2**64
        return SpanContext(f"{trace_id:032x}", _span_id(random_bits)) if begins else None
    trace, parent, flags = given.groups()
    if not int(flags, 16) & _SAMPLED:
        return None
    return SpanContext(trace.decode(), _span_id(random_bits), parent.decode())


def trace_of(headers: Headers) -> str:
    """The id of the trace that these headers are a part of, in hexadecimal; empty without a valid one."""
    given = next((match for name, value in headers if name == TRACEPARENT and (match := _VALID.fullmatch(value))), None)
    return given[1].decode() if given is not None else ""


def _span_id(random_bits: Callable[[int], int]) -> str:
    return f"{random_bits(64) or 1:016x}"


def with_context(headers: Headers, span: SpanContext) -> Headers:
    """The headers for the next hop. `tracestate` is kept only with its own trace."""
    dropped = {TRACEPARENT} if span.parent_id else {TRACEPARENT, TRACESTATE}
    return [*(pair for pair in headers if pair[0] not in dropped), (TRACEPARENT, span.header())]


def span_json(span: SpanContext, name: str, began_ns: int, ended_ns: int, failed: bool, **attributes: Any) -> Any:
    """One span as OTLP's JSON; times in nanoseconds since 1970, attributes that are None left out. The attribute `kind`
    (default `server`) becomes the kind of the span."""
    kind = KINDS[attributes.pop("kind", "server")]
    return {
        "traceId": span.trace_id,
        "spanId": span.span_id,
        **({"parentSpanId": span.parent_id} if span.parent_id else {}),
        "name": name,
        "kind": kind,
        "startTimeUnixNano": str(began_ns),
        "endTimeUnixNano": str(ended_ns),
        "attributes": [_attribute(key, value) for key, value in attributes.items() if value not in {None, ""}],
        "status": {"code": _ERROR_STATUS} if failed else {},
    }


def export_request(service: str, resource: Mapping[str, Any], spans: list[Any]) -> Any:
    about = [_attribute("service.name", service), *(_attribute(key, value) for key, value in resource.items())]
    scope = {"scope": {"name": "switchyard"}, "spans": spans}
    return {"resourceSpans": [{"resource": {"attributes": about}, "scopeSpans": [scope]}]}


def _attribute(key: str, value: Any) -> Any:
    if isinstance(value, bool):
        return {"key": key, "value": {"boolValue": value}}
    if isinstance(value, int):
        return {"key": key, "value": {"intValue": str(value)}}
    if isinstance(value, float):
        return {"key": key, "value": {"doubleValue": value}}
    return {"key": key, "value": {"stringValue": str(value)}}
