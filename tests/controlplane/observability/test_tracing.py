"""Spans go from a request over its task to a collector, in one trace."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from celery import Celery

from kernel import tracing
from kernel.tracing import collector, span, spans_flush, traceparent
from tests.controlplane.api.client import bearer

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Spans as a collector got them; ask for them after `spans_flush()`."""
    got: list[dict[str, Any]] = []

    class Taker(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            for resource in body["resourceSpans"]:
                got.extend(resource["scopeSpans"][0]["spans"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Taker) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        serving.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        collector.cache_clear()
        tracing._exporters.clear()
        yield got
        collector.cache_clear()
        tracing._exporters.clear()
        server.shutdown()
        serving.join(5)


@pytest.mark.django_db
def test_a_request_is_a_span_of_its_callers_trace(collected: list[dict[str, Any]]) -> None:
    bearer().get("/api/v1/nodes", headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    spans_flush()
    (found,) = collected
    assert (found["traceId"], found["parentSpanId"]) == (TRACE, PARENT)
    assert found["name"].startswith("GET api/")


def test_a_task_is_a_span_below_its_request(collected: list[dict[str, Any]]) -> None:
    app = Celery("test", set_as_current=False)

    @app.task(name="test.look")
    def look() -> None:
        """Do nothing."""

    with span("asking", may_begin_trace=True):
        header = traceparent()
    look.apply(headers={"traceparent": header})
    spans_flush()
    asking, looking = collected
    assert looking["traceId"] == asking["traceId"]
    assert looking["parentSpanId"] == asking["spanId"]
    assert looking["name"] == "test.look"


def test_without_a_collector_nothing_is_recorded() -> None:
    with span("asking", may_begin_trace=True):
        assert traceparent() == ""


def test_a_failure_marks_its_span(collected: list[dict[str, Any]]) -> None:
    with pytest.raises(ZeroDivisionError), span("asking", may_begin_trace=True):
        raise ZeroDivisionError
    spans_flush()
    assert collected[0]["status"] == {"code": 2}
