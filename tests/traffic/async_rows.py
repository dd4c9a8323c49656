"""Rows and a stand-in ingress for tests of near-real-time requests."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.fleet import rows
from tests.fleet.rows import NOW
from tests.fleet.services.receiver import Answer, Receiver, receiver
from traffic.models import AsyncRequest, Ingress
from traffic.selectors.application import Application
from traffic.services.async_request import AsyncSubmission, async_request_accept
from traffic.services.ingress import ingress_create
from traffic.services.routing import tables_publish

BODY = b'{"model":"sim-70b","messages":[{"role":"user","content":"why?"}]}'
ANSWER = b'{"id":"x","choices":[{"message":{"content":"because"}}],"usage":{"completion_tokens":1}}'


def serving_fleet(port: int = 9) -> Ingress:
    """A region whose ingress listens on `port`, and whose table has the model of `BODY`."""
    ingress = ingress_create(region=rows.region(), address="127.0.0.1", port=port, now=NOW)
    rows.cell("c1", rows.node("n-a"))
    tables_publish(now=NOW)
    return ingress


def accepted(
    tenant: str = "", *, key: str = "", now: datetime = NOW, body: bytes = BODY, **headers: Any
) -> AsyncRequest:
    request, _ = async_request_accept(
        application=Application(tenant=tenant, key=key),
        submission=AsyncSubmission("/v1/chat/completions", body, "", **headers),
        now=now,
    )
    return request


def answering_json(status: int = 200, body: bytes = ANSWER) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


@contextmanager
def standin_ingress() -> Iterator[Receiver]:
    """A server in the place of an ingress; it answers 200 unless it is told otherwise."""
    with receiver() as standin:
        standin.answer = answering_json()
        yield standin
