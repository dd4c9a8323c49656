"""A token bucket: how many messages one peer may send. Pure; the caller brings the time."""


class Allowance:
    """`per_s` messages a second on average, `burst` at once."""

    def __init__(self, *, per_s: float, burst: float, now: float) -> None:
        self.per_s = per_s
        self.burst = burst
        self._left = burst
        self._at = now

    def take(self, now: float) -> bool:
        """Use one; False if there is none left."""
        self._left = min(self.burst, self._left + (now - self._at) * self.per_s)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True
