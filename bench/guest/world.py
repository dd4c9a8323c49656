"""One cell on virtual time: the simulator engine's own time model, real-time requests of the Azure trace, and batch
lines of which there are always more. Deterministic by its seed; it leaves out network and proxies, which cost a
millisecond where a step costs tens."""

import random
from dataclasses import dataclass, field
from functools import cache

from bench.guest.rules import CellState, Rule
from bench.traffic.arrivals import Arrival, azure
from engine_agent.engines.sim.batching import BatchingModel, ModelParameters, Sequence
from engine_agent.proxy.batch_window import MIN_ITLS, MIN_TTFTS, STEER_EVERY_S, RealtimeLatency

CELL = ModelParameters(kv_capacity_tokens=400_000, prefix_block_tokens=0)
"""A 70B model on a node of eight accelerators, with room for what its 64 sequences need."""
LONGEST = 8192
"""Prompt and answer of a real-time request, in tokens: what a cell's version takes."""
PROMPT, ANSWER = 1500, 200
"""Of a batch line in the mean, in tokens; both vary by half."""


@dataclass(frozen=True)
class Load:
    """What comes: real-time requests a second in the mean, from a stretch of the trace that the seed chooses. From
    `surge_at_s` on, `surge` times as many. Batch lines come from `batch_from_s` on: before that a cell learns what its
    real-time requests feel without. Nothing of the first `warm_up_s` counts."""

    rate: float = 1.2
    batch_from_s: float = 40.0
    warm_up_s: float = 70.0
    measured_s: float = 60.0
    surge: float = 1.0
    surge_at_s: float = 0.0

    @property
    def ends_s(self) -> float:
        return self.warm_up_s + self.measured_s


@dataclass
class Counts:
    """Milliseconds, as how many of each there were."""

    by_ms: dict[int, int] = field(default_factory=dict)

    def add(self, seconds: float) -> None:
        ms = round(seconds * 1000)
        self.by_ms[ms] = self.by_ms.get(ms, 0) + 1

    def merge(self, other: "Counts") -> None:
        for ms, count in other.by_ms.items():
            self.by_ms[ms] = self.by_ms.get(ms, 0) + count

    @property
    def total(self) -> int:
        return sum(self.by_ms.values())

    def quantile_ms(self, share: float) -> int:
        wanted, seen = share * self.total, 0
        for ms in sorted(self.by_ms):
            seen += self.by_ms[ms]
            if seen >= wanted:
                return ms
        return 0


@dataclass
class Measured:
    """Of one run or of many. `tokens` are those of batch answers; `firsts` when each real-time request that counts had
    its first token, in seconds after it came, by when it came."""

    ttft: Counts = field(default_factory=Counts)
    itl: Counts = field(default_factory=Counts)
    tokens: int = 0
    lines: int = 0
    seconds: float = 0.0
    windows: list[int] = field(default_factory=list)
    firsts: list[tuple[float, float]] = field(default_factory=list)

    def merge(self, other: "Measured") -> None:
        self.ttft.merge(other.ttft)
        self.itl.merge(other.itl)
        self.tokens += other.tokens
        self.lines += other.lines
        self.seconds += other.seconds
        self.windows += other.windows

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@cache
def _trace() -> list[Arrival]:
    return azure()


def realtime_of(load: Load, chance: random.Random) -> list[Arrival]:
    """A stretch of the trace, thinned to the rate; a surge thins it less."""
    trace = _trace()
    per_s = len(trace) / trace[-1].at_s
    begin_s = chance.uniform(0, trace[-1].at_s - load.ends_s)
    taken = []
    for each in trace:
        at_s = each.at_s - begin_s
        surge = load.surge if load.surge_at_s and at_s >= load.surge_at_s else 1.0
        if 0 <= at_s < load.ends_s and chance.random() < load.rate * surge / per_s:
            prompt = min(each.prompt_tokens, LONGEST - 512)
            taken.append(Arrival(at_s, prompt, min(each.output_tokens, LONGEST - prompt)))
    return taken


class Cell:
    """One run."""

    def __init__(self, rule: Rule, load: Load, seed: int, cell: ModelParameters = CELL) -> None:
        chance = random.Random(seed)
        self._rule, self._load = rule, load
        self._coming = realtime_of(load, chance)
        self._lines = random.Random(seed + 1)
        self._model = BatchingModel(rule.parameters(ModelParameters(**{**vars(cell), "seed": seed})))
        self._arrived: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._batch: set[str] = set()
        self._unread: set[str] = set()
        self._ttfts: list[float] = []
        self._itls: list[float] = []
        self._had_batch = False
        self._steered_s = 0.0
        self._numbers = 0
        self._urgent = 0
        self.measured = Measured(seconds=load.measured_s)
        self.most_urgent = 0
        """Real-time requests in flight at once, at most."""

    def run(self) -> Measured:
        """To the end of the load; what is not answered by then is left."""
        now_s, taken = 0.0, 0
        while now_s < self._load.ends_s:
            while taken < len(self._coming) and self._coming[taken].at_s <= now_s:
                self._submit(self._coming[taken], taken)
                taken += 1
            self._steer(now_s)
            self._top_up(now_s)
            step = self._model.begin_step(now_s)
            if step is not None:
                now_s = step.ends_at_s
                for token in self._model.finish_step():
                    self._give(token.sequence, token.index, token.is_last, now_s)
            elif taken < len(self._coming):
                now_s = self._coming[taken].at_s
            else:
                break
        return self.measured

    def _submit(self, arrival: Arrival, number: int) -> None:
        name = f"r{number}"
        self._arrived[name] = arrival.at_s
        self._urgent += 1
        self.most_urgent = max(self.most_urgent, self._urgent)
        self._model.submit(Sequence(name, arrival.prompt_tokens, arrival.output_tokens))

    def _top_up(self, now_s: float) -> None:
        while now_s >= self._load.batch_from_s and self._rule.admits(
            CellState(
                now_s,
                len(self._batch),
                len(self._unread),
                self._model.waiting,
                self._model.kv_reserved_tokens / self._model.parameters.kv_capacity_tokens,
            )
        ):
            name = f"b{self._numbers}"
            self._numbers += 1
            prompt, answer = (round(mean * self._lines.uniform(0.5, 1.5)) for mean in (PROMPT, ANSWER))
            self._batch.add(name)
            self._unread.add(name)
            self._had_batch = True
            self._model.submit(Sequence(name, prompt, answer, self._rule.priority))

    def _give(self, name: str, index: int, is_last: bool, now_s: float) -> None:
        counts = now_s >= self._load.warm_up_s
        if name in self._batch:
            self._unread.discard(name)
            self.measured.tokens += counts
            if is_last:
                self._batch.discard(name)
                self.measured.lines += counts
            return
        self._urgent -= is_last
        if index == 0:
            ttft_s = now_s - self._arrived[name]
            self._ttfts.append(ttft_s)
            if self._arrived[name] >= self._load.warm_up_s:
                self.measured.ttft.add(ttft_s)
                self.measured.firsts.append((self._arrived[name], ttft_s))
        else:
            itl_s = now_s - self._last[name]
            self._itls.append(itl_s)
            if counts:
                self.measured.itl.add(itl_s)
        self._last[name] = now_s

    def _steer(self, now_s: float) -> None:
        if now_s - self._steered_s < STEER_EVERY_S:
            return
        self._steered_s = now_s
        latency = RealtimeLatency(_p95(self._ttfts, MIN_TTFTS), _p95(self._itls, MIN_ITLS))
        self._rule.steer(latency, had_batch=self._had_batch)
        self.measured.windows.append(len(self._batch))
        self._ttfts, self._itls, self._had_batch = [], [], bool(self._batch)


def _p95(values: list[float], least: int) -> float | None:
    return sorted(values)[int(0.95 * len(values))] if len(values) >= least else None
