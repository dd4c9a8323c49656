"""Does the work that was accepted earlier, until SIGTERM."""

import asyncio
import signal
import sys
from typing import Any

import uvloop
from django.core.management.base import BaseCommand

from controlplane.observability.exposition import serve_metrics
from controlplane.processes import BY_NAME, wait_for_database
from controlplane.secret_key import require_secret_key
from fleet.webhooks.services import WebhookSender
from kernel.process_role import ProcessRole
from models_registry.benchmarks.services.runner import BenchmarkRunner
from models_registry.benchmarks.services.search_runner import SearchRunner
from models_registry.imports.services.runner import ModelImporter
from traffic.async_requests.services.queue_readers import QueueReaders
from traffic.async_requests.services.sender import AsyncSender
from traffic.batch_sinks.services.deliveries import BatchDeliverer
from traffic.batches.services.runner import BatchChores, BatchSender

SWITCH_EVERY_S = 0.001
"""Instead of 5 ms: the validation of a batch computes for seconds next to requests that are being sent."""


class Command(BaseCommand):
    help = f"Process {BY_NAME[ProcessRole.JOBS].does}, until SIGTERM."
    requires_system_checks = []

    def handle(self, *args: Any, **options: Any) -> None:
        require_secret_key()
        wait_for_database()
        serve_metrics()
        sys.setswitchinterval(SWITCH_EVERY_S)
        uvloop.run(_work())


async def _work() -> None:
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    lease_loops = (AsyncSender(), BatchChores(), BatchSender(), BatchDeliverer(), WebhookSender(), ModelImporter())
    others = (QueueReaders(), BenchmarkRunner(), SearchRunner())
    await asyncio.gather(*(each.run(stopping) for each in (*lease_loops, *others)))
