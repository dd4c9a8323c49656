"""Sums of a member's computing time by batch size. It reads no clock: callers pass durations."""

from collections import Counter

from engine_agent.protocol.messages import StepTimes
from engine_agent.protocol.metrics import batch_bucket


class StepMeter:
    """Decode steps and their computing time since the engine started."""

    def __init__(self) -> None:
        self._steps: Counter[int] = Counter()
        self._compute_ms: dict[int, float] = {}
        self._known = StepTimes()

    def note(self, sequences: int, compute_ms: float) -> None:
        self._add(batch_bucket(sequences), 1, compute_ms)

    def follow(self, cell: StepTimes, slow_factor: float) -> None:
        """Adds what the cell computed since the last call, for a member that takes `slow_factor` times as long. `cell`
        counts since the start, so a lost heartbeat loses nothing."""
        for bucket, steps in cell.steps.items():
            more = steps - self._known.steps.get(bucket, 0)
            more_ms = cell.compute_ms.get(bucket, 0.0) - self._known.compute_ms.get(bucket, 0.0)
            if more > 0:
                self._add(bucket, more, more_ms * slow_factor)
        self._known = cell

    def times(self) -> StepTimes:
        rounded = {bucket: round(ms, 3) for bucket, ms in self._compute_ms.items()}
        return StepTimes(steps=dict(self._steps), compute_ms=rounded)

    def _add(self, bucket: int, steps: int, compute_ms: float) -> None:
        self._steps[bucket] += steps
        self._compute_ms[bucket] = self._compute_ms.get(bucket, 0.0) + compute_ms
