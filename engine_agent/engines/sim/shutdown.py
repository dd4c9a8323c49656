"""How a process comes to its end: the first reason wins, and says which exit status it means. It stops nothing."""

import asyncio
import logging
import signal
from dataclasses import dataclass

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ShutdownReason:
    """Why the process ends. `failed`: something broke, and the exit status is not 0."""

    reason: str
    failed: bool

    @property
    def exit_status(self) -> int:
        """1 after a failure, 0 after a requested stop."""
        return 1 if self.failed else 0


class Shutdown:
    """The one end of this process, awaited by whoever has to do it."""

    def __init__(self) -> None:
        self._end: asyncio.Future[ShutdownReason] = asyncio.get_running_loop().create_future()

    def request(self, reason: str, failed: bool) -> None:
        """End the process, unless its end has come already."""
        if not self._end.done():
            self._end.set_result(ShutdownReason(reason, failed))

    def on_signals(self) -> None:
        """Let SIGTERM and SIGINT mean a requested stop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.request, f"{number.name} received", False)

    def on_failure_of(self, task: "asyncio.Task[None]") -> None:
        """Let the failure of a task that should run to the end of the process be its end."""
        task.add_done_callback(self._task_done)

    async def wait(self) -> ShutdownReason:
        return await asyncio.shield(self._end)

    def _task_done(self, task: "asyncio.Task[None]") -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("%s broke", task.get_name(), exc_info=error)
            self.request(f"{task.get_name()} broke: {error}", failed=True)
