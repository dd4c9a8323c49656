"""What the process `planner` does besides measuring demand: forecasts, and the plan of the day that follows them."""

from datetime import datetime

from traffic.services.capacity_plan import DayPlanner
from traffic.services.forecast import Forecaster


class Planner:
    def __init__(self, forecaster: Forecaster | None = None, day: DayPlanner | None = None) -> None:
        self._forecaster = forecaster or Forecaster()
        self._day = day or DayPlanner()

    def look(self, *, now: datetime) -> bool:
        """To be called every few seconds. Returns True if there are new forecasts, from which a plan of the day is then
        made in a child process."""
        has_new = self._forecaster.look(now=now) is not None
        if has_new:
            self._day.begin(now=now)
        self._day.look(now=now)
        return has_new

    def stop(self) -> None:
        """Stop the child that plans the day: the process ends."""
        self._day.stop()
