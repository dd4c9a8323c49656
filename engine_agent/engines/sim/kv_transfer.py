"""Transfer of prompts between engines: leases of prompts that this engine has computed for others, and the protocol to
fetch them.

A question and its answer are one line of JSON each, on one connection for each prompt. No keys and values are sent;
only the time of their transfer passes. As with `NixlConnector`, any process that reaches the port and knows the name of
a request may fetch it. A decode engine sends `read`, `renew` while it waits, then `free`. If the prefill engine dies,
the connection closes and the prompt is computed again."""

import asyncio
import logging
import secrets
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

import msgspec

from engine_agent.engines.openai_http import Endpoint, bind_port
from engine_agent.engines.sim.planning.generation_request import HandoverParameters, Source
from engine_agent.protocol.local_servers import closing_connections


@dataclass
class _Lease:
    sequence: str
    tokens: int
    expires_at_s: float


class Leases:
    """The leases of one engine. `forget` frees the memory of a sequence; `clock` returns seconds."""

    def __init__(
        self, parameters: HandoverParameters, forget: Callable[[str], None], clock: Callable[[], float]
    ) -> None:
        self.expired = 0
        """Leases that ended before another engine fetched their prompt."""
        self._parameters = parameters
        self._forget = forget
        self._clock = clock
        self._by_request: dict[str, _Lease] = {}
        self._requests: dict[str, str] = {}
        """By sequence."""
        self._begun = asyncio.Event()

    def __len__(self) -> int:
        return len(self._by_request)

    def keep(self, sequence: str, tokens: int) -> None:
        """Begins a lease. The name of its request contains a secret."""
        request = f"{sequence}-{secrets.token_hex(8)}"
        self._by_request[request] = _Lease(sequence, tokens, self._clock() + self._parameters.lease_s)
        self._requests[sequence] = request
        self._begun.set()

    def request_of(self, sequence: str) -> str | None:
        """Returns the name under which a sequence is kept; None if it is not."""
        return self._requests.get(sequence)

    def renew(self, request: str) -> int | None:
        """Extends the lease; returns its tokens, or None if there is no such lease."""
        lease = self._by_request.get(request)
        if lease is None:
            return None
        lease.expires_at_s = max(lease.expires_at_s, self._clock() + self._parameters.extension_s)
        return lease.tokens

    def free(self, request: str) -> bool:
        """Ends a lease whose prompt was fetched or is not needed. Returns False if there is none."""
        lease = self._by_request.pop(request, None)
        if lease is None:
            return False
        del self._requests[lease.sequence]
        self._forget(lease.sequence)
        return True

    def expire(self) -> None:
        now_s = self._clock()
        for request in [name for name, lease in self._by_request.items() if lease.expires_at_s <= now_s]:
            self.expired += 1
            self.free(request)

    def clear(self) -> None:
        for request in tuple(self._by_request):
            self.free(request)

    async def run(self) -> None:
        while True:
            due_s = min((lease.expires_at_s for lease in self._by_request.values()), default=None)
            if due_s is None:
                self._begun.clear()
                await self._begun.wait()
                continue
            await asyncio.sleep(max(0.0, due_s - self._clock()))
            self.expire()


ANSWER_LIMIT_S = 2.0
IDLE_LIMIT_S = 60.0
LINE_BYTES_MAX = 4096

log = logging.getLogger(__name__)


class TakeOverFailed(Exception):
    """The other engine does not have the prompt, or is gone; the text states which."""


class _Question(msgspec.Struct, frozen=True):
    ask: str
    request: str


class _Answer(msgspec.Struct, frozen=True):
    tokens: int | None = None


_question = msgspec.json.Decoder(_Question)
_answer = msgspec.json.Decoder(_Answer)


class KvServer:
    """Answers questions about prompts in `leases`."""

    def __init__(self, endpoint: Endpoint, leases: Leases) -> None:
        """Binds the port. Raises PortTaken if it cannot be bound."""
        self._leases = leases
        self._socket = bind_port(endpoint)

    async def run(self) -> None:
        with closing(self._socket):
            async with await asyncio.start_server(
                closing_connections(self._serve), sock=self._socket, limit=LINE_BYTES_MAX
            ):
                await self._leases.run()

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            while line := await asyncio.wait_for(reader.readline(), IDLE_LIMIT_S):
                writer.write(msgspec.json.encode(_Answer(self._answered(_question.decode(line)))) + b"\n")
                await writer.drain()
        except (OSError, ValueError, msgspec.DecodeError) as error:  # a TimeoutError is one of the first
            log.info("a transfer ended: %s", str(error) or type(error).__name__)

    def _answered(self, question: _Question) -> int | None:
        if question.ask == "free":
            return 0 if self._leases.free(question.request) else None
        return self._leases.renew(question.request)


async def take_over(source: Source, parameters: HandoverParameters, most: int) -> int:
    """Fetches a prompt that another engine has read; returns its tokens, `most` at most. Raises TakeOverFailed if the
    prompt must be read here."""
    try:
        async with asyncio.timeout(ANSWER_LIMIT_S):
            reader, writer = await asyncio.open_connection(source.host, source.port, limit=LINE_BYTES_MAX)
    except OSError as error:
        raise TakeOverFailed(f"{source.host}:{source.port}: {str(error) or 'no connection in time'}") from error
    with closing(writer):

        async def ask(what: str) -> int:
            writer.write(msgspec.json.encode(_Question(what, source.request_id)) + b"\n")
            try:
                async with asyncio.timeout(ANSWER_LIMIT_S):
                    tokens = _answer.decode(await reader.readline()).tokens
            except (OSError, ValueError, msgspec.DecodeError) as error:
                raise TakeOverFailed(f"{what}: {str(error) or 'no answer in time'}") from error
            if tokens is None:
                raise TakeOverFailed(f"{source.request_id} is no longer kept there")
            return tokens

        tokens = min(await ask("read"), most)
        left_s = parameters.handover_s(tokens)
        while left_s > parameters.renew_s:
            await asyncio.sleep(parameters.renew_s)
            left_s -= parameters.renew_s
            await ask("renew")
        await _while_connected(reader, left_s)
        await ask("free")
    return tokens


async def _while_connected(reader: StreamReader, for_s: float) -> None:
    try:
        async with asyncio.timeout(for_s):
            await reader.read(1)
    except TimeoutError:
        return
    except OSError as error:
        raise TakeOverFailed(str(error)) from error
    raise TakeOverFailed("the other engine is gone")
