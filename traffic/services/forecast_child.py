"""The planner's child: forecasts the series that it reads from standard input, and writes each as it is done. A process
of its own, because numpy and LightGBM take memory that nobody needs between two rounds, and because what hangs or grows
can be ended. It ends in time by itself, too; what it wrote until then counts.

    python -m traffic.services.forecast_child < round > answers
"""

import resource
import sys
from time import monotonic

import msgspec

from fleet.planning.forecast.job import ForecastDone, ForecastJob, ForecastRound, framed

MEMORY_MOST = 2 * 2**30
"""Bytes of addresses: libraries reserve far more than they use."""


def main() -> None:
    """Forecast one round."""
    began = monotonic()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MOST, MEMORY_MOST))
    asked = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=ForecastRound)
    for job in asked.jobs:
        spent_s = monotonic() - began
        if spent_s > asked.ends_after_s:
            return
        answer = answer_to(job, may_learn=spent_s < asked.learns_for_s)
        sys.stdout.buffer.write(framed(msgspec.msgpack.encode(answer)))
        sys.stdout.buffer.flush()


def answer_to(job: ForecastJob, *, may_learn: bool) -> ForecastDone:
    """What goes wrong with one series is told, and the others are forecast."""
    from fleet.planning.forecast.working import work

    try:
        return work(job, may_learn=may_learn)
    except Exception as error:
        return ForecastDone(job.number, problem=f"{type(error).__name__}: {error}"[:300])


if __name__ == "__main__":
    main()
