"""Prompts that this engine has read for others, and until when it keeps them. Nothing of them stays behind: whoever
takes one says so, and what nobody takes or renews ends with its lease."""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from engine_agent.engines.sim.planning.handover import HandoverParameters


@dataclass
class _Lease:
    sequence: str
    tokens: int
    expires_at_s: float


class Leases:
    """The leases of one engine. `forget` frees the memory of a sequence; `clock` gives seconds."""

    def __init__(
        self, parameters: HandoverParameters, forget: Callable[[str], None], clock: Callable[[], float]
    ) -> None:
        self.expired = 0
        """Leases that ended because nobody took what they kept."""
        self._parameters = parameters
        self._forget = forget
        self._clock = clock
        self._by_request: dict[str, _Lease] = {}
        self._requests: dict[str, str] = {}
        """By sequence."""
        self._begun = asyncio.Event()

    def __len__(self) -> int:
        return len(self._by_request)

    def keep(self, sequence: str, tokens: int) -> None:
        """Begin a lease. Its request has a name that only whoever is told it can know."""
        request = f"{sequence}-{secrets.token_hex(8)}"
        self._by_request[request] = _Lease(sequence, tokens, self._clock() + self._parameters.lease_s)
        self._requests[sequence] = request
        self._begun.set()

    def request_of(self, sequence: str) -> str | None:
        """The name under which a sequence is kept; None: it is not."""
        return self._requests.get(sequence)

    def renew(self, request: str) -> int | None:
        """Keep it for an extension from now at least; returns its tokens, or None if it is not kept."""
        lease = self._by_request.get(request)
        if lease is None:
            return None
        lease.expires_at_s = max(lease.expires_at_s, self._clock() + self._parameters.extension_s)
        return lease.tokens

    def free(self, request: str) -> bool:
        """It was taken, or is not needed. False: it is not kept."""
        lease = self._by_request.pop(request, None)
        if lease is None:
            return False
        del self._requests[lease.sequence]
        self._forget(lease.sequence)
        return True

    def expire(self) -> None:
        """Free what nobody took in time."""
        now_s = self._clock()
        for request in [name for name, lease in self._by_request.items() if lease.expires_at_s <= now_s]:
            self.expired += 1
            self.free(request)

    def clear(self) -> None:
        for request in tuple(self._by_request):
            self.free(request)

    async def run(self) -> None:
        """Expire leases for ever, each when it is due."""
        while True:
            due_s = min((lease.expires_at_s for lease in self._by_request.values()), default=None)
            if due_s is None:
                self._begun.clear()
                await self._begun.wait()
                continue
            await asyncio.sleep(max(0.0, due_s - self._clock()))
            self.expire()
