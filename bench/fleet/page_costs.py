"""CPU time of each page in this process and in its PostgreSQL backend. Other processes do not count, so figures of busy
machines can be compared."""

import gc
import logging
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench import cpu_s, family

if TYPE_CHECKING:
    from django.test import Client

VISITS = 7
WARMING = 2


@dataclass(frozen=True, slots=True)
class PageCost:
    """Milliseconds of CPU time: `python_ms` of each visit, PostgreSQL's as a mean, because it counts in hundredths of a
    second."""

    url: str
    kilobytes: float
    python_ms: tuple[float, ...]
    postgres_ms: float

    @property
    def sum_ms(self) -> float:
        return statistics.median(self.python_ms) + self.postgres_ms


def page_costs_print(urls: Sequence[str], cookie: tuple[str, str]) -> None:
    """Prints a table, the most expensive page first."""
    from django.conf import settings
    from django.test import Client

    settings.ALLOWED_HOSTS = ["testserver"]
    logging.disable(logging.WARNING)
    client = Client()
    client.cookies[cookie[0]] = cookie[1]
    for url in urls:
        client.get(url)
    gc.collect()
    gc.freeze()
    costs = sorted((_cost(client, url) for url in urls), key=lambda cost: -cost.sum_ms)
    print(f"\nCPU time of a page, median of {VISITS} visits with least and greatest.\n")
    print("| page or list | kB | sum ms | Python ms | PostgreSQL ms |\n| --- | ---: | ---: | ---: | ---: |")
    for cost in costs:
        least, most = min(cost.python_ms), max(cost.python_ms)
        python = f"{statistics.median(cost.python_ms):.0f} ({least:.0f} to {most:.0f})"
        print(f"| `{cost.url}` | {cost.kilobytes:.0f} | {cost.sum_ms:.0f} | {python} | {cost.postgres_ms:.0f} |")


def _cost(client: "Client", url: str) -> PageCost:
    from django.db import connection

    for _ in range(WARMING):
        client.get(url)
    backend, python_ms, size = family(connection.connection.info.backend_pid), [], 0
    before_s = cpu_s(backend)
    for _ in range(VISITS):
        began_s = time.thread_time()
        size = len(client.get(url).content)
        python_ms.append(1000 * (time.thread_time() - began_s))
    postgres_ms = 1000 * (cpu_s(backend) - before_s) / VISITS
    return PageCost(url, size / 1024, tuple(python_ms), postgres_ms)
