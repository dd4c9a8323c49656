"""The counts of one relay process."""

from collections import Counter
from typing import Final

from engine_agent.protocol.metrics import BUCKETS, bucket_of, midpoint_s

_QUANTILES: Final = (0.5, 0.99)


class RelayMeter:
    """`requests` passed, `continued` streams by the reason why they left their cell, `lost` streams by the reason why
    they could not continue, `repeated` requests of which the client had nothing, and the pauses that clients saw."""

    def __init__(self) -> None:
        self.requests = 0
        self.open = 0
        self.kept_bytes = 0
        self.continued: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self.repeated: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        """Attempts that a cell refused, or for which there was none, by reason."""
        self._pauses = [0] * BUCKETS

    def paused(self, pause_s: float) -> None:
        self._pauses[bucket_of(pause_s)] += 1

    def pause_s(self, quantile: float) -> float:
        """A quantile of the pauses so far, 0 without any."""
        wanted, seen = max(1, round(quantile * sum(self._pauses))), 0
        for index, count in enumerate(self._pauses):
            seen += count
            if count and seen >= wanted:
                return midpoint_s(index)
        return 0.0

    def totals(self) -> dict[str, int]:
        """All counts by name and reason, for the agent of the ingress."""
        named = {"continued": self.continued, "lost": self.lost, "repeated": self.repeated, "refused": self.refused}
        counts = {f"{name}:{reason}": count for name, each in named.items() for reason, count in each.items()}
        pauses = {f"pause_us:{each}": round(1e6 * self.pause_s(each)) for each in _QUANTILES if self.continued}
        return {"requests": self.requests, "open": self.open, "kept_bytes": self.kept_bytes, **counts, **pauses}
