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
LEAST_VISITS = 3
WARMING = 2


@dataclass(frozen=True, slots=True)
class PageCost:
    """Milliseconds: `python_ms` of CPU time and `answer_ms` by the clock of each visit. PostgreSQL's CPU time is a
    mean, because it counts in hundredths of a second."""

    url: str
    kilobytes: float
    python_ms: tuple[float, ...]
    postgres_ms: float
    answer_ms: tuple[float, ...]

    @property
    def sum_ms(self) -> float:
        return statistics.median(self.python_ms) + self.postgres_ms


def page_costs_print(urls: Sequence[str], cookie: tuple[str, str], *, within_s: float) -> None:
    """Prints a table, the most expensive page first. After `within_s`, the page in progress gets `LEAST_VISITS`; the
    remaining pages are listed below the table."""
    from django.conf import settings
    from django.test import Client

    settings.ALLOWED_HOSTS = ["testserver"]
    logging.disable(logging.WARNING)
    client = Client()
    client.cookies[cookie[0]] = cookie[1]
    client.get(urls[0])
    gc.collect()
    gc.freeze()
    until_s = time.monotonic() + within_s
    costs: list[PageCost] = []
    left_out = list(urls)
    while left_out and (time.monotonic() < until_s or not costs):
        url = left_out.pop(0)
        if (status := client.get(url).status_code) != 200:
            print(f"left out: {url} answers {status}")
            continue
        costs.append(_cost(client, url, until_s))
    print(f"\nCPU time of a page and time of its answer: median of {VISITS} visits, least and greatest.\n")
    print("| page or list | kB | sum ms | Python ms | PostgreSQL ms | answer ms |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for cost in sorted(costs, key=lambda cost: -cost.sum_ms):
        python, answer = _spread(cost.python_ms), _spread(cost.answer_ms)
        size, sum_ms, postgres = f"{cost.kilobytes:.0f}", f"{cost.sum_ms:.0f}", f"{cost.postgres_ms:.0f}"
        print(f"| `{cost.url}` | {size} | {sum_ms} | {python} | {postgres} | {answer} |", flush=True)
    if left_out:
        print(f"\nNot measured within {within_s:.0f} s (--seconds): {', '.join(left_out)}")


def _spread(times_ms: Sequence[float]) -> str:
    return f"{statistics.median(times_ms):.0f} ({min(times_ms):.0f} to {max(times_ms):.0f})"


def _cost(client: "Client", url: str, until_s: float) -> PageCost:
    from django.db import connection

    for _ in range(WARMING):
        client.get(url)
    backend, size = family(connection.connection.info.backend_pid), 0
    python_ms: list[float] = []
    answer_ms: list[float] = []
    before_s = cpu_s(backend)
    while len(python_ms) < VISITS and (time.monotonic() < until_s or len(python_ms) < LEAST_VISITS):
        began_s, asked_s = time.thread_time(), time.monotonic()
        size = len(client.get(url).content)
        python_ms.append(1000 * (time.thread_time() - began_s))
        answer_ms.append(1000 * (time.monotonic() - asked_s))
    postgres_ms = 1000 * (cpu_s(backend) - before_s) / len(python_ms)
    return PageCost(url, size / 1024, tuple(python_ms), postgres_ms, tuple(answer_ms))
