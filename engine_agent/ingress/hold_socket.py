"""The socket that `hold.lua` connects to when a request has to wait for a first cell. A missed connection costs a
second: the next reading of HAProxy shows the request as well."""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable

from engine_agent.ingress.command_socket import short_path
from engine_agent.ingress.settings import IngressSettings

HOLD_SOCKET = "held.sock"
"""In the state directory."""
TRY_AGAIN_S = 5.0
"""Retry of a socket that could not be created."""

log = logging.getLogger(__name__)


class HoldSocket:
    """Calls `notify` for each connection."""

    def __init__(self, settings: IngressSettings, notify: Callable[[], None]) -> None:
        self._path = settings.state_dir / HOLD_SOCKET
        self._account = settings.worker_account
        self._notify = notify

    async def listen(self) -> None:
        while True:
            try:
                with self._listener() as listener:
                    await self._answer(listener)
            except OSError as error:
                log.warning("%s: %s; requests that wait for a first cell are reported a second late", self._path, error)
                await asyncio.sleep(TRY_AGAIN_S)

    def _listener(self) -> socket.socket:
        # A socket file of a previous agent would make `bind` fail.
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.setblocking(False)
            with short_path(self._path) as path:
                listener.bind(path)
            self._path.chmod(0o600)
            if self._account is not None:
                os.chown(self._path, *self._account)
            listener.listen()
        except OSError:
            listener.close()
            raise
        return listener

    async def _answer(self, listener: socket.socket) -> None:
        """Accepts until cancelled or an error. An asyncio server would leak a connection that it accepted in the same
        turn in which it closes."""
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
            self._notify()

        loop.add_reader(listener, ring)
        try:
            await failed
        finally:
            loop.remove_reader(listener)
