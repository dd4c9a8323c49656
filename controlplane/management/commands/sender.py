"""Sends accepted near-real-time requests, takes those that come by queues, measures benchmarks and searches among
configurations, until it is told to stop."""

import asyncio
import signal
from typing import Any

from django.core.management.base import BaseCommand

from controlplane.observability.exposition import serve_metrics
from controlplane.secret_key import require_secret_key
from fleet.webhooks.services import WebhookSender
from models_registry.benchmarks.services.runner import BenchmarkRunner
from models_registry.benchmarks.services.search_runner import SearchRunner
from traffic.async_requests.services.queues import QueueEdge
from traffic.async_requests.services.sender import AsyncSender


class Command(BaseCommand):
    help = (
        "Send near-real-time requests through the ingresses of their regions, take those of queues, and measure "
        "benchmarks, until SIGTERM."
    )
    requires_system_checks = []

    def handle(self, *args: Any, **options: Any) -> None:
        require_secret_key()
        serve_metrics()
        asyncio.run(_send())


async def _send() -> None:
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    processes = (AsyncSender(), WebhookSender(), QueueEdge(), BenchmarkRunner(), SearchRunner())
    await asyncio.gather(*(process.run(stopping) for process in processes))
