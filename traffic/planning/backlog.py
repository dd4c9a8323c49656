"""How many requests at once it takes to be done in time with what batches and near-real-time requests queue. Pure.

Whatever is queued takes a little, so that there is a cell for it; and as its deadlines come nearer, more.
"""

from dataclasses import dataclass

LEAST_LEFT_S = 60.0
"""A deadline that is nearer asks for no more: it would ask for the whole fleet for a second."""


@dataclass(frozen=True, slots=True)
class QueuedWork:
    """`requests` that are queued; `per_s`: of each, one over the seconds that are left for it, summed up."""

    requests: float = 0.0
    per_s: float = 0.0

    def __add__(self, other: "QueuedWork") -> "QueuedWork":
        return QueuedWork(self.requests + other.requests, self.per_s + other.per_s)


def work_until(requests: int, left_s: float) -> QueuedWork:
    """So many requests that share a deadline."""
    return QueuedWork(requests, requests / max(left_s, LEAST_LEFT_S))


def requests_at_once(work: QueuedWork, service_s: float | None) -> float:
    """By Little's law, and no more than there are. Where nobody knows how long one takes it is one at a time."""
    if work.requests <= 0:
        return 0.0
    return min(work.requests, work.per_s * service_s if service_s is not None else 1.0)
