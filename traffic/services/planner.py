"""What the process `planner` does once there are new forecasts. Control loops wait for none of it."""

from datetime import datetime

from traffic.services.forecast import Forecaster


class Planner:
    """The planning of one process."""

    def __init__(self, forecaster: Forecaster | None = None) -> None:
        self._forecaster = forecaster or Forecaster()

    def look(self, *, now: datetime) -> bool:
        """To be called every few seconds; it waits for nothing. True: there are new forecasts, and what follows from
        them was planned."""
        return self._forecaster.look(now=now) is not None

    def stop(self) -> None:
        """End what is under way: the process ends."""
        self._forecaster.stop()
