"""The public port: sends `/v1/*` to the engine, answers `/healthz`, and refuses everything else."""

from functools import partial

from engine_agent.proxy.cell import Cell
from engine_agent.proxy.downstream import ClientConnection, Responder
from engine_agent.proxy.exchange import Exchange
from engine_agent.proxy.local import LocalExchange
from engine_agent.proxy.refusal import Refusal
from engine_agent.proxy.wire import Reply, RequestHead, refusal_reply

_API_PREFIX = b"/v1/"
_API_METHODS = frozenset({b"GET", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS"})


def respond(cell: Cell, head: RequestHead, client: ClientConnection) -> Responder:
    """The responder for one request on the public port."""
    if head.target.startswith(_API_PREFIX) and head.method in _API_METHODS:
        return Exchange(cell, head, client)
    return LocalExchange(head, client, partial(_answer, cell))


def _answer(cell: Cell, head: RequestHead, body: bytes) -> Reply:
    if head.path == b"/healthz":
        unready = cell.unready()
        return Reply(200, b'{"ok":true}') if unready is None else refusal_reply(unready)
    if head.target.startswith(_API_PREFIX):
        allowed = ", ".join(sorted(method.decode() for method in _API_METHODS))
        return refusal_reply(Refusal(405, "method_not_allowed", f"the method must be one of {allowed}"))
    return refusal_reply(Refusal(404, "not_found", "the cell proxy serves /v1/* and /healthz"))
