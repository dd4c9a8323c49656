"""Runs the control loops until it is told to stop."""

import signal
import threading
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from controlplane.observability.exposition import serve_metrics
from controlplane.secret_key import require_secret_key
from kernel.control_loops import Controller, HangingPass, control_loops


class Command(BaseCommand):
    help = "Reconcile the fleet, publish routing tables, and steer regions, until SIGTERM."
    requires_system_checks = []

    def handle(self, *args: Any, **options: Any) -> None:
        require_secret_key()
        stopping = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stopping.set())
        serve_metrics()
        try:
            Controller(control_loops()).run(stopping)
        except HangingPass as hanging:
            raise CommandError(f"{hanging}; this process ends, so that another one goes on") from hanging
