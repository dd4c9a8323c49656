"""What the process `planner` does once there are new forecasts. Control loops wait for none of it."""

from datetime import datetime

from traffic.services.capacity_plan import DayPlanner
from traffic.services.forecast import Forecaster


class Planner:
    """The planning of one process."""

    def __init__(self, forecaster: Forecaster | None = None, day: DayPlanner | None = None) -> None:
        self._forecaster = forecaster or Forecaster()
        self._day = day or DayPlanner()

    def look(self, *, now: datetime) -> bool:
        """To be called every few seconds; it waits for nothing. True: there are new forecasts; the day is planned by
        them from now on."""
        has_new = self._forecaster.look(now=now) is not None
        if has_new:
            self._day.begin(now=now)
        self._day.look(now=now)
        return has_new

    def stop(self) -> None:
        """End what is under way: the process ends."""
        self._forecaster.stop()
        self._day.stop()
