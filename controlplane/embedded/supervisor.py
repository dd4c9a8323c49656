"""The services of one launcher together: started one by one, watched, stopped in the opposite order."""

import asyncio
import signal
from collections.abc import Callable

from controlplane.embedded.console import Console
from controlplane.embedded.errors import CannotStart
from controlplane.embedded.home import Home
from controlplane.embedded.spawning import end_session
from controlplane.embedded.supervised import Service, Supervised

HOPELESS_AFTER_DEATHS = 5
"""Quick deaths in a row after which a first start is given up: 0.5 + 1 + 2 + 4 s of backoff lie between them."""
_WATCH_EVERY_S = 0.2


class Supervisor:
    """Holds every supervised process. `on_change` gets name -> pid (which is also the session) at every start."""

    def __init__(self, home: Home, console: Console, *, on_change: Callable[[dict[str, int]], None]) -> None:
        self._home = home
        self._console = console
        self._on_change = on_change
        self._running: dict[str, Supervised] = {}
        self._sessions: dict[str, int] = {}

    @property
    def runs_anything(self) -> bool:
        return bool(self._running)

    async def start(self, service: Service) -> None:
        """Start `service` and keep it running."""
        supervised = Supervised(service, self._home, self._console, on_start=self._started)
        self._running[service.name] = supervised
        await supervised.start()

    async def stop(self, *names: str) -> None:
        """Stop these services, one after the other; those that do not run are skipped."""
        for name in names:
            if supervised := self._running.pop(name, None):
                await supervised.stop()

    async def stop_all(self) -> None:
        """Stop what still runs, the last started first."""
        await self.stop(*reversed(self._running))

    async def fail_when_hopeless(self) -> None:
        """Return never; watch until a service keeps dying.

        Raises:
            CannotStart: it does, and why.
        """
        while True:
            for name, supervised in self._running.items():
                if supervised.deaths >= HOPELESS_AFTER_DEATHS:
                    log = self._home.logs / f"{name}.log"
                    raise CannotStart(f"{name} keeps dying ({supervised.last_line}); the whole story is in {log}.")
            await asyncio.sleep(_WATCH_EVERY_S)

    def kill_all(self) -> None:
        """Kill every session at once, without waiting."""
        for session in self._sessions.values():
            end_session(session, signal.SIGKILL)

    def _started(self, name: str, pid: int) -> None:
        self._sessions[name] = pid
        self._on_change(dict(self._sessions))
