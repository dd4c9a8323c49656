"""What cells of several instance types get of a pool's requests beside what they were tested for: a real HAProxy as its
ingress configures it, cells that slow down as they fill, and callers who ask again as soon as they have their answer.

    .venv/bin/python bench/cell_weights.py

Prints, for each load as a share of what all cells run at once: each cell's part of the requests, how full it was, and
how long requests took. Once as it is, and once with cells that all weigh the same.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine_agent.ingress import desired
from tests.engine_agent.ingress.cells import FakeCell, Request, Writer
from tests.engine_agent.ingress.ingresses import RunningIngress, pool

TESTED = {"p5": 32, "trn1": 16, "inf2": 4}
"""Requests at once by instance type. The ratios are what matters."""
EMPTY_S = 0.25
"""What a request takes in an empty cell; in a full one twice as long, as decode steps do that are bound by memory."""
LOADS = (0.25, 0.5, 0.75, 0.95)
BODY = json.dumps({"model": "demo"}).encode()


class FillingCell(FakeCell):
    """Slower by its share of what it was tested for."""

    async def _generate(self, request: Request, writer: Writer) -> None:
        self.step_s = EMPTY_S * (1 + self.in_flight / self.max_connections)
        await super()._generate(request, writer)


@contextlib.asynccontextmanager
async def routed(home: Path) -> AsyncIterator[tuple[RunningIngress, list[FakeCell]]]:
    async with contextlib.AsyncExitStack() as stack:
        cells: list[FakeCell] = [FillingCell(kind, max_connections=most) for kind, most in TESTED.items()]
        for cell in cells:
            await stack.enter_async_context(cell.running())
        ingress = await stack.enter_async_context(RunningIngress(home).running())
        await ingress.route(pool(*cells))
        await ingress.sees(**{cell.name: "up" for cell in cells})
        yield ingress, cells


async def asked(ingress: RunningIngress, cells: list[FakeCell], callers: int, seconds: float) -> None:
    """Print what one load came to."""
    took: list[float] = []
    answered: Counter[str] = Counter()
    filled: dict[str, list[float]] = {cell.name: [] for cell in cells}
    ends_at = time.monotonic() + seconds

    async def call() -> None:
        while (begins_at := time.monotonic()) < ends_at:
            answer = await ingress.post(BODY)
            answered[answer.headers["x-switchyard-cell"] if answer.status_code == 200 else "refused"] += 1
            took.append(time.monotonic() - begins_at)

    async def look() -> None:
        while time.monotonic() < ends_at:
            for cell in cells:
                filled[cell.name].append(cell.in_flight / cell.max_connections)
            await asyncio.sleep(0.02)

    await asyncio.gather(look(), *(call() for _ in range(callers)))
    total = sum(answered.values())
    parts = ", ".join(
        f"{cell.name} {answered[cell.name] / total:.1%} (full to {statistics.mean(filled[cell.name]):.0%})"
        for cell in cells
    )
    quantiles = statistics.quantiles(took, n=20)
    print(
        f"  {callers:3} at once: {parts}; {answered['refused']} refused; {statistics.median(took) * 1000:.0f} ms at "
        f"the median, {quantiles[-1] * 1000:.0f} ms at p95, {total / seconds:.0f} requests/s"
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=12.0, help="for each load")
    seconds = parser.parse_args().seconds
    whole = sum(TESTED.values())
    print("tested for: " + ", ".join(f"{kind} {most} ({most / whole:.1%})" for kind, most in TESTED.items()))
    for title, weight in (("as they were tested", desired.CELL_WEIGHT), ("all the same", 1)):
        desired.CELL_WEIGHT = weight
        print(f"cells weigh {title}:")
        with tempfile.TemporaryDirectory() as home:
            async with routed(Path(home) / "home") as (ingress, cells):
                for load in LOADS:
                    await asked(ingress, cells, round(load * whole), seconds)


if __name__ == "__main__":
    asyncio.run(main())
