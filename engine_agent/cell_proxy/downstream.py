"""One HTTP/1.1 connection of a client: passes its requests one by one to a responder, and enforces time limits and
back-pressure in both directions. A responder writes the answer; this module knows no engines. An exception in a request
becomes its answer (`contained`). It never reaches the event loop, which would close the connection without a byte, nor
another request, nor the loops of the proxy."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import wraps
from time import monotonic
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from engine_agent.cell_proxy import refusal as refusals
from engine_agent.cell_proxy.refusal import Refusal
from engine_agent.cell_proxy.request_parser import IncomingRequest, RequestParser
from engine_agent.cell_proxy.settings import Limits
from engine_agent.cell_proxy.wire import RequestHead, refusal_response, response_bytes

if TYPE_CHECKING:
    from engine_agent.cell_proxy.tls_connection import Peer


_NEVER = float("inf")


class Responder(Protocol):
    def feed(self, data: bytes, *, complete: bool) -> None:
        """Takes the next bytes of the body. Called at least once, with the bytes that came along with the head."""

    def refuse(self, refusal: Refusal) -> None:
        """The request is invalid. Answers it, or gives up if part of an answer was sent."""

    def client_gone(self) -> None:
        """The client disconnected: stop all work for it."""

    def download_paused(self) -> None:
        """The client reads the answer more slowly than it arrives."""

    def download_resumed(self) -> None: ...

    def crashed(self, error: Exception) -> None:
        """A method raised this. Answers 500, or gives up if part of an answer was sent."""


class ReadStage(StrEnum):
    """The part of a request that the client has to send next. Each stage has its own time limit."""

    IDLE = "idle"
    HEAD = "head"
    BODY = "body"
    NOTHING = "nothing"
    CLOSING = "closing"


# Python 3.11 takes 0.3 µs for each access to a member through its class.
_IDLE, _HEAD, _BODY, _NOTHING, _CLOSING = ReadStage


class ClientConnection(asyncio.Protocol):
    """One connection. `open_connections`: all connections of the listener, for limits and time-outs. `admit`: for TLS,
    returns the client's identity, or None to refuse it."""

    def __init__(
        self,
        respond: Callable[[RequestHead, "ClientConnection"], Responder],
        limits: Limits,
        open_connections: set["ClientConnection"],
        admit: Callable[[asyncio.BaseTransport], "Peer | None"] | None = None,
    ) -> None:
        self._respond = respond
        self._limits = limits
        self._open = open_connections
        self._admit = admit
        self.peer: Peer | None = None
        """The client's identity, for TLS."""
        self._reader = RequestParser(limits)
        self._transport: asyncio.Transport | None = None
        self._current: IncomingRequest | None = None
        self._responder: Responder | None = None
        self._stage = _IDLE
        self._read_deadline = _NEVER
        self._write_deadline = _NEVER
        self._advancing = False
        self._last_request = False
        self._reading = True

    # --- what a responder uses ---

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def may_keep_alive(self) -> bool:
        current = self._current
        return current is not None and current.head.keep_alive and current.complete and not self._last_request

    def answered(self, *, keep_alive: bool) -> None:
        """The answer is complete: continue with the next request, or close."""
        current, self._current, self._responder = self._current, None, None
        if not keep_alive:
            self._close(input_left=current is not None and not current.complete)
        elif not self._advancing:
            self._advance()

    def abort(self) -> None:
        """Breaks the connection, so that the client sees that its answer is incomplete."""
        if self._transport is not None:
            self._transport.abort()

    # --- what the listener uses ---

    def close_when_idle(self) -> None:
        self._last_request = True
        if self._current is None:
            self._close(input_left=False)

    @property
    def awaits_head(self) -> bool:
        """A request has started, and its head is incomplete."""
        return self._stage is _HEAD

    @property
    def write_stalled(self) -> bool:
        """The client does not read its answer."""
        return self._write_deadline != _NEVER

    def check(self, now: float) -> None:
        """Enforces the time limits; `now` is of the monotonic clock."""
        if now >= self._write_deadline:
            self.abort()
        elif now >= self._read_deadline:
            self._read_deadline = _NEVER
            self._read_timed_out()

    def _read_timed_out(self) -> None:
        if self._stage is _HEAD:
            self._reader.broken = refusals.too_slow("head", self._limits.head_timeout_s)
            self._advance()
        elif self._stage is _BODY and self._responder is not None:
            self._responder.refuse(refusals.too_slow("body", self._limits.body_timeout_s))
        else:
            self.abort()

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if len(self._open) >= self._limits.max_client_connections:
            self._transport.abort()
            return
        if self._admit is not None:
            self.peer = self._admit(transport)
            if self.peer is None:
                self._transport.abort()
                return
        self._open.add(self)
        self._read_deadline = monotonic() + self._limits.idle_timeout_s

    def data_received(self, data: bytes) -> None:
        if self._stage is _CLOSING:
            return
        try:
            self._reader.feed(data)
        except Exception as error:
            self._crashed("RequestParser.feed", error)
        self._advance()

    def eof_received(self) -> None:
        if self._responder is not None:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.discard(self)
        self._transport = None
        self._reader.close()
        responder, self._responder = self._responder, None
        if responder is not None:
            responder.client_gone()

    def pause_writing(self) -> None:
        self._write_deadline = monotonic() + self._limits.write_stall_s
        if self._responder is not None:
            self._responder.download_paused()

    def resume_writing(self) -> None:
        self._write_deadline = _NEVER
        if self._responder is not None:
            self._responder.download_resumed()

    # --- requests in order ---

    def _advance(self) -> None:
        if self._advancing:
            return
        self._advancing = True
        try:
            while self._step():
                pass
        finally:
            self._advancing = False
        self._govern_reading()
        self._enter_stage()

    def _step(self) -> bool:
        if self._transport is None or self._stage is _CLOSING:
            return False
        if self._responder is not None and self._current is not None:
            self._deliver(self._responder, self._current)
            return self._responder is None
        if self._reader.queue:
            self._begin(self._reader.queue.popleft())
            return True
        if self._reader.broken is not None:
            self.write(response_bytes(refusal_response(self._reader.broken), keep_alive=False))
            self._close(input_left=True)
        return False

    def _begin(self, request: IncomingRequest) -> None:
        self._current = request
        try:
            self._responder = self._respond(request.head, self)
        except Exception as error:
            self._current = None
            self._reader.queue.clear()  # the client would take an answer to a later request for this one's
            self._crashed("respond", error)
        else:
            self._deliver(self._responder, request, first=True)

    def _crashed(self, place: str, error: Exception) -> None:
        """Fails a request that has no responder yet. It is answered after those before it."""
        report(place, error)
        self._reader.broken = refusals.proxy_failed()

    def _deliver(self, responder: Responder, current: IncomingRequest, *, first: bool = False) -> None:
        if current.too_large:
            responder.refuse(refusals.body_too_large(self._limits.max_body_bytes))
        elif self._reader.broken is not None and not current.complete:
            responder.refuse(self._reader.broken)
        elif first or current.pieces or current.complete is not current.delivered:
            responder.feed(current.take(), complete=current.complete)

    def _govern_reading(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        wanted = not self._reader.queue
        if wanted and not self._reading:
            self._transport.resume_reading()
        elif self._reading and not wanted:
            self._transport.pause_reading()
        self._reading = wanted

    def _enter_stage(self) -> None:
        if self._stage is _CLOSING:
            return
        stage = self._awaited()
        if stage is _NOTHING:
            self._stage, self._read_deadline = stage, _NEVER
        elif stage is not self._stage or stage is _IDLE:
            self._stage = stage
            self._read_deadline = monotonic() + self._stage_limit_s(stage)

    def _awaited(self) -> ReadStage:
        if self._current is not None:
            return _NOTHING if self._current.complete else _BODY
        return _HEAD if self._reader.in_head else _IDLE

    def _stage_limit_s(self, stage: ReadStage) -> float:
        if stage is _IDLE:
            return self._limits.idle_timeout_s
        if stage is _HEAD:
            return self._limits.head_timeout_s
        return self._limits.body_timeout_s if stage is _BODY else _NEVER

    def _close(self, *, input_left: bool) -> None:
        """Closes after the written bytes. If input is left, reads it first, or the client could lose the answer."""
        if self._transport is None or self._stage is _CLOSING:
            return
        self._stage = _CLOSING
        self._reader.close()
        if input_left and self._transport.can_write_eof():
            self._read_deadline = monotonic() + self._limits.linger_s
            self._transport.write_eof()
            self._govern_reading()
        else:
            self._read_deadline = monotonic() + self._limits.write_stall_s
            self._transport.close()


class Crashing(Protocol):
    def crashed(self, error: Exception) -> None:
        """Ends the request with an error answer. Called with the exception of one of its methods."""


H = TypeVar("H", bound=Crashing)
P = ParamSpec("P")


def contained(method: Callable[Concatenate[H, P], None]) -> Callable[Concatenate[H, P], None]:
    """Decorates each method that connections, the cell and the sweep call on a handler."""

    @wraps(method)
    def called(self: H, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            report(f"{type(self).__name__}.{method.__name__}", error)
            self.crashed(error)

    return called


def contained_task(
    method: Callable[Concatenate[H, P], Coroutine[Any, Any, None]],
) -> Callable[Concatenate[H, P], Coroutine[Any, Any, None]]:
    """Decorates each method that a handler runs as a task."""

    @wraps(method)
    async def called(self: H, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            await method(self, *args, **kwargs)
        except Exception as error:
            report(f"{type(self).__name__}.{method.__name__}", error)
            self.crashed(error)

    return called


@contextmanager
def reported(place: str) -> Iterator[None]:
    """For work that must not fail the answer: an exception ends the work and is logged."""
    try:
        yield
    except Exception as error:
        report(place, error)


def report(place: str, error: Exception) -> None:
    """Passes it to the loop's exception handler, which logs it (`engine_agent.cell_proxy.log`)."""
    asyncio.get_running_loop().call_exception_handler({"message": place, "exception": error})
