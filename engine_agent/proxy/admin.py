"""The administration port, on loopback: status for the agent, the phase, metrics. It changes the phase and nothing
else."""

from functools import partial

import msgspec

from engine_agent.protocol.states import Phase
from engine_agent.proxy.cell import Cell
from engine_agent.proxy.downstream import ClientConnection, Responder
from engine_agent.proxy.exposition import exposition
from engine_agent.proxy.local import LocalExchange
from engine_agent.proxy.refusal import Refusal
from engine_agent.proxy.wire import Reply, RequestHead, refusal_reply
from engine_agent.telemetry.prometheus_text import CONTENT_TYPE


class PhaseOrder(msgspec.Struct, frozen=True):
    """Body of `POST /phase`."""

    phase: Phase


def respond(cell: Cell, head: RequestHead, client: ClientConnection) -> Responder:
    """The responder for one request on the administration port."""
    return LocalExchange(head, client, partial(_answer, cell))


def _answer(cell: Cell, head: RequestHead, body: bytes) -> Reply:
    match (head.method, head.path):
        case (b"GET", b"/status"):
            return _status(cell)
        case (b"GET", b"/metrics"):
            return Reply(200, exposition(cell).encode(), CONTENT_TYPE)
        case (b"POST", b"/phase"):
            return _order_phase(cell, body)
    known = "GET /status, GET /metrics, POST /phase"
    return refusal_reply(Refusal(404, "not_found", f"the administration port serves {known}"))


def _status(cell: Cell) -> Reply:
    return Reply(200, msgspec.json.encode(cell.status()))


def _order_phase(cell: Cell, body: bytes) -> Reply:
    try:
        phase = msgspec.json.decode(body, type=PhaseOrder).phase
    except msgspec.DecodeError as error:
        return _bad_phase(str(error))
    if phase is Phase.STOP:
        return _bad_phase("to stop a proxy, send it SIGTERM")
    if cell.phase is Phase.STOP:
        return refusal_reply(Refusal(409, "stopping", "this proxy is stopping and takes no other phase"))
    cell.enter_phase(phase)
    return _status(cell)


def _bad_phase(reason: str) -> Reply:
    message = f'the body must be {{"phase": "serve"}} or {{"phase": "drain"}}: {reason}'
    return refusal_reply(Refusal(400, "bad_phase", message))
