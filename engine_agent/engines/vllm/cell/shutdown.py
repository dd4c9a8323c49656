"""How a member's process ends because its cell does: at once, whatever its threads are doing, and with its reason.

A thread may be in a collective that waits for a dead member for ever, so no thread is waited for.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from threading import Lock, Thread
from typing import NoReturn

EXIT_CELL_ENDED = 70
"""EX_SOFTWARE of <sysexits.h>."""
STDERR = 2
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Shutdown:
    """Ends this process once. `hooks` run first, in their order, and must not wait for anybody."""

    def __init__(self) -> None:
        self.hooks: list[Callable[[str], None]] = []
        self.before_stop: Callable[[], None] = lambda: None
        self._once = Lock()

    def on_signals(self) -> None:
        """End on SIGTERM and SIGINT, after `before_stop`. To be called before any other thread starts.

        A thread waits for them, because the main one spends its life inside collectives and would never take them.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        Thread(target=self._await_signal, name="stop-signals", daemon=True).start()

    def _await_signal(self) -> None:
        signal.sigwait(STOP_SIGNALS)
        self.before_stop()
        self.end("told to stop", False)

    def end(self, reason: str, failed: bool = True) -> NoReturn:
        """End now; a second caller waits for the first to have ended both.

        The reason is the last line of the log, which is what the agent reports: what other threads make of the end of
        their collectives is not written any more.
        """
        with self._once:
            sys.stderr.flush()
            log = STDERR
            try:
                with contextlib.suppress(OSError):  # no descriptor is left: then the last line may be another's
                    log = os.dup(STDERR)
                    os.dup2(os.open(os.devnull, os.O_WRONLY), STDERR)
                for act in self.hooks:
                    act(reason)
            finally:
                os.write(log, f"the cell is over: {reason}\n".encode(errors="replace"))
                os._exit(EXIT_CELL_ENDED if failed else 0)
