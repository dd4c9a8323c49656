"""Limits how much one caller holds of what all callers share: arriving bodies, bytes of bodies, places of uploads. It
only counts; its user names the owner of each request."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from weakref import WeakValueDictionary


class OverShare(Exception):
    """No room now. `is_of_all`: the room of all callers is used up, not only the caller's share."""

    def __init__(self, message: str, *, is_of_all: bool) -> None:
        super().__init__(message)
        self.is_of_all = is_of_all


@dataclass(slots=True)
class BodyShares:
    """Counts the arriving bodies of one process, and the bytes of bodies until their requests end."""

    most_bytes: int
    most_bytes_of_one: int
    most_bodies: int = 256
    most_bodies_of_one: int = 32
    _bodies: Counter[str] = field(default_factory=Counter)
    _bytes: Counter[str] = field(default_factory=Counter)

    def begin(self, owner: str, *, has_share: bool) -> None:
        """Count one more arriving body, until `whole`.

        Raises:
            OverShare
        """
        if has_share and self._bodies[owner] >= self.most_bodies_of_one:
            raise OverShare(f"{self.most_bodies_of_one} of your requests are still arriving", is_of_all=False)
        if self._bodies.total() >= self.most_bodies:
            raise OverShare(f"{self.most_bodies} requests are still arriving; try again shortly", is_of_all=True)
        self._bodies[owner] += 1

    def add(self, owner: str, size: int, *, has_share: bool) -> None:
        """Count the bytes of a piece that arrived, until `forget`.

        Raises:
            OverShare
        """
        if has_share and self._bytes[owner] + size > self.most_bytes_of_one:
            message = f"your requests under way have {self.most_bytes_of_one} bytes together; try again when one ended"
            raise OverShare(message, is_of_all=False)
        if self._bytes.total() + size > self.most_bytes:
            message = f"all requests under way have {self.most_bytes} bytes together; try again shortly"
            raise OverShare(message, is_of_all=True)
        self._bytes[owner] += size

    def whole(self, owner: str) -> None:
        _less(self._bodies, owner, 1)

    def forget(self, owner: str, size: int) -> None:
        _less(self._bytes, owner, size)

    @property
    def is_unused(self) -> bool:
        return not self._bodies and not self._bytes


def _less(counted: Counter[str], owner: str, by: int) -> None:
    counted[owner] -= by
    if counted[owner] <= 0:
        del counted[owner]


class FairPlaces:
    """A number of places, and a maximum for each owner. A request without a place waits its turn; an owner with many
    requests waits for its own places and delays no other owner."""

    def __init__(self, most: int, most_of_one: int) -> None:
        self._most, self._most_of_one = most, most_of_one
        self._all = asyncio.Semaphore(most)
        self._owners: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def taken(self, owner: str, *, has_share: bool, within_s: float) -> AsyncIterator[None]:
        """
        Raises:
            OverShare: none became free in time.
        """
        own = self._owners.setdefault(owner, asyncio.Semaphore(self._most_of_one if has_share else self._most))
        until = asyncio.get_running_loop().time() + within_s
        await _acquired(own, until, f"{self._most_of_one} of your files are being stored", is_of_all=False)
        try:
            message = f"{self._most} files are being stored; try again shortly"
            await _acquired(self._all, until, message, is_of_all=True)
            try:
                yield
            finally:
                self._all.release()
        finally:
            own.release()


async def _acquired(places: asyncio.Semaphore, until: float, message: str, *, is_of_all: bool) -> None:
    try:
        async with asyncio.timeout_at(until):
            await places.acquire()
    except TimeoutError:
        raise OverShare(message, is_of_all=is_of_all) from None
