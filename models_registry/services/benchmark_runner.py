"""The process of benchmarks: takes the one whose turn it is, measures point after point, and stores each. Any number
may run, and any may be killed at any moment: one has the lease, and goes on from the points that are stored.

It decides nothing: which rate comes next and when a point is over is planned elsewhere.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial

from django.db import DatabaseError, connections

from kernel import clock
from kernel.lease_loop import in_thread
from kernel.leases import lease_release, lease_take, this_holder
from models_registry.models import Benchmark
from models_registry.planning.benchmark import BenchmarkState
from models_registry.planning.goodput import (
    Found,
    GoodputRules,
    Measure,
    PointVerdict,
    first_rate,
    plan_goodput,
    warm_up_s,
)
from models_registry.planning.point_figures import quantile
from models_registry.planning.workload import InvalidWorkload
from models_registry.selectors.benchmark_target import (
    BenchmarkTarget,
    Entrance,
    NoTarget,
    benchmark_entrance,
    benchmark_target,
)
from models_registry.services.benchmark import (
    benchmark_begin,
    benchmark_fail,
    benchmark_finish,
    benchmark_note,
    benchmark_point_add,
    benchmark_rules,
)
from models_registry.services.load_client import LoadClient, LoadTarget
from models_registry.services.point_load import HopelessPoint, MeasuredPoint, Offered, Progress, measure_point
from models_registry.services.workload_requests import body_of, prefix_statistics, requests

LEASE = "benchmark"
LEASE_TTL_S = 12.0
LOOK_EVERY_S = 5.0
DATABASE_PAUSE_S = 2.0
MOST_TROUBLES = 3
"""Points that came to nothing, of one benchmark."""
ALONE = 4
"""Requests one after the other, to know what one alone takes; the first is not counted."""
ALONE_LIMIT_S = 120.0
LATE_SHARE = 0.1
"""Of the objective for the first token: so late may the generator be (99th percentile) for a point to count."""
FOREIGN_SHARE = 0.01
"""Of requests that other cells may have answered."""

log = logging.getLogger(__name__)


class _Ended(Exception):
    """Somebody else ended the benchmark, or has the lease."""


class BenchmarkRunner:
    def __init__(self, now: Callable[[], datetime] = clock.now, look_every_s: float = LOOK_EVERY_S) -> None:
        self._now = now
        self._look_every_s = look_every_s
        self._holder = this_holder()

    async def run(self, stopping: asyncio.Event) -> None:
        """Measure until `stopping` is set; a point under way is cut then, and measured anew by the next process."""
        working = asyncio.get_running_loop().create_task(self._work())
        stopped = asyncio.get_running_loop().create_task(stopping.wait())
        await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        working.cancel()
        await asyncio.gather(working, stopped, return_exceptions=True)
        await in_thread(partial(lease_release, name=LEASE, holder=self._holder, now=self._now()))
        await in_thread(connections.close_all)

    async def step(self) -> bool:
        """Measure one point, or begin or end a benchmark. False: there is nothing to do here."""
        row = await in_thread(self._claimed)
        if row is None:
            return False
        try:
            await self._advance(row)
        except (NoTarget, HopelessPoint, InvalidWorkload) as wrong:
            await in_thread(partial(benchmark_fail, row, str(wrong), self._now()))
        except _Ended:
            log.info("benchmark %s was ended, or is another process's", row.pk)
        return True

    async def _work(self) -> None:
        while True:
            pause_s = self._look_every_s
            try:
                if await self.step():
                    continue
            except DatabaseError as error:
                log.warning("the database does not answer, going on in %g s: %s", DATABASE_PAUSE_S, error)
                pause_s = DATABASE_PAUSE_S
            except Exception:
                log.exception("a benchmark could not go on; trying again")
            await asyncio.sleep(pause_s)

    def _claimed(self) -> Benchmark | None:
        """The benchmark that runs, else the oldest that waits, if it is ours."""
        rows = Benchmark.objects.select_related("version")
        row = rows.filter(state=BenchmarkState.RUNNING.value).first()
        row = row or rows.filter(state=BenchmarkState.QUEUED.value).order_by("id").first()
        return row if row is not None and self._take() else None

    def _take(self) -> bool:
        return lease_take(name=LEASE, holder=self._holder, ttl_s=LEASE_TTL_S, now=self._now()) is not None

    async def _advance(self, row: Benchmark) -> None:
        target = await in_thread(partial(benchmark_target, row.deployment, row.region))
        if row.state == BenchmarkState.QUEUED.value:
            await self._begin(row, target)
            return
        _check_same(row, target)
        rules = benchmark_rules(row.rules)
        entrance = await in_thread(partial(benchmark_entrance, row.deployment, row.region))
        load_target = _load_target(entrance)
        if row.first_rate is None:
            at_once = row.version.spec().on(row.instance_type).max_concurrency
            first = first_rate(await self._alone_s(row, load_target), at_once * row.cells, rules)
            await self._note(row, first_rate=first)
        points = await in_thread(lambda: dict(row.points.values_list("rate", "verdict")))
        verdicts = {rate: PointVerdict(verdict) for rate, verdict in points.items()}
        step = plan_goodput(verdicts, row.first_rate or 1.0, rules)
        if isinstance(step, Found):
            await in_thread(partial(benchmark_finish, row, step, self._now()))
        else:
            await self._measure(row, target, load_target, step, rules)

    async def _begin(self, row: Benchmark, target: BenchmarkTarget) -> None:
        if target.version_id != row.version_id:
            raise NoTarget(f"{row.deployment} serves another version by now; ask again for the one that runs")
        if target.in_flight and not row.beside_traffic:
            raise NoTarget(
                f"{row.deployment} serves {target.in_flight} requests in {row.region}, which would count with ours; "
                "measure where nobody asks, or say beside_traffic"
            )
        statistics = await asyncio.to_thread(prefix_statistics, row.parsed_workload(), row.seed)
        await in_thread(partial(benchmark_begin, row, target, statistics, self._now()))

    async def _measure(
        self, row: Benchmark, target: BenchmarkTarget, to: LoadTarget, step: Measure, rules: GoodputRules
    ) -> None:
        slo, mean_tokens = row.parsed_slo(), row.statistics.get("output_tokens_mean", 1.0)
        point = await measure_point(
            to,
            _offered(row, step.rate, to.model),
            step.rate,
            slo,
            rules,
            warm_s=warm_up_s(slo.longest_s(mean_tokens), rules),
            tell=partial(self._tell, row, step),
        )
        await in_thread(lambda: _check_same(row, benchmark_target(row.deployment, row.region)))
        if trouble := _trouble(point, target, slo.ttft_s):
            await self._note_trouble(row, trouble)
            return
        judged = point.judgement
        how = "early" if judged.is_early else "after its length"
        reason = f"{step.reason}; {judged.inside} of {judged.requests} inside, judged {how}"
        await in_thread(partial(benchmark_point_add, row, point, reason, self._now()))

    async def _tell(self, row: Benchmark, step: Measure, progress: Progress) -> None:
        words = {
            "rate": step.rate,
            "known": progress.known,
            "expected": progress.expected,
            "inside": progress.inside,
            "reason": step.reason,
        }
        await self._note(row, progress=words)

    async def _note(self, row: Benchmark, **columns: object) -> None:
        def note() -> bool:
            return self._take() and benchmark_note(row, now=self._now(), **columns)

        if not await in_thread(note):
            raise _Ended

    async def _note_trouble(self, row: Benchmark, trouble: str) -> None:
        log.warning("benchmark %s: %s", row.pk, trouble)
        if row.troubles + 1 >= MOST_TROUBLES:
            raise HopelessPoint(f"{trouble}; given up after {MOST_TROUBLES} tries")
        await self._note(row, troubles=row.troubles + 1, reason=f"{trouble}; measured again")

    async def _alone_s(self, row: Benchmark, to: LoadTarget) -> float:
        """How long one request takes where there is no other.

        Raises:
            HopelessPoint: it is not answered.
        """
        client, offered, taken_s = LoadClient(to, asyncio.get_running_loop().time), _offered(row, 1.0, to.model), []
        try:
            for _ in range(ALONE):
                _, body, _ = next(offered)
                async with asyncio.timeout(ALONE_LIMIT_S):
                    sample = await client.complete(body, asyncio.get_running_loop().time())
                if not sample.is_whole:
                    raise HopelessPoint(f"a request alone got status {sample.status or 'none'}: {sample.error[:300]}")
                taken_s.append(sample.duration_s)
        except TimeoutError:
            raise HopelessPoint(f"a request alone was not answered within {ALONE_LIMIT_S:g} s") from None
        finally:
            client.close()
        return quantile(sorted(taken_s[1:]), 0.5)


def _offered(row: Benchmark, rate: float, model: str) -> Iterator[Offered]:
    workload = row.parsed_workload()
    for number, request in enumerate(requests(workload, rate, row.seed)):
        own = f"{row.pk} {row.troubles} {rate} {number}"
        yield request.due_s, body_of(request, model, workload, own), request.output_tokens


def _load_target(entrance: Entrance) -> LoadTarget:
    return LoadTarget(
        entrance.host,
        entrance.port,
        entrance.model,
        headers=entrance.headers,
        tls=entrance.tls,
        server_name=entrance.server_name,
    )


def _check_same(row: Benchmark, target: BenchmarkTarget) -> None:
    """
    Raises:
        NoTarget: what is measured is not what it was as it began.
    """
    now = (target.version_id, target.instance_type, target.fingerprint, len(target.cells))
    if now != (row.version_id, row.instance_type, row.fingerprint, row.cells):
        raise NoTarget(f"{row.deployment} in {row.region} is not what it was: version, cells or software have changed")


def _trouble(point: MeasuredPoint, target: BenchmarkTarget, ttft_slo_s: float) -> str:
    """Why a point says nothing, empty if it does."""
    late = sorted(sample.sent_s - sample.due_s for sample in point.samples)
    if late and quantile(late, 0.99) > LATE_SHARE * ttft_slo_s:
        ms = quantile(late, 0.99) * 1000
        return f"at {point.rate:.4g}/s the generator was {ms:.0f} ms late (99th percentile): its host is too busy"
    ours = {name.partition("#")[0] for name in target.cells}
    foreign = sum(sample.cell not in ours for sample in point.samples if sample.cell)
    if foreign > FOREIGN_SHARE * len(point.samples):
        return f"{foreign} of {len(point.samples)} requests were answered by cells elsewhere; hold its shares meanwhile"
    return ""
