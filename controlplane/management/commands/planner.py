"""Measures demand, forecasts it, and plans by that, until it is told to stop."""

import signal
import threading
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from controlplane.observability.exposition import serve_metrics
from controlplane.secret_key import require_secret_key
from kernel.control_loops import Controller, HangingPass, planner_loops
from traffic.tasks import planner_stop


class Command(BaseCommand):
    help = "Measure the demand of each deployment and forecast it, until SIGTERM."
    requires_system_checks = []

    def handle(self, *args: Any, **options: Any) -> None:
        require_secret_key()
        stopping = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stopping.set())
        serve_metrics()
        try:
            Controller(planner_loops()).run(stopping)
        except HangingPass as hanging:
            raise CommandError(f"{hanging}; this process ends, so that another one goes on") from hanging
        finally:
            planner_stop()
