"""A limit of a rate. Pure: the caller brings the time."""


class TokenBucket:
    """Limits one peer's messages: `per_s` a second on average, `burst` at once."""

    def __init__(self, *, per_s: float, burst: float, now: float) -> None:
        self.per_s = per_s
        self.burst = burst
        self._tokens = burst
        self._at = now

    def take(self, now: float, tokens: float = 1.0) -> bool:
        """Use this many tokens; False if there are not so many left."""
        if not self.has(now, tokens):
            return False
        self._tokens -= tokens
        return True

    def has(self, now: float, tokens: float = 1.0) -> bool:
        self._tokens = min(self.burst, self._tokens + (now - self._at) * self.per_s)
        self._at = now
        return self._tokens >= tokens
