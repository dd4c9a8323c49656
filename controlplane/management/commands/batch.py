"""Works on batches until it is told to stop."""

import asyncio
import signal
from typing import Any

from django.core.management.base import BaseCommand

from controlplane.observability.exposition import serve_metrics
from controlplane.secret_key import require_secret_key
from traffic.batches.services.runner import BatchChores, BatchSender


class Command(BaseCommand):
    help = "Validate batches, send their lines through the ingresses of their regions, and finalize, until SIGTERM."
    requires_system_checks = []

    def handle(self, *args: Any, **options: Any) -> None:
        require_secret_key()
        serve_metrics()
        asyncio.run(_work())


async def _work() -> None:
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    await asyncio.gather(BatchChores().run(stopping), BatchSender().run(stopping))
