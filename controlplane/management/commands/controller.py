"""Runs the control loops until it is told to stop."""

import logging
import signal
import threading
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import DatabaseError

from controlplane.observability.exposition import serve_metrics
from controlplane.secret_key import require_secret_key
from fleet.services.agent_archive import NoRelease, leftovers_remove
from fleet.services.agent_releases import release_register
from fleet.services.release_retention import releases_trim
from kernel import clock
from kernel.control_loops import Controller, HangingPass, control_loops

log = logging.getLogger(__name__)


def register_release() -> None:
    """Before anything is launched, so that it runs a release. A fleet whose controller cannot say so runs on."""
    try:
        release_register(now=clock.now())
    except (DatabaseError, OSError, NoRelease) as error:
        log.error("the release of the agent that this control plane carries cannot be kept: %s", error)
        return
    try:
        leftovers_remove(clock.now().timestamp())
        releases_trim(now=clock.now())
    except (DatabaseError, OSError) as error:
        log.error("releases of the agent that nothing needs cannot be removed: %s", error)


class Command(BaseCommand):
    help = "Reconcile the fleet, publish routing tables, and steer regions, until SIGTERM."
    requires_system_checks = []

    def handle(self, *args: Any, **options: Any) -> None:
        require_secret_key()
        stopping = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stopping.set())
        serve_metrics()
        register_release()
        try:
            Controller(control_loops()).run(stopping)
        except HangingPass as hanging:
            raise CommandError(f"{hanging}; this process ends, so that another one goes on") from hanging
