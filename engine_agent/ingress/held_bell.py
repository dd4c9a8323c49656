"""The bell that HAProxy rings when a request has to wait for a first cell: a connection to a socket of the agent.

A ring that nobody hears costs a second: who waits is seen by the next look at HAProxy, too."""

import asyncio
import contextlib
import logging
import os
import socket
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
        while True:
            try:
                with self._listener() as listener:
                    await self._answer(listener)
            except OSError as error:
                log.warning("%s: %s; requests that wait for a first cell are reported a second late", self._path, error)
                await asyncio.sleep(TRY_AGAIN_S)

    def _listener(self) -> socket.socket:
        # One that an agent of before left would refuse this one its name.
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.setblocking(False)
            listener.bind(str(self._path))
            self._path.chmod(0o600)
            if self._account is not None:
                os.chown(self._path, *self._account)
            listener.listen()
        except OSError:
            listener.close()
            raise
        return listener

    async def _answer(self, listener: socket.socket) -> None:
        """Until cancelled, or an error. No server of asyncio: one that closes in the turn in which it accepted leaves
        that connection open."""
        loop = asyncio.get_running_loop()
        failed: asyncio.Future[None] = loop.create_future()

        def ring() -> None:
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                loop.remove_reader(listener)
                failed.set_exception(error)
                return
            connection.close()
            self._hear()

        loop.add_reader(listener, ring)
        try:
            await failed
        finally:
            loop.remove_reader(listener)
