"""Ties vLLM's server and the process of its engine's core together: neither outlives the other.

vLLM's own watch is not enough: a core can stay behind a killed server, and a server that was asked to end can wait for
ever for streams that its dead core will never finish. This module starts the core as a fork, and knows nothing of what
either process does.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.context import ForkContext, ForkProcess
from threading import Thread
from typing import Any

EXIT_CORE_ENDED = 70
"""EX_SOFTWARE of <sysexits.h>."""
SERVER_GRACE_S = 2.0
"""How long a server may take to tell its clients that the core has ended; measured: 0.1 s."""
PR_SET_PDEATHSIG = 1
"""From <linux/prctl.h>."""


class CoreProcess(ForkProcess):
    """A fork that is killed when its parent ends, however it ends, and that its parent survives for a short while."""

    shutdown_hook: Callable[[], None] = staticmethod(lambda: None)
    """What a parent does before it ends in this way."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._server_pid = os.getpid()

    def start(self) -> None:
        """Start the child and the parent's watch over it."""
        super().start()
        Thread(target=self._end_after_child, name="core-watch", daemon=True).start()

    def run(self) -> None:
        """In the child: do its work, under the condition."""
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self._server_pid:
            os._exit(EXIT_CORE_ENDED)
        super().run()

    def _end_after_child(self) -> None:
        wait([self.sentinel])
        time.sleep(SERVER_GRACE_S)
        try:
            sys.stderr.write(f"{self.name} ended {SERVER_GRACE_S:.0f} s ago: the server ends too\n")
            self.shutdown_hook()
        finally:
            os._exit(EXIT_CORE_ENDED)


class CoreContext(ForkContext):
    """A multiprocessing context whose processes are `CoreProcess`es."""

    Process = CoreProcess
