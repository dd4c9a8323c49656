"""The bell that HAProxy rings when a request has to wait for a first cell: a connection to a socket of the agent.

A ring that nobody hears costs a second: who waits is seen by the next look at HAProxy, too."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable

from engine_agent.ingress.hold import BELL_SOCKET
from engine_agent.ingress.settings import IngressSettings

TRY_AGAIN_S = 5.0
"""After the socket could not be made; a full disk ends."""

log = logging.getLogger(__name__)


class HeldBell:
    """Calls `hear` for each ring."""

    def __init__(self, settings: IngressSettings, hear: Callable[[], None]) -> None:
        self._path = settings.state_dir / BELL_SOCKET
        self._account = settings.worker_account
        self._hear = hear

    async def listen(self) -> None:
        """Until cancelled."""
        while True:
            try:
                server = await self._server()
            except OSError as error:
                log.warning("%s: %s; requests that wait for a first cell are reported a second late", self._path, error)
                await asyncio.sleep(TRY_AGAIN_S)
                continue
            async with server:
                await server.serve_forever()

    async def _server(self) -> asyncio.Server:
        # One that an agent of before left would refuse this one its name.
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        server = await asyncio.start_unix_server(self._ring, self._path)
        self._path.chmod(0o600)
        if self._account is not None:
            os.chown(self._path, *self._account)
        return server

    def _ring(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # No coroutine: a task that is cancelled before its first step would leave the connection open.
        self._hear()
        writer.close()
