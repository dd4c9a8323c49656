"""How far a batch was over time, in a bounded number of samples: as many as a figure shows, whatever its window. Pure.

Samples are on a grid that begins with the batch's work; once it is full, every second one goes and the step doubles.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from traffic.planning.batch_pacing import RESERVE

FIRST_STEP_S = 30
MOST_SAMPLES = 120
Counts = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Lines that had an answer and lines that failed, `step_s` seconds from one sample to the next; None: nobody looked
    then."""

    step_s: int = FIRST_STEP_S
    completed: Counts = ()
    failed: Counts = ()

    @property
    def done(self) -> Counts:
        return tuple(
            None if one is None or other is None else one + other
            for one, other in zip(self.completed, self.failed, strict=True)
        )


def add_sample(timeline: Timeline, at_s: float, completed: int, failed: int) -> Timeline | None:
    """With what there is `at_s` seconds after its work began; None: this step has its sample already."""
    step_s, counts = timeline.step_s, (timeline.completed, timeline.failed)
    while at_s // step_s >= MOST_SAMPLES:
        step_s, counts = step_s * 2, (counts[0][::2], counts[1][::2])
    place = int(max(0.0, at_s) // step_s)
    if place < len(counts[0]):
        return None
    gap: Counts = (None,) * (place - len(counts[0]))
    return Timeline(step_s, (*counts[0], *gap, completed), (*counts[1], *gap, failed))


def needed_lines(timeline: Timeline, lines: int, window_s: float) -> tuple[float, ...]:
    """Lines that would have an outcome at each sample, were it always as fast as it has to be so that a tenth of its
    window is left in the end."""
    span_s = max(1.0, window_s * (1 - RESERVE))
    return tuple(min(1.0, number * timeline.step_s / span_s) * lines for number in range(len(timeline.completed)))


def actual_rates(timeline: Timeline) -> tuple[float | None, ...]:
    """Lines a second since the sample before; None at the first, and where nobody looked."""
    rates: list[float | None] = []
    last: tuple[int, int] | None = None
    for place, done in enumerate(timeline.done):
        rates.append(None if done is None or last is None else _rate(last, (place, done), timeline.step_s))
        last = last if done is None else (place, done)
    return tuple(rates)


def needed_rates(timeline: Timeline, lines: int, window_s: float) -> tuple[float | None, ...]:
    """Lines a second that were needed from each sample on; None where none was taken, or its time was over."""
    ends_s = window_s * (1 - RESERVE)
    return tuple(
        None
        if done is None or place * timeline.step_s >= ends_s
        else (lines - done) / (ends_s - place * timeline.step_s)
        for place, done in enumerate(timeline.done)
    )


def _rate(before: Sequence[int], now: Sequence[int], step_s: int) -> float:
    return max(0, now[1] - before[1]) / ((now[0] - before[0]) * step_s)
