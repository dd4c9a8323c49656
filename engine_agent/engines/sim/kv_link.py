"""How one engine takes a prompt over from another that has read it: a line of JSON for a question, and one for its
answer, over one connection for each prompt. No keys and values pass, for there are none: the time that they would take
does. As with `NixlConnector`, whoever reaches the port and knows the name of a request may ask for it.

A decode engine asks `read`, and `renew` while it waits, then `free`. A prefill engine that dies meanwhile closes the
connection, and the prompt is read again.
"""

import asyncio
import logging
from asyncio import StreamReader, StreamWriter
from contextlib import closing

import msgspec

from engine_agent.engines.sim.leases import Leases
from engine_agent.engines.sim.listening import bind_port
from engine_agent.engines.sim.planning.generation_request import Source
from engine_agent.engines.sim.planning.handover import HandoverParameters
from engine_agent.engines.sim.settings import Endpoint
from engine_agent.protocol.local_servers import closing_connections

ANSWER_LIMIT_S = 2.0
IDLE_LIMIT_S = 60.0
LINE_BYTES_MAX = 4096

log = logging.getLogger(__name__)


class TakeOverFailed(Exception):
    """The other engine does not have the prompt, or is gone; the text says which."""


class _Question(msgspec.Struct, frozen=True):
    ask: str
    request: str


class _Answer(msgspec.Struct, frozen=True):
    tokens: int | None = None


_question = msgspec.json.Decoder(_Question)
_answer = msgspec.json.Decoder(_Answer)


class KvServer:
    """Answers questions about what `leases` keeps."""

    def __init__(self, endpoint: Endpoint, leases: Leases) -> None:
        """Bind the port.

        Raises:
            PortTaken: it cannot be bound.
        """
        self._leases = leases
        self._socket = bind_port(endpoint)

    async def run(self) -> None:
        """Listen, and end leases that are due, for ever."""
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
    """Have a prompt that another engine has read; returns how many tokens of it, `most` at most.

    Raises:
        TakeOverFailed: it is to be read here.
    """
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
                raise TakeOverFailed(f"{source.request_id} is not kept there any more")
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
    """Raises:
    TakeOverFailed: the other is gone before.
    """
    try:
        async with asyncio.timeout(for_s):
            await reader.read(1)
    except TimeoutError:
        return
    except OSError as error:
        raise TakeOverFailed(str(error)) from error
    raise TakeOverFailed("the other engine is gone")
