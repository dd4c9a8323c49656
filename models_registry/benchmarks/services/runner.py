"""The benchmark process: draws the requests of a workload, takes the next benchmark, measures point after point and
stores each. The same workload, seed and rate give the same requests. Any number of processes may run and be killed at
any time: the holder of the lease continues from the stored points. It never decides the next rate or the end of a
point; the planner does."""

import asyncio
import csv
import json
import logging
import lzma
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache, partial
from pathlib import Path

import msgspec
from django.db import DatabaseError, connections

from kernel import clock
from kernel.lease_loop import in_thread
from kernel.leases import lease_release, lease_take, this_holder
from models_registry.benchmarks.models import Benchmark
from models_registry.benchmarks.planning.goodput import (
    Found,
    GoodputRules,
    Measure,
    PointVerdict,
    first_rate,
    plan_goodput,
    warm_up_s,
)
from models_registry.benchmarks.planning.measurements import quantile
from models_registry.benchmarks.planning.workload import (
    TRACES,
    Arrival,
    BenchmarkState,
    InvalidWorkload,
    Prompts,
    Workload,
)
from models_registry.benchmarks.selectors import (
    BenchmarkTarget,
    Entrance,
    NoTarget,
    benchmark_entrance,
    benchmark_target,
)
from models_registry.benchmarks.services.benchmark import (
    benchmark_begin,
    benchmark_fail,
    benchmark_finish,
    benchmark_note,
    benchmark_point_add,
    benchmark_rules,
)
from models_registry.benchmarks.services.load import (
    HopelessPoint,
    LoadClient,
    LoadTarget,
    MeasuredPoint,
    Offered,
    Progress,
    measure_point,
)

FOLDER = Path(__file__).resolve().parents[2] / "traces"
BLOCK_TOKENS = 512
FIRST_ID, IDS = 1000, 8000
"""Token ids that every tokenizer of a language model has, after its special ones."""
STATISTICS_OVER = 2000
STRETCH = 200
"""Number of requests for which Poisson arrivals have exactly their rate: the minimum of a point."""


@dataclass(frozen=True, slots=True)
class Request:
    """`due_s`: seconds from the start. `blocks`: names of its prompt's first blocks, of `block_tokens` each."""

    due_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[str, ...] = ()
    block_tokens: int = 0


def requests(workload: Workload, rate: float, seed: int) -> Iterator[Request]:
    """Endless requests in due order; a trace repeats. Raises InvalidWorkload if the trace file is missing on this
    host."""
    chance = random.Random(f"{seed} {workload.digest}")
    due_s = 0.0
    for shape, gap in _shapes(workload, chance):
        due_s += gap / rate
        yield Request(due_s, shape.prompt_tokens, shape.output_tokens, shape.blocks, shape.block_tokens)


def body_of(request: Request, model: str, workload: Workload, own: str) -> bytes:
    """The completion request. Equal blocks give equal text; the rest follows from `own`, which must be unique for this
    engine: otherwise its prefix cache would have the prompt of an earlier point."""
    pieces = [(block, request.block_tokens) for block in request.blocks]
    pieces.append((own, request.prompt_tokens - request.block_tokens * len(request.blocks)))
    ids = [id_ for name, tokens in pieces if tokens > 0 for id_ in _ids(name, tokens)]
    prompt = ids if workload.prompts is Prompts.IDS else " ".join(f"w{id_ % 1000}" for id_ in ids)
    return json.dumps(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if workload.prompts is Prompts.IDS else {}),
        },
        separators=(",", ":"),
    ).encode()


def prefix_statistics(workload: Workload, seed: int) -> dict[str, float]:
    """Figures of the first requests: mean lengths, and the share of prompt tokens in prefixes that were sent before."""
    known: set[tuple[str, ...]] = set()
    prompt = output = repeated = 0
    drawn = requests(workload, 1.0, seed)
    for _ in range(STATISTICS_OVER):
        request = next(drawn)
        prompt, output = prompt + request.prompt_tokens, output + request.output_tokens
        for number in range(1, len(request.blocks) + 1):
            beginning = request.blocks[:number]
            repeated += request.block_tokens if beginning in known else 0
            known.add(beginning)
    return {
        "requests": STATISTICS_OVER,
        "prompt_tokens_mean": round(prompt / STATISTICS_OVER, 1),
        "output_tokens_mean": round(output / STATISTICS_OVER, 1),
        "repeated_share": round(repeated / prompt, 4),
    }


def _shapes(workload: Workload, chance: random.Random) -> Iterator[tuple[Request, float]]:
    """Lengths, and the gap before each in units of the mean gap."""
    recorded = _trace(workload) if workload.source in TRACES else ()
    gaps = arrival_gaps(workload.arrival, random.Random(chance.random()))
    for number, gap in enumerate(gaps):
        if recorded:
            shape, recorded_gap = recorded[number % len(recorded)]
            yield shape, recorded_gap if workload.arrival is Arrival.TRACE else gap
        else:
            yield _draw_request(workload, chance), gap


def arrival_gaps(arrival: Arrival, chance: random.Random) -> Iterator[float]:
    """Endless gaps between requests in units of the mean gap; constant for a trace, which has its own.

    Poisson arrivals come in stretches of exactly the requested rate, as in `vllm bench serve`: otherwise the rate of
    200 requests, and so the result, would be off by 7 %."""
    while True:
        if arrival is not Arrival.POISSON:
            yield 1.0
            continue
        drawn = [chance.expovariate(1.0) for _ in range(STRETCH)]
        mean = sum(drawn) / STRETCH
        yield from (gap / mean for gap in drawn)


def _draw_request(workload: Workload, chance: random.Random) -> Request:
    prompt, output = (
        max(1, round(chance.lognormvariate(math.log(median), workload.sigma))) if workload.sigma else median
        for median in (workload.prompt, workload.output)
    )
    prompt = min(max(prompt, workload.prefix + 1), max(workload.longest, workload.prompt))
    output = min(output, max(workload.longest, workload.output))
    blocks = (f"group {chance.randrange(workload.groups)}",) if workload.prefix else ()
    return Request(0.0, prompt, output, blocks, workload.prefix)


@cache
def _trace(workload: Workload) -> Sequence[tuple[Request, float]]:
    path = FOLDER / TRACES[workload.source]
    try:
        rows = _mooncake(path) if workload.source == "mooncake" else _azure(path)
    except OSError:
        raise InvalidWorkload(f"the trace {path.name} is not on this host; it is part of the source tree") from None
    fitting = [row for row in rows if row.prompt_tokens + row.output_tokens <= workload.longest]
    if len(fitting) < 2:
        raise InvalidWorkload(f"no request of {workload.source} has at most {workload.longest} tokens")
    mean_gap_s = (fitting[-1].due_s - fitting[0].due_s) / (len(fitting) - 1)
    before = [fitting[0], *fitting[:-1]]
    return tuple((row, (row.due_s - last.due_s) / mean_gap_s) for row, last in zip(fitting, before, strict=True))


def _mooncake(path: Path) -> list[Request]:
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        rows = [msgspec.json.decode(line) for line in lines]
    return [
        Request(
            row["timestamp"] / 1000,
            row["input_length"],
            row["output_length"],
            tuple(f"block {id_}" for id_ in row["hash_ids"][: row["input_length"] // BLOCK_TOKENS]),
            BLOCK_TOKENS,
        )
        for row in sorted(rows, key=lambda row: int(row["timestamp"]))
    ]


def _azure(path: Path) -> list[Request]:
    with lzma.open(path, "rt", encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    began = datetime.fromisoformat(rows[0]["TIMESTAMP"][:26])
    return [
        Request(
            (datetime.fromisoformat(row["TIMESTAMP"][:26]) - began).total_seconds(),
            max(1, int(row["ContextTokens"])),
            max(1, int(row["GeneratedTokens"])),
        )
        for row in rows
    ]


def _ids(name: str, tokens: int) -> list[int]:
    drawn = memoryview(random.Random(name).randbytes(2 * tokens)).cast("H")
    return [FIRST_ID + number % IDS for number in drawn]


LEASE = "benchmark"
LEASE_TTL_S = 12.0
LOOK_EVERY_S = 5.0
DATABASE_PAUSE_S = 2.0
MOST_TROUBLES = 3
"""Failed points of one benchmark after which it is given up."""
ALONE = 4
"""Sequential requests that measure the duration of a single one; the first is not counted."""
ALONE_LIMIT_S = 120.0
LATE_SHARE = 0.1
"""Share of the first-token objective: a point counts if the 99th percentile of the generator's delay is below it."""
FOREIGN_SHARE = 0.01
"""Share of requests that cells outside the benchmark may answer."""

log = logging.getLogger(__name__)


class _Ended(Exception):
    """The benchmark has ended, or another process has the lease."""


class BenchmarkRunner:
    def __init__(self, now: Callable[[], datetime] = clock.now, look_every_s: float = LOOK_EVERY_S) -> None:
        self._now = now
        self._look_every_s = look_every_s
        self._holder = this_holder()

    async def run(self, stopping: asyncio.Event) -> None:
        """Measure until `stopping` is set. A point in progress is cancelled; the next process repeats it."""
        working = asyncio.get_running_loop().create_task(self._work())
        stopped = asyncio.get_running_loop().create_task(stopping.wait())
        await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        working.cancel()
        await asyncio.gather(working, stopped, return_exceptions=True)
        await in_thread(partial(lease_release, name=LEASE, holder=self._holder, now=self._now()))
        await in_thread(connections.close_all)

    async def step(self) -> bool:
        """Measure one point, or start or end a benchmark. Returns False if there is none."""
        row = await in_thread(self._claimed_benchmark)
        if row is None:
            return False
        try:
            await self._advance(row)
        except (NoTarget, HopelessPoint, InvalidWorkload) as wrong:
            await in_thread(partial(benchmark_fail, row, str(wrong), self._now()))
        except _Ended:
            log.info("benchmark %s has ended, or another process has its lease", row.pk)
        return True

    async def _work(self) -> None:
        while True:
            pause_s = self._look_every_s
            try:
                if await self.step():
                    continue
            except DatabaseError as error:
                log.warning("the database does not respond, trying again in %g s: %s", DATABASE_PAUSE_S, error)
                pause_s = DATABASE_PAUSE_S
            except Exception:
                log.exception("a benchmark failed; trying again")
            await asyncio.sleep(pause_s)

    def _claimed_benchmark(self) -> Benchmark | None:
        """The running benchmark, else the oldest waiting one, if this process gets the lease."""
        rows = Benchmark.objects.select_related("version")
        row = rows.filter(state=BenchmarkState.RUNNING.value).first()
        row = row or rows.filter(state=BenchmarkState.QUEUED.value).order_by("id").first()
        return row if row is not None and self._take_lease() else None

    def _take_lease(self) -> bool:
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
            await self._store_progress(row, first_rate=first)
        points = await in_thread(lambda: dict(row.points.values_list("rate", "verdict")))
        verdicts = {rate: PointVerdict(verdict) for rate, verdict in points.items()}
        step = plan_goodput(verdicts, row.first_rate or 1.0, rules)
        if isinstance(step, Found):
            await in_thread(partial(benchmark_finish, row, step, self._now()))
        else:
            await self._measure(row, target, load_target, step, rules)

    async def _begin(self, row: Benchmark, target: BenchmarkTarget) -> None:
        if target.version_id != row.version_id:
            raise NoTarget(f"{row.deployment} serves another version now; start a benchmark of that version")
        if target.in_flight and not row.beside_traffic:
            raise NoTarget(
                f"{row.deployment} serves {target.in_flight} requests in {row.region}, which would distort "
                "the result; measure without traffic, or set beside_traffic"
            )
        statistics = await asyncio.to_thread(prefix_statistics, row.parsed_workload(), row.seed)
        await in_thread(partial(benchmark_begin, row, target, statistics, self._now()))

    async def _measure(
        self, row: Benchmark, target: BenchmarkTarget, to: LoadTarget, step: Measure, rules: GoodputRules
    ) -> None:
        slo, mean_tokens = row.parsed_slo(), row.statistics.get("output_tokens_mean", 1.0)
        point = await measure_point(
            to,
            _offered_requests(row, step.rate, to.model),
            step.rate,
            slo,
            rules,
            warm_s=warm_up_s(slo.longest_s(mean_tokens), rules),
            tell=partial(self._report_progress, row, step),
        )
        await in_thread(lambda: _check_same(row, benchmark_target(row.deployment, row.region)))
        if trouble := _invalid_reason(point, target, slo.ttft_s):
            await self._note_trouble(row, trouble)
            return
        judged = point.judgement
        how = "early" if judged.is_early else "at its full length"
        reason = f"{step.reason}; {judged.inside} of {judged.requests} inside, judged {how}"
        await in_thread(partial(benchmark_point_add, row, point, reason, self._now()))

    async def _report_progress(self, row: Benchmark, step: Measure, progress: Progress) -> None:
        words = {
            "rate": step.rate,
            "known": progress.known,
            "expected": progress.expected,
            "inside": progress.inside,
            "reason": step.reason,
        }
        await self._store_progress(row, progress=words)

    async def _store_progress(self, row: Benchmark, **columns: object) -> None:
        def note() -> bool:
            return self._take_lease() and benchmark_note(row, now=self._now(), **columns)

        if not await in_thread(note):
            raise _Ended

    async def _note_trouble(self, row: Benchmark, trouble: str) -> None:
        log.warning("benchmark %s: %s", row.pk, trouble)
        if row.troubles + 1 >= MOST_TROUBLES:
            raise HopelessPoint(f"{trouble}; given up after {MOST_TROUBLES} tries")
        await self._store_progress(row, troubles=row.troubles + 1, reason=f"{trouble}; repeating the point")

    async def _alone_s(self, row: Benchmark, to: LoadTarget) -> float:
        """Duration of a request without concurrent ones. Raises HopelessPoint if it is not answered."""
        client, offered, taken_s = (
            LoadClient(to, asyncio.get_running_loop().time),
            _offered_requests(row, 1.0, to.model),
            [],
        )
        try:
            for _ in range(ALONE):
                _, body, _ = next(offered)
                async with asyncio.timeout(ALONE_LIMIT_S):
                    sample = await client.complete(body, asyncio.get_running_loop().time())
                if not sample.is_whole:
                    raise HopelessPoint(f"a single request got status {sample.status or 'none'}: {sample.error[:300]}")
                taken_s.append(sample.duration_s)
        except TimeoutError:
            raise HopelessPoint(f"a single request was not answered within {ALONE_LIMIT_S:g} s") from None
        finally:
            client.close()
        return quantile(sorted(taken_s[1:]), 0.5)


def _offered_requests(row: Benchmark, rate: float, model: str) -> Iterator[Offered]:
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
    """Raises NoTarget if the cells have changed since the start."""
    now = (target.version_id, target.instance_type, target.fingerprint, len(target.cells))
    if now != (row.version_id, row.instance_type, row.fingerprint, row.cells):
        raise NoTarget(f"version, cells or software of {row.deployment} in {row.region} have changed since the start")


def _invalid_reason(point: MeasuredPoint, target: BenchmarkTarget, ttft_slo_s: float) -> str:
    """Why a point is invalid, empty if it is valid."""
    late = sorted(sample.sent_s - sample.due_s for sample in point.samples)
    if late and quantile(late, 0.99) > LATE_SHARE * ttft_slo_s:
        ms = quantile(late, 0.99) * 1000
        return f"at {point.rate:.4g}/s the generator was {ms:.0f} ms late (99th percentile): its host is too busy"
    ours = {name.partition("#")[0] for name in target.cells}
    foreign = sum(sample.cell not in ours for sample in point.samples if sample.cell)
    if foreign > FOREIGN_SHARE * len(point.samples):
        return (
            f"{foreign} of {len(point.samples)} requests were answered by cells elsewhere; hold the traffic "
            "shares during the benchmark"
        )
    return ""
