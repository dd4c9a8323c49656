"""Streams that leave a cell that drains, a few at a time: a stream pauses until another cell has it, and one that waits
for its turn still runs."""

import asyncio
from collections import deque
from typing import Final, Protocol

AT_ONCE: Final = 16
"""Streams that pause together. Moving one takes the hosts a few milliseconds of CPU time."""
AGAIN_AFTER_S: Final = 15.0
"""Until a stream that stayed tries again, the first time; then twice as long. A cell may be free by then."""


class Leaver(Protocol):
    @property
    def is_leaving(self) -> bool:
        """Whether it pauses for a relay to move it."""

    def leave(self) -> None:
        """Pauses, and tells the relay that the stream may continue elsewhere. Does nothing if it cannot."""


class Departures:
    def __init__(self) -> None:
        self._waiting: deque[Leaver] = deque()
        self._leaving: set[Leaver] = set()
        self._tries: dict[Leaver, int] = {}

    def add(self, *requests: Leaver) -> None:
        """Requests that are to leave."""
        self._waiting += requests
        self._go()

    def stayed(self, request: Leaver) -> None:
        """No relay has taken the stream. It tries again later."""
        if request not in self._leaving:
            return  # it left for another reason
        self._leaving.discard(request)
        tries = self._tries[request] = self._tries.get(request, 0) + 1
        asyncio.get_running_loop().call_later(AGAIN_AFTER_S * 2 ** (tries - 1), self._again, request)
        self._go()

    def ended(self, request: Leaver) -> None:
        """The request has ended, or has left."""
        self._tries.pop(request, None)
        if request in self._leaving:
            self._leaving.discard(request)
            self._go()

    def stop(self) -> None:
        """The cell serves again."""
        self._waiting.clear()
        self._leaving.clear()
        self._tries.clear()

    def _again(self, request: Leaver) -> None:
        if request in self._tries:
            self.add(request)

    def _go(self) -> None:
        while self._waiting and len(self._leaving) < AT_ONCE:
            request = self._waiting.popleft()
            request.leave()
            if request.is_leaving:
                self._leaving.add(request)
